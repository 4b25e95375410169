"""Draws follow the target's distribution, whatever is proposed, and hang on seed and position alone."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS, bigger
from scipy.stats import chi2

from dscout_jax import ops
from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.decode import Decoder, Proposals, Request, Sampling, make_loop, mat, prefill
from dscout_jax.decode.batch import Shape, pad
from dscout_jax.decode.sampling import allowed_logits
from dscout_jax.errors import UserError
from dscout_jax.models import Drafter, Target, target_head

V, PROMPT, TOKENS = 8, [3, 1], 4
CONFIDENCE = 0.3  # of the tiny drafter: above it in some rounds, below in others
EACH, PARTS = 17_000, 6  # answers of each setting in a batch, and batches: 102,000 of each
SETTINGS = (
    Sampling(0.5),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, top_p=0.8),
    Sampling(1.0, top_k=3),
    Sampling(0.9, top_k=6, top_p=0.95, min_p=0.08),
)


def naive(logits, s):
    """The distribution of one row by sorting, in float64."""
    z = np.asarray(logits, np.float64) / s.temperature
    order = np.argsort(-z, kind="stable")
    kept = order[: s.top_k] if s.top_k else order
    p = np.exp(z[kept] - z[kept].max())
    p /= p.sum()
    if s.top_p < 1:
        kept = kept[: int(np.argmax(np.cumsum(p) >= s.top_p)) + 1]
    kept = kept[z[kept] >= z.max() + np.log(max(s.min_p, 1e-300))]
    out = np.zeros(len(z))
    out[kept] = np.exp(z[kept] - z[kept].max())
    return out / out.sum()


def columns(settings):
    return Sampling(*(jnp.array(c) for c in zip(*settings, strict=True)))


def test_filters_equal_sorting():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (300, 1, 50)).astype(np.float32)
    settings = [
        Sampling(t, int(k), p, m)
        for t, k, p, m in zip(
            rng.uniform(0.2, 2, 300),
            rng.integers(0, 60, 300),
            np.where(rng.random(300) < 0.5, 1, rng.uniform(0.05, 1, 300)),
            np.where(rng.random(300) < 0.5, 0, rng.uniform(0, 1, 300)),
            strict=True,
        )
    ]
    got = jax.nn.softmax(jax.jit(allowed_logits)(logits, columns(settings)))[:, 0]
    expected = [naive(row[0], s) for row, s in zip(logits, settings, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    equal = jnp.array([[[1.0, 2.0, 2.0, 0.0]]])
    kept = jnp.isfinite(allowed_logits(equal, columns([Sampling(1.0, top_k=1)])))
    assert kept.tolist() == [[[False, True, True, False]]], "equals at a border stay together"


class Draws(NamedTuple):
    """tokens [settings, count, TOKENS]; of the first round: drafts accepted [settings, count], the first
    proposal [settings, count] and what it was drawn from [settings, count, V]."""

    tokens: np.ndarray
    first: np.ndarray
    ids: np.ndarray | None
    probs: np.ndarray | None


@pytest.fixture(scope="module")
def models():
    target = Target(TargetConfig(V, 16, 24, 2, 2, 1, 8, 1e-6, RopeConfig(1e4), 64, True, False))
    shapes = dict(num_layers=1, block_size=4, mask_token_id=V - 1, target_layer_ids=(0,))
    drafter = Drafter(DrafterConfig.for_target(target.config, **shapes))
    params = bigger(target.init(jax.random.key(3), jnp.zeros((1, 2), jnp.int32))["params"])
    block = jnp.zeros((1, 1, 4, 16))
    variables = drafter.init(jax.random.key(4), jnp.zeros((1, 2, 16)), block, jnp.ones((1, 1), jnp.int32))
    return target, params, drafter, bigger(variables["params"])


@pytest.fixture(scope="module")
def exact(models):
    """[settings, V, V, V, V]: the joint distribution of the first four tokens, by enumeration."""
    target, params, *_ = models
    ends = np.stack(np.meshgrid(*[np.arange(V)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    tokens = np.concatenate([np.tile(PROMPT, (V**3, 1)), ends], axis=1).astype(np.int32)
    hidden = target.apply({"params": params}, tokens).hidden[:, len(PROMPT) - 1 :]
    logits = np.asarray(hidden @ params["lm_head"]["weight"].T)
    steps = np.array([[[naive(z, s) for z in row] for row in logits] for s in SETTINGS])
    p = steps.reshape(len(SETTINGS), V, V, V, TOKENS, V)
    joint = p[:, 0, 0, 0, 0][:, :, None, None, None] * p[:, :, 0, 0, 1][:, :, :, None, None]
    joint = joint * p[:, :, :, 0, 2][..., None] * p[:, :, :, :, 3]
    np.testing.assert_allclose(joint.sum(axis=(1, 2, 3, 4)), 1)
    return joint


def draw(models, parts=PARTS, **options):
    """`parts` batches of EACH answers of every setting, each row by its own seed."""
    target, params, drafter, drafter_params = models
    pair = (drafter, drafter_params) if options.pop("speculative") else ()
    decoder = Decoder(target, params, *pair, **options)
    requests = [Request(PROMPT, TOKENS, (), s) for s in SETTINGS]
    batch = pad(requests, len(requests), len(PROMPT), Shape(16, 1), decoder.block_size)
    batch = jax.tree.map(lambda x: np.repeat(x, EACH, axis=0), batch)
    start = jax.jit(partial(prefill, target, decoder.drafter, 16, jnp.float32, 64, 0))
    draft, loop = jax.jit(decoder.draft_of(decoder.block_size)), jax.jit(make_loop(decoder.round))
    shape, begin = (len(SETTINGS), EACH), len(PROMPT)
    found = []
    for part in range(parts):
        seeds = np.arange(len(SETTINGS) * EACH, dtype=np.uint32) + part * len(SETTINGS) * EACH
        batch = batch._replace(sampling=batch.sampling._replace(seed=seeds))
        state = start(decoder.weights, batch)
        proposals = draft(decoder.weights, state) if pair else Proposals(None, None)
        state = loop(decoder.weights, state)
        rows = (
            state.tokens[:, begin : begin + TOKENS],
            state.committed[:, 0] - 1,
            None if proposals.ids is None else proposals.ids[:, 0],
            None if proposals.probs is None else proposals.probs[:, 0],
        )
        found.append(jax.tree.map(lambda x: np.asarray(x).reshape(*shape, *x.shape[1:]), Draws(*rows)))
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *found)


@pytest.fixture(scope="module")
def plain_draws(models):
    return draw(models, speculative=False)


@pytest.fixture(scope="module")
def rejected_draws(models):
    return draw(models, speculative=True, sample_drafts=True)


@pytest.fixture(scope="module")
def cut_draws(models):
    """Rejection sampling in rounds of a size by whim, cut where the drafter is unsure."""

    def whim(state):
        return (state.anchors.sum() + state.rounds.sum()) % 2

    cut = dict(smaller=(2,), policy=whim, min_confidence=CONFIDENCE)
    return draw(models, 1, speculative=True, sample_drafts=True, **cut)


def counts(tokens, length):
    cells = np.ravel_multi_index(tuple(tokens[:, i] for i in range(length)), (V,) * length)
    return np.bincount(cells, minlength=V**length)


def check_chi_square(tokens, joint):
    """The first three tokens' joint against the exact one; cells of less than 5 expected are pooled."""
    expected = joint.sum(axis=-1).reshape(-1) * len(tokens)
    observed = counts(tokens, 3)
    assert not observed[expected == 0].any(), "a forbidden token was drawn"
    big = expected >= 5
    expected = np.append(expected[big], expected[~big].sum())
    observed = np.append(observed[big], observed[~big].sum())
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    assert chi2.sf(statistic, used.sum() - 1) > 1e-5, statistic


