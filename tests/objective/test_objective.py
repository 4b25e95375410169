"""The factorised loss against naive loops written from the formulas."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_tools import blocks_of, naive_weights, random_scores, ratio, setup_loss

from dscout_jax.errors import UserError
from dscout_jax.objective import (
    Objective,
    dflash,
    dscout,
    factorized_loss,
    inclusion,
    prediction,
    published_dscout,
    weighting,
)
from dscout_jax.objective.weighting import Scores

# Of awl, beside those that have a name of their own.
SWITCHES = [("hit", "exclusive"), ("hit", "inclusive"), ("overlap", "inclusive"), ("overlap", "suffix")]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("exclusive", lambda eps: weighting.awl(eps=eps)),
        ("inclusive", lambda eps: weighting.awl(prefix="inclusive", eps=eps)),
        ("suffix", lambda eps: weighting.awl(prefix="suffix", eps=eps)),
        ("suffix", weighting.dpace),
        ("auf", lambda eps: weighting.auf),
        ("auf", lambda eps: weighting.awl("hit", eps=0.0)),
        *((f"{score} {prefix}", partial(weighting.awl, score, prefix)) for score, prefix in SWITCHES),
    ],
)
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_weightings_equal_naive_loops(kind, make, eps):
    score, _, prefix = kind.rpartition(" ")
    for seed in range(5):
        scores = random_scores(seed)
        got = np.asarray(make(eps)(scores)) * np.asarray(scores.mask)
        expected = naive_weights(scores, prefix, eps, score or "probability")
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_decay_is_dflash_and_first_error_adds_to_it():
    scores = random_scores(0, (2, 3, 16))
    np.testing.assert_allclose(weighting.decay()(scores)[0, 0, 1:], np.exp(-np.arange(15) / 7), rtol=1e-6)
    extra = np.asarray(weighting.first_error(extra=0.3)(scores) - weighting.decay()(scores))
    wrong = np.asarray(scores.mask & ~scores.hit)
    expected = np.zeros(wrong.shape)
    for b, n in np.ndindex(2, 3):
        expected[b, n, np.flatnonzero(wrong[b, n])[:1]] = 0.3
    np.testing.assert_allclose(extra, expected, atol=1e-6)
    assert expected.any()


@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("make", [dflash, published_dscout, dscout])
def test_loss_equals_a_naive_loop(make, chunk):
    objective = make(8)
    hidden, head, blocks, _ = setup_loss(N=13, horizon=objective.horizon, unmask=objective.unmask)
    logq = np.asarray(jax.nn.log_softmax(hidden @ head.T))
    logp = np.take_along_axis(logq, np.asarray(blocks.labels)[..., None], -1)[..., 0]
    scores = Scores(jnp.asarray(logp), jnp.zeros_like(blocks.mask), blocks.mask, blocks.revealed)
    w = np.asarray(blocks.mask, float)
    if objective.name != "published-dscout":
        w *= np.exp(-(np.arange(8) - 1) / 4)
    if objective.name != "dflash":
        w *= naive_weights(scores, "exclusive", 0.25 if objective.name == "dscout" else 0.5)
    expected = (w * -logp).sum() / w.sum()
    np.testing.assert_allclose(ratio(objective, hidden, head, blocks, chunk=chunk), expected, rtol=1e-5)


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv"])
def test_soft_losses_equal_their_formulas(loss):
    hidden, head, blocks, target_hidden = setup_loss()
    objective = dataclasses.replace(
        dflash(8), prediction=getattr(prediction, loss), weighting=weighting.uniform
    )
    total, count = 0.0, 0
    for b, n, k in zip(*np.nonzero(np.asarray(blocks.mask)), strict=True):
        q = np.asarray(jax.nn.softmax(hidden[b, n, k] @ head.T))
        p = np.asarray(jax.nn.softmax(target_hidden[b, int(blocks.anchors[b, n]) + k - 1] @ head.T))
        cost = {"soft_ce": -(p * np.log(q)), "kl": p * np.log(p / q), "tv": p - np.minimum(p, q)}[loss]
        total, count = total + cost.sum(), count + 1
    got = ratio(objective, hidden, head, blocks, target_hidden)
    np.testing.assert_allclose(got, total / count, rtol=1e-4, atol=1e-6)


PARTS = [(0.5, prediction.ce), (0.25, prediction.kl), (2.0, prediction.tv)]


@pytest.mark.parametrize("loss", ["soft_ce", "kl", "tv", "mixture"])
def test_gradients_of_soft_losses_equal_those_of_their_formulas(loss):
    hidden, head, blocks, target_hidden = setup_loss()
    kind = prediction.mixture(PARTS) if loss == "mixture" else getattr(prediction, loss)
    objective = dataclasses.replace(dflash(8), prediction=kind)
    logp = log_rows(target_rows(target_hidden, blocks), head)
    w = jnp.exp(-(jnp.arange(8) - 1) / 4) * blocks.mask

    def naive(h):
        logq = log_rows(h, head)
        p, q = jnp.exp(logp), jnp.exp(logq)
        costs = {
            "ce": -of_label(logq, blocks),
            "soft_ce": -(p * logq).sum(-1),
            "kl": (p * (logp - logq)).sum(-1),
            "tv": jnp.abs(p - q).sum(-1) / 2,
        }
        cost = costs.get(loss, 0.5 * costs["ce"] + 0.25 * costs["kl"] + 2.0 * costs["tv"])
        return (w * cost).sum() / w.sum()

    mine = jax.value_and_grad(lambda h: ratio(objective, h, head, blocks, target_hidden, chunk=7))(hidden)
    theirs = jax.value_and_grad(naive)(hidden)
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-5)
    np.testing.assert_allclose(mine[1], theirs[1], atol=1e-6)
    assert np.abs(mine[1]).max() > 1e-3


def test_weights_carry_no_gradient():
    objective = published_dscout(8)
    hidden, head, blocks, _ = setup_loss(horizon=objective.horizon)

    def with_frozen_weights(h):
        logp = jnp.take_along_axis(jax.nn.log_softmax(h @ head.T), blocks.labels[..., None], -1)[..., 0]
        fixed = jnp.take_along_axis(jax.nn.log_softmax(hidden @ head.T), blocks.labels[..., None], -1)[..., 0]
        scores = Scores(fixed, jnp.zeros_like(blocks.mask), blocks.mask, blocks.revealed)
        w = objective.weighting(scores) * blocks.mask
        return (w * -logp).sum() / w.sum()

    got = jax.grad(lambda h: ratio(objective, h, head, blocks))(hidden)
    np.testing.assert_allclose(got, jax.grad(with_frozen_weights)(hidden), atol=1e-6)


@pytest.mark.parametrize("kind", [weighting.awl("overlap"), weighting.confidence])
def test_weights_of_the_targets_side_carry_no_gradient(kind):
    objective = Objective("x", inclusion.fixed(8), weighting=kind)
    hidden, head, blocks, target_hidden = setup_loss()
    logq, logp = log_rows(hidden, head), log_rows(target_rows(target_hidden, blocks), head)
    scores = Scores(
        of_label(logq, blocks),
        jnp.argmax(logq, -1) == blocks.labels,
        blocks.mask,
        blocks.revealed,
        jnp.minimum(jnp.exp(logq), jnp.exp(logp)).sum(-1),
        of_label(logp, blocks),
    )
    fixed = np.asarray(kind(scores) * blocks.mask)

    def with_frozen_weights(h):
        return (fixed * -of_label(log_rows(h, head), blocks)).sum() / fixed.sum()

    mine, other = jax.grad(lambda *h: ratio(objective, h[0], head, blocks, h[1]), argnums=(0, 1))(
        hidden, target_hidden
    )
    np.testing.assert_allclose(mine, jax.grad(with_frozen_weights)(hidden), atol=1e-6)
    assert not other.any() and np.abs(mine).max() > 1e-3


def log_rows(hidden, head):
    return jax.nn.log_softmax(hidden @ head.T)


def of_label(logs, blocks):
    return jnp.take_along_axis(logs, blocks.labels[..., None], -1)[..., 0]


def target_rows(target_hidden, blocks):
    """The target's hidden state before each slot."""
    before = jnp.maximum(blocks.anchors[..., None] + jnp.arange(blocks.mask.shape[-1]) - 1, 0)
    return target_hidden[jnp.arange(len(before))[:, None, None], before]


