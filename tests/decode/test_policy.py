"""Block sizes change from round to round; the output does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS, check, oracle, puppeteer
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.decode import Acceptance, Sampling, fixed, greedy
from dscout_jax.decode.policy import FADE, observe
from dscout_jax.errors import UserError

SIZES = (1, 3, BLOCK_MAX)


def whim(state):
    """A size by what was emitted last: no pattern that a decoder could lean on."""
    return (state.anchors.sum() + state.rounds.sum()) % len(SIZES)


@pytest.fixture(scope="module")
def fickle(build, drafter, drafter_params, prompts, answers):
    """play(right, sure): drafts at a size by whim, and sends what it is sure of."""
    options = dict(smaller=SIZES[:-1], policy=whim, min_confidence=0.5)
    return puppeteer(build(drafter, drafter_params, draft=oracle, **options), prompts, answers)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_output_never_depends_on_the_size(data, fickle, prompts, answers):
    budgets = data.draw(st.lists(st.integers(1, ANSWER), min_size=ROWS, max_size=ROWS))
    places = st.lists(st.integers(0, 2 * ANSWER), max_size=4)
    stops = [[a[i] for i in data.draw(places) if i < ANSWER] for a in answers]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    sure = rng.choice([0.3, 0.8, 1.0], (ROWS, CAPACITY))
    decoder = fickle(rng.integers(0, BLOCK_MAX, (ROWS, CAPACITY)), sure)
    generations = decoder.generate(prompts, budgets, stop_ids=stops)
    for generation, answer, budget, stop in zip(generations, answers, budgets, stops, strict=True):
        check(generation, answer, budget, stop)


def test_nor_does_it_at_a_temperature(fickle, plain, prompts):
    mixed = [Sampling(0.7, seed=i) for i in range(ROWS)]
    expected = [g.tokens for g in plain.generate(prompts, ANSWER, sampling=mixed)]
    assert [g.tokens for g in fickle(2).generate(prompts, ANSWER, sampling=mixed)] == expected


def test_right_drafts_are_committed_as_far_as_they_are_sent(fickle, prompts, answers):
    sizes = {a for g in fickle(BLOCK_MAX).generate(prompts, ANSWER) for a in g.accepted[:-1]}
    assert sizes == {size - 1 for size in SIZES}, "every size must have drafted"
    for generation in fickle(BLOCK_MAX, sure=0.8).generate(prompts, ANSWER):
        assert max(generation.accepted) == 3, "0.8^3 >= 0.5 > 0.8^4"
    for generation, answer in zip(
        fickle(BLOCK_MAX, sure=0.3).generate(prompts, ANSWER), answers, strict=True
    ):
        check(generation, answer, ANSWER)
        assert set(generation.accepted) == {0}


def test_what_is_not_sent_is_not_verified(build, drafter, drafter_params, prompts, answers):
    """Entries show how wide the round was: the prefill wrote 16 positions, the prompt has 14."""
    decoder = build(drafter, drafter_params, draft=oracle, smaller=(3,), min_confidence=0.5)
    play = puppeteer(decoder, prompts, answers)
    state, _ = decoder.prefill(decoder.requests(prompts, ANSWER))
    step = jax.jit(decoder.round)
    at = len(prompts[3])
    for sure, size in ((1.0, BLOCK_MAX), (0.75, 3), (0.1, 3)):
        after = step(play(BLOCK_MAX, sure).weights, state)
        for cache in (after.target, after.context):
            written = np.abs(np.asarray(cache.k[0][3])).sum(axis=(0, 2)) > 0
            assert written.tolist() == [i < max(16, at + size) for i in range(CAPACITY)]


def test_counts_equal_counting_by_hand():
    rng = np.random.default_rng(0)
    acceptance = Acceptance(*jnp.zeros((2, 3, 4)))
    tried, hits = np.zeros((3, 4)), np.zeros((3, 4))
    for _ in range(30):
        sent, live = rng.integers(0, 5, 3), rng.random(3) < 0.8
        accepted = rng.integers(0, sent + 1)
        acceptance = jax.jit(observe)(acceptance, sent, accepted, live)
        for row in np.flatnonzero(live):
            tried[row] *= FADE
            hits[row] *= FADE
            for slot in range(1, 5):
                if slot <= sent[row] and accepted[row] >= slot - 1:
                    tried[row, slot - 1] += 1
                    hits[row, slot - 1] += accepted[row] >= slot
    np.testing.assert_allclose(acceptance.tried, tried, rtol=1e-5)
    np.testing.assert_allclose(acceptance.hits, hits, rtol=1e-5)


def test_the_greedy_rule_takes_the_best_quotient(fickle, prompts):
    rule = greedy(SIZES, costs=(1.0, 1.2, 1.5))
    state, _ = fickle(0).prefill(fickle(0).requests(prompts, ANSWER))
    assert int(rule(state)) == 2, "nothing is known: the prior is hopeful"
    count = jnp.full((ROWS, BLOCK_MAX - 1), 10.0)
    for hits, index in ((0.0, 0), (10.0, 2)):
        assert int(rule(state._replace(acceptance=Acceptance(count, count * 0 + hits)))) == index
    # Two right and no third: (1 + 2) / 1.2 is more than what a longer block gives.
    two = count * (jnp.arange(1, BLOCK_MAX) <= 2)
    assert int(rule(state._replace(acceptance=Acceptance(count, two)))) == 1
    # Rows that have ended have no say.
    ended = jnp.arange(ROWS) > 0
    mixed = Acceptance(count, count * ended[:, None])
    assert int(rule(state._replace(acceptance=mixed, stopped=ended))) == 0
    assert int(fixed(1)(state)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(smaller=(BLOCK_MAX,)), r"smaller block sizes \(6,\)"),
        (dict(min_confidence=1.5), "min_confidence 1.5"),
        (dict(draft=oracle, sample_drafts=True), "sample_drafts"),
        (dict(prefill_chunk=0), "prefill_chunk 0"),
    ],
)
def test_senseless_options_are_refused(options, message, build, drafter, drafter_params):
    with pytest.raises(UserError, match=message):
        build(drafter, drafter_params, **options)
    with pytest.raises(UserError, match="costs"):
        greedy(SIZES, (1.0, 2.0))