@pytest.mark.parametrize("kind", ["plain_draws", "rejected_draws", "cut_draws"])
@pytest.mark.parametrize("i", range(len(SETTINGS)))
def test_the_joint_of_three_tokens(kind, i, request, exact):
    check_chi_square(request.getfixturevalue(kind).tokens[i], exact[i])


def test_total_variation_of_four_tokens(plain_draws, rejected_draws, cut_draws):
    """Two samples of one distribution differ by their sampling error and by no more."""
    for speculative in (rejected_draws, cut_draws):
        for one, other in zip(plain_draws.tokens, speculative.tokens, strict=True):
            one = one[: len(other)]
            a, b = counts(one, 4) / len(one), counts(other, 4) / len(other)
            p = (a + b) / 2
            expected = 0.5 * np.sqrt(4 * p * (1 - p) / len(one) / np.pi).sum()
            assert 0.5 * np.abs(a - b).sum() < 1.1 * expected


def test_confidence_cut_some_rounds_and_not_others(rejected_draws, cut_draws):
    whole, cut = rejected_draws.first, cut_draws.first
    assert 0 < (cut > 0).mean() < (whole > 0).mean()


def test_argmax_drafts_give_the_plain_draws_themselves(models, plain_draws, exact):
    """And a proposal is accepted with the target's probability of it."""
    speculative = draw(models, 1, speculative=True)
    plain = plain_draws.tokens[:, :EACH]
    # Sums of another shape may round another way; a draw flips where two noisy logits are that close.
    assert (speculative.tokens != plain).any(axis=-1).mean() < 1e-4
    for i in range(len(SETTINGS)):
        first = speculative.tokens[i, :, 0]
        after = exact[i].sum(axis=(2, 3))
        chance = (after / after.sum(axis=1, keepdims=True).clip(1e-30))[first, speculative.ids[i]]
        error = np.sqrt((chance * (1 - chance)).mean() / EACH)
        assert abs((speculative.first[i] > 0).mean() - chance.mean()) < 5 * error + 1e-6