def test_a_bound_on_rows_changes_nothing_when_it_holds_all():
    objective = published_dscout(8)
    hidden, head, blocks, _ = setup_loss(horizon=objective.horizon)
    a = factorized_loss(objective, hidden, head, blocks)
    b = factorized_loss(objective, hidden, head, blocks, rows_per_sequence=16)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_no_valid_anchor_gives_zero_sums_and_gradients():
    blocks = blocks_of(np.zeros((2, 30), int), np.zeros((2, 30), bool))
    hidden, head = jnp.ones((2, 4, 8, 16)), jnp.ones((50, 16))
    objective = published_dscout(8)
    value, grads = jax.value_and_grad(lambda h: factorized_loss(objective, h, head, blocks).numerator)(hidden)
    assert value == 0 and not grads.any()


def test_prefix_survival_and_accuracy_are_sums_over_bare_blocks():
    hidden, head, blocks, _ = setup_loss(unmask=inclusion.prefix_unmasking())
    right = jax.random.bernoulli(jax.random.key(5), 0.7, blocks.mask.shape)
    hidden = jnp.where(right[..., None], head[blocks.labels], hidden)  # most labels are the argmax
    slots = factorized_loss(dflash(8), hidden, head, blocks).slots
    hit = np.asarray(jnp.argmax(hidden @ head.T, -1) == blocks.labels)
    mask, revealed = np.asarray(blocks.mask), np.asarray(blocks.revealed)
    bare = ~revealed.any(-1)
    for k in range(1, 8):
        rows = [(b, n) for b, n in np.ndindex(2, 4) if bare[b, n] and mask[b, n, k]]
        assert slots["reach"][k] == len(rows)
        assert slots["survived"][k] == sum(hit[b, n, 1 : k + 1].all() for b, n in rows)
        assert slots["hits"][k] == (hit & mask)[..., k].sum()
        assert slots["bare_hits"][k] == sum(hit[b, n, k] for b, n in rows)
    assert (slots["bare_hits"] < slots["hits"]).any()
    pull = (jax.nn.softmax(hidden @ head.T) - jax.nn.one_hot(blocks.labels, len(head))) @ head
    expected = (np.linalg.norm(pull, axis=-1) * mask * np.exp(-(np.arange(8) - 1) / 4)).sum((0, 1))
    np.testing.assert_allclose(slots["gradient"], expected, rtol=1e-4)


@pytest.mark.parametrize("kind", [prediction.ce, prediction.soft_ce])
def test_logits_of_all_blocks_never_exist(kind):
    hidden, head = jnp.zeros((4, 64, 8, 16)), jnp.zeros((4096, 16))
    blocks = blocks_of(np.zeros((4, 200), int), np.ones((4, 200), bool), N=64)
    objective = dataclasses.replace(dflash(8), prediction=kind)
    target_hidden = jnp.zeros((4, 200, 16)) if kind.sees_target else None

    def loss(h, t):
        return factorized_loss(objective, h, head, blocks, t, chunk=32).numerator

    memory = jax.jit(jax.grad(loss)).lower(hidden, target_hidden).compile().memory_analysis()
    everything = 4 * 64 * 7 * 4096 * 4
    assert memory.temp_size_in_bytes < everything / 4


@pytest.mark.parametrize("make", [lambda: weighting.awl("overlap"), lambda: weighting.confidence])
def test_weightings_that_see_the_target_go_with_any_prediction(make):
    hidden, head, blocks, target_hidden = setup_loss()
    objective = Objective("x", inclusion.fixed(8), weighting=make())
    logq, logp = (np.asarray(jax.nn.log_softmax(h @ head.T)) for h in (hidden, target_hidden))
    mask, total, weight = np.asarray(blocks.mask), 0.0, 0.0
    for b, n in np.ndindex(*mask.shape[:2]):
        reach = 1.0
        for k in np.flatnonzero(mask[b, n]):
            q, p = logq[b, n, k], logp[b, int(blocks.anchors[b, n]) + k - 1]
            y = int(blocks.labels[b, n, k])
            total, weight = total + reach * -q[y], weight + reach
            overlap = 0.5 + 0.5 * np.minimum(np.exp(p), np.exp(q)).sum()
            reach *= np.exp(p[y]) if objective.weighting is weighting.confidence else overlap
    got = ratio(objective, hidden, head, blocks, target_hidden)
    np.testing.assert_allclose(got, total / weight, rtol=1e-4)