def test_drawn_drafts_are_accepted_with_their_overlap(rejected_draws, exact):
    """The share accepted is `sum_v min(p, q)`."""
    q = rejected_draws.probs
    for i in range(len(SETTINGS)):
        after = exact[i].sum(axis=(2, 3))
        p = (after / after.sum(axis=1, keepdims=True).clip(1e-30))[rejected_draws.tokens[i, :, 0]]
        chance = np.minimum(p, q[i]).sum(axis=1)
        assert 0.01 < chance.mean() < 0.99
        error = np.sqrt((chance * (1 - chance)).mean() / len(chance))
        assert abs((rejected_draws.first[i] > 0).mean() - chance.mean()) < 5 * error


@pytest.fixture(scope="module")
def mixed(prompts):
    """One row of each kind, by prompt."""
    return [
        Sampling(),
        Sampling(0.8, seed=1),
        Sampling(1.2, top_k=9, seed=2),
        Sampling(1.0, top_p=0.9, seed=3),
    ]


@pytest.fixture(scope="module")
def mixed_answers(plain, prompts, mixed):
    return [g.tokens for g in plain.generate(prompts, ANSWER, sampling=mixed)]


def test_rows_of_every_kind_keep_to_themselves(plain, prompts, mixed, mixed_answers, answers):
    assert mixed_answers[0] == answers[0], "a greedy row stays greedy beside sampled ones"
    assert all(m != a for m, a in zip(mixed_answers[1:], answers[1:], strict=True))
    for order in ([0, 1], [1, 0], [3, 1], [2]):
        generations = plain.generate(
            [prompts[i] for i in order], ANSWER, sampling=[mixed[i] for i in order], rows=ROWS
        )
        assert [g.tokens for g in generations] == [mixed_answers[i] for i in order]
    other = [s._replace(seed=s.seed + 7) for s in mixed]
    changed = plain.generate(prompts, ANSWER, sampling=other)
    assert changed[0].tokens == answers[0]
    assert all(g.tokens != m for g, m in zip(changed[1:], mixed_answers[1:], strict=True))