def test_chain_adds_over_rows_and_has_its_gradient():
    objective = dataclasses.replace(dflash(8), chain=0.5)
    hidden, head, blocks, _ = setup_loss()

    def naive(h):
        logq = jax.nn.log_softmax(h @ head.T)
        logp = jnp.take_along_axis(logq, blocks.labels[..., None], -1)[..., 0]
        w = jnp.exp(-(jnp.arange(8) - 1) / 4) * blocks.mask
        total = (w * -logp).sum()
        for b, n in np.ndindex(2, 4):
            slots = np.flatnonzero(np.asarray(blocks.mask[b, n]))
            reach = [jnp.exp(logp[b, n, slots[: i + 1]].sum()) for i in range(len(slots))]
            if reach:
                total -= 0.5 * w[b, n].sum() * jnp.stack(reach).mean()
        return total

    def ours(h):
        return factorized_loss(objective, h, head, blocks).numerator

    np.testing.assert_allclose(ours(hidden), naive(hidden), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(ours)(hidden), jax.grad(naive)(hidden), atol=1e-5)
    halves = [
        factorized_loss(objective, hidden[i : i + 1], head, jax.tree.map(lambda a, i=i: a[i : i + 1], blocks))
        for i in range(2)
    ]
    np.testing.assert_allclose(sum(half.numerator for half in halves), ours(hidden), rtol=1e-5)


def test_more_slots_than_the_bound_on_rows_is_never_a_low_loss():
    hidden, head, blocks, _ = setup_loss()
    assert np.isnan(ratio(dflash(8), hidden, head, blocks, rows_per_sequence=5))


def test_illegal_combinations_are_refused():
    with pytest.raises(UserError, match="must be a probability"):
        weighting.awl("hit", "suffix")
    with pytest.raises(UserError, match="exceed the block size"):
        blocks_of(np.zeros((1, 30), int), np.ones((1, 30), bool), horizon=inclusion.fixed(9))
    for wrong, said in (
        (lambda: weighting.decay(0), "gamma 0"),
        (lambda: weighting.decay(-1.0), "gamma -1.0"),
        (lambda: weighting.first_error(gamma=-2.0), "gamma -2.0"),
        (lambda: weighting.first_error(extra=-0.1), "extra -0.1"),
        (lambda: dataclasses.replace(dflash(8), chain=-0.5), "chain -0.5"),
        (lambda: prediction.mixture([(1.0, prediction.ce), (-1.0, prediction.kl)]), "-1.0"),
        (lambda: prediction.mixture([]), "at least one"),
    ):
        with pytest.raises(UserError, match=said):
            wrong()
    hidden, head, blocks, target_hidden = setup_loss()
    for name in ("overlap", "target_logp"):
        silent = Objective("x", inclusion.fixed(8), weighting=lambda scores, n=name: getattr(scores, n) ** 2)
        with pytest.raises(UserError, match=f"scores.{name}.*@sees_target"):
            factorized_loss(silent, hidden, head, blocks, target_hidden)
    for blind in (weighting.awl("overlap"), weighting.confidence):
        with pytest.raises(UserError, match="hidden states"):
            factorized_loss(Objective("x", inclusion.fixed(8), weighting=blind), hidden, head, blocks)


def test_a_product_of_weightings_sees_what_its_parts_see():
    assert not getattr(weighting.product(weighting.decay(), weighting.awl()), "sees_target", False)
    both = weighting.product(weighting.decay(), weighting.confidence)
    assert Objective("x", inclusion.fixed(8), weighting=both).sees_target