@pytest.mark.parametrize("right", [0, 2, BLOCK_MAX])
def test_speculative_text_is_plain_text_at_any_temperature(right, puppet, prompts, mixed, mixed_answers):
    """Greedy answers as proposals: right by chance only, once a draw has left them."""
    decoder = puppet(right)
    generations = decoder.generate(prompts, ANSWER, sampling=mixed)
    assert [g.tokens for g in generations] == mixed_answers
    lists = decoder.stream(prompts[1], ANSWER, sampling=mixed[1])
    assert [token for tokens in lists for token in tokens] == mixed_answers[1]


def test_a_good_drafter_stays_good_at_temperature_one(target, target_params, prompts):
    """Of a target that is nearly as sure as language models are: argmaxes are coherent, as draws are not."""

    def foresight(block_size):
        """What the target itself would say next, greedily."""

        def draft(weights, state):
            token, cache, ids = state.anchors, state.target, []
            for ahead in range(block_size - 1):
                variables = {"params": weights.target}
                out = target.apply(variables, token[:, None], state.lengths + ahead, cache)
                cache = out.cache
                token = ops.argmax(ops.head_logits(out.hidden[:, 0], target_head(weights.target)))
                ids.append(token)
            ids = jnp.stack(ids, axis=1)
            return Proposals(ids, jnp.ones(ids.shape))

        return draft

    sure = target_params | {"lm_head": {"weight": target_params["lm_head"]["weight"] * 10}}
    decoder = Decoder(target, sure, draft=foresight, block_size=4, bucket=16, capacity_bucket=CAPACITY)
    rounds = {0.0: [], 1.0: []}
    for temperature, accepted in rounds.items():
        for seed in range(4):
            draws = [Sampling(temperature, seed=ROWS * seed + row) for row in range(ROWS)]
            accepted += [g.accepted[:-1] for g in decoder.generate(prompts, ANSWER, sampling=draws)]
    assert mat(rounds[0.0]) == 4, "every round but the cut one is right to its end"
    assert 0.7 * 4 <= mat(rounds[1.0]) < 4


def test_drawn_drafts_do_not_depend_on_company(build, drafter, drafter_params, prompts, mixed, answers):
    decoder = build(drafter, drafter_params, sample_drafts=True, draft_ids=range(0, 60))
    together = decoder.generate(prompts, ANSWER, sampling=mixed)
    assert together[0].tokens == answers[0]
    for i in (1, 3):
        [alone] = decoder.generate([prompts[i]], ANSWER, sampling=mixed[i], rows=ROWS)
        assert alone.tokens == together[i].tokens
        assert sum(a + 1 for a in alone.accepted) + 1 == ANSWER


def test_greedy_rounds_draw_nothing(puppet, prompts):
    """Whatever is random stands behind a condition on some row's temperature."""
    decoder = puppet(0)
    state, _ = decoder.prefill(decoder.requests(prompts, ANSWER))

    def primitives(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            if equation.primitive.name != "cond":
                for inner in jax.core.jaxprs_in_params(equation.params):
                    yield from primitives(inner)

    names = set(primitives(jax.make_jaxpr(decoder.round)(decoder.weights, state).jaxpr))
    assert "cond" in names and not {n for n in names if "random" in n or "threefry" in n}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(-0.5), "temperature -0.5"),
        (Sampling(float("nan")), "temperature nan"),
        (Sampling(1.0, top_k=-1), "top_k -1"),
        (Sampling(1.0, top_p=0.0), "top_p 0"),
        (Sampling(1.0, min_p=1.5), "min_p 1.5"),
        (Sampling(1.0, seed=-1), "seed -1"),
        ([Sampling()] * 3, "3 settings"),
    ],
)
def test_senseless_settings_are_refused(sampling, message, build):
    decoder = build()
    with pytest.raises(UserError, match=message):
        decoder.generate([[1]], 4, sampling=sampling)
    assert decoder.compilations == 0
