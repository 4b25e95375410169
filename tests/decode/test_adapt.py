"""The policy that learns: what it earns, what its probes cost, and that output stays."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS, check, cut, oracle, puppeteer
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.decode import Adaptive, Request, Sampling, make_loop, serve
from dscout_jax.decode.loop import insert
from dscout_jax.errors import UserError

SIZES, COSTS = (1, 2, 3, 4, 6), (23.6, 27.5, 29.0, 31.1, 33.4)
LIKELY = {  # of each slot, those before it being right
    "maths": (0.62, 0.6, 0.58, 0.55, 0.55),
    "code": (0.75, 0.75, 0.7, 0.7, 0.7),
    "chat": (0.33, 0.4, 0.4, 0.4, 0.4),
    "foreign": (0.05, 0.1, 0.1, 0.1, 0.1),
}
SURVIVAL = {name: np.cumprod(likely) for name, likely in LIKELY.items()}


def tokens(survival, size):
    return 1 + survival[: size - 1].sum()


def best(name, costs):
    return max(tokens(SURVIVAL[name], b) / c for b, c in zip(SIZES, costs, strict=True))


@partial(jax.jit, static_argnums=(0, 2))
def play(policy, likely_TxW1, rows, key):
    """(index, choice, accepted) of each round: its drafts are right with the likelihoods given."""

    def step(learnt, now):
        likely, key = now
        index = policy(SimpleNamespace(learnt=learnt))
        sent = jnp.full(rows, jnp.asarray(policy.sizes)[index] - 1)
        right = jax.random.uniform(key, (rows, len(likely))) < likely
        accepted = jnp.minimum(jnp.cumprod(right, axis=1).sum(axis=1), sent)
        after = policy.learn(learnt, sent, accepted, jnp.ones(rows, bool))
        return after, (index, policy._choose(learnt), accepted)

    keys = jax.random.split(key, len(likely_TxW1))
    return jax.lax.scan(step, policy.start(), (likely_TxW1, keys))[1]


def rate(policy, segments, rows=1, seed=0):
    """Expected tokens a unit of time, a row; and the same of the oracle that knows each segment."""
    likely = np.concatenate([np.tile(LIKELY[name], (rounds, 1)) for name, rounds in segments])
    names = [name for name, rounds in segments for _ in range(rounds)]
    index, _, _ = play(policy, jnp.asarray(likely, jnp.float32), rows, jax.random.key(seed))
    sizes = np.array(policy.sizes)[np.asarray(index)]
    made = np.array([tokens(SURVIVAL[n], b) for n, b in zip(names, sizes, strict=True)])
    spent = np.array(policy.costs)[np.asarray(index)].sum()
    perfect = sum(m / best(n, policy.costs) for m, n in zip(made, names, strict=True))
    return made.sum() / spent, made.sum() / perfect


def mean_of(names):
    return tuple(np.mean([SURVIVAL[n] for n in names], axis=0).tolist())


@pytest.mark.parametrize("rows", [1, 4])
def test_on_a_changing_mixture_it_comes_close_to_who_knows(rows):
    names = ("maths", "chat", "code")
    segments = [(name, int(500 / tokens(SURVIVAL[name], 6))) for _ in range(4) for name in names]
    costs = COSTS if rows == 1 else tuple(COSTS[0] + 2 * (c - COSTS[0]) for c in COSTS)
    policy = Adaptive(SIZES, costs, mean_of(names))
    got, perfect = np.mean([rate(policy, segments, rows, seed) for seed in range(4)], axis=0)
    assert got >= 0.98 * perfect
    spans = {n: sum(r for m, r in segments if m == n) * tokens(SURVIVAL[n], 6) for n in names}
    for size, cost in zip(SIZES, costs, strict=True):
        fixed = sum(spans.values()) / sum(s / tokens(SURVIVAL[n], size) * cost for n, s in spans.items())
        assert got > fixed


@pytest.mark.parametrize("known", ["foreign", "maths"])
def test_where_speculation_loses_it_is_nearly_plain(known):
    policy = Adaptive(SIZES, COSTS, mean_of([known]))
    got, _ = rate(policy, [("foreign", 3000)])
    assert got >= 0.97 / COSTS[0]


def test_it_comes_back_from_plain_when_the_text_turns_easy():
    policy = Adaptive(SIZES, COSTS, mean_of(["foreign"]))
    likely = np.repeat([LIKELY["foreign"], LIKELY["code"]], 1000, axis=0)
    index, _, _ = play(policy, jnp.asarray(likely, jnp.float32), 1, jax.random.key(0))
    assert (np.array(SIZES)[index[200:1000]] == 1).mean() > 0.9
    assert (np.array(SIZES)[index[1200:]] >= 4).mean() > 0.9


@pytest.mark.parametrize(("explore", "first", "then"), [(0.0, "code", "foreign"), (0.05, "foreign", "chat")])
@given(seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_probes_never_cost_more_than_their_share(explore, first, then, seed):
    policy = Adaptive(SIZES, COSTS, mean_of([first]), explore=explore)
    likely = jnp.asarray(np.repeat([LIKELY[first], LIKELY[then]], 150, axis=0), jnp.float32)

    _, choices, accepted = play(policy, likely, 1, jax.random.key(seed))
    costs, sizes = np.array(COSTS), np.array(SIZES)
    best, taken = np.asarray(choices.best), np.asarray(choices.taken)
    assert set(taken - best) <= {0, 1}
    # What the best size would have committed of the same drafts, and what the rest is worth.
    more = np.maximum(np.asarray(accepted)[:, 0] - (sizes[best] - 1), 0)
    lost = np.maximum(costs[taken] - costs[best] - more * np.asarray(choices.worth), 0)
    assert (np.cumsum(lost) <= policy.explore * np.cumsum(costs[taken]) * (1 + 1e-4)).all()
    if explore >= 0.05 and best.min() < len(SIZES) - 1:
        assert (taken > best).any()


def test_counts_fade_by_what_was_sent_and_equal_counting_by_hand():
    policy = Adaptive((1, 3, 6), (1.0, 1.1, 1.2), mean_of(["maths"]), memory=10.0, weight=4.0)
    learnt, rng = policy.start(), np.random.default_rng(0)
    tried, hits = 4 * np.array([1, *SURVIVAL["maths"][:-1]]), 4 * SURVIVAL["maths"]
    learn = jax.jit(policy.learn)
    for _ in range(20):
        sent, live = rng.integers(0, 6, 3), rng.random(3) < 0.8
        accepted = rng.integers(0, sent + 1)
        learnt = learn(learnt, *map(jnp.asarray, (sent, accepted, live)))
        for slot in range(1, 6):
            rows = live & (sent >= slot)
            keep = 0.9 ** rows.sum()
            tried[slot - 1] = tried[slot - 1] * keep + (rows & (accepted >= slot - 1)).sum()
            hits[slot - 1] = hits[slot - 1] * keep + (rows & (accepted >= slot)).sum()
    np.testing.assert_allclose(learnt.tried, tried, rtol=1e-5)
    np.testing.assert_allclose(learnt.hits, hits, rtol=1e-5)


@pytest.fixture(scope="module")
def learner():
    return Adaptive((1, 3, BLOCK_MAX), (1.0, 1.5, 2.0), (0.5, 0.4, 0.3, 0.2, 0.1), explore=0.2, memory=4.0)


@pytest.fixture(scope="module")
def learning(build, drafter, drafter_params, prompts, answers, learner):
    """play(right) for a decoder that learns, with plain rounds of two slots."""
    options = dict(smaller=(1, 3), policy=learner, plain_rows=2)
    return puppeteer(build(drafter, drafter_params, draft=oracle, **options), prompts, answers)


@pytest.fixture(scope="module")
def step(learning):
    return jax.jit(learning(0).round)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_output_never_depends_on_what_is_learnt(data, learning, prompts, answers):
    budgets = data.draw(st.lists(st.integers(1, ANSWER), min_size=ROWS, max_size=ROWS))
    places = st.lists(st.integers(0, 2 * ANSWER), max_size=4)
    stops = [[a[i] for i in data.draw(places) if i < ANSWER] for a in answers]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    right = rng.choice([0, BLOCK_MAX], (ROWS, CAPACITY), p=[0.5, 0.5])
    generations = learning(right).generate(prompts, budgets, stop_ids=stops)
    for generation, answer, budget, stop in zip(generations, answers, budgets, stops, strict=True):
        check(generation, answer, budget, stop)


def test_nor_at_a_temperature_and_sizes_follow_the_drafts(learning, learner, step, plain, prompts):
    mixed = [Sampling(0.7, seed=i) for i in range(ROWS)]
    expected = [g.tokens for g in plain.generate(prompts, ANSWER, sampling=mixed)]
    assert [g.tokens for g in learning(2).generate(prompts, ANSWER, sampling=mixed)] == expected
    # Wrong drafts lead to plain rounds, right ones to full blocks.
    taken = {}
    for right in (0, BLOCK_MAX):
        decoder = learning(right)
        decoder.keep(learner.start())
        state, _ = decoder.prefill(decoder.requests(prompts, ANSWER))
        sizes = []
        while bool(state.live.any()):
            sizes.append((1, 3, BLOCK_MAX)[int(learner(state))])
            state = step(decoder.weights, state)
        taken[right] = sizes
    assert taken[0][-8:].count(1) >= 4 and 3 in taken[0], "plain, and a probe now and then"
    assert taken[BLOCK_MAX][-1] == BLOCK_MAX and 1 not in taken[BLOCK_MAX]


def test_what_is_learnt_outlives_a_row(learning, prompts, answers):
    decoder = learning(0)
    requests = decoder.requests(prompts, ANSWER)
    state, _ = decoder.prefill(requests)
    state = decoder.compiled("loop", make_loop(decoder.round), decoder.weights, state)(decoder.weights, state)
    learnt = jax.tree.map(np.array, state.learnt)
    fresh, _ = decoder.prefill(requests[:1])
    place = jnp.int32(1)
    after = decoder.compiled("insert", insert, fresh, state, place)(fresh, state, place)
    for kept, before in zip(after.learnt, learnt, strict=True):
        np.testing.assert_array_equal(kept, before)
    assert float(after.learnt.hits[0]) < 0.1 * float(fresh.learnt.hits[0])
    queue = [Request(p, n) for n in (9, ANSWER) for p in prompts]
    for index, generation in serve(decoder, queue, slots=ROWS):
        expected = cut(answers[index % ROWS], queue[index].max_new_tokens)
        assert (generation.tokens, generation.finish) == expected


def test_a_round_without_drafts_computes_as_many_slots_as_asked(learning, learner, step, prompts):
    """Entries show how wide it was: a row writes past its own length, and never moves it."""
    decoder = learning(0)
    decoder.keep(learner.start())
    state, _ = decoder.prefill(decoder.requests(prompts, ANSWER))
    hopeless = state.learnt._replace(hits=state.learnt.hits * 0, tried=state.learnt.tried + 99)
    after = step(decoder.weights, state._replace(learnt=hopeless))
    assert (np.asarray(after.lengths) == np.asarray(state.lengths) + 1).all()
    written = np.abs(np.asarray(after.target.k[0][3])).sum(axis=(0, 2)) > 0
    assert written.tolist() == [i < max(16, len(prompts[3]) + 2) for i in range(CAPACITY)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(costs=(1.0, 2.0)), "costs"),
        (dict(survival=(0.5, 0.4)), "survival"),
        (dict(survival=(0.5, 0.4, 0.45, 0.1, 0.1)), "survival"),
        (dict(explore=1.0), "explore 1.0"),
        (dict(memory=0.5), "memory 0.5"),
    ],
)
def test_senseless_settings_are_refused(changes, message):
    wrong = dict(sizes=(1, 3, 6), costs=(1.0, 2.0, 3.0), survival=(0.5, 0.4, 0.3, 0.2, 0.1)) | changes
    with pytest.raises(UserError, match=message):
        Adaptive(**wrong)


def test_a_decoder_of_other_sizes_is_refused(build, drafter, drafter_params, learner):
    with pytest.raises(UserError, match=r"\(1, 3, 6\), the decoder has \(2, 6\)"):
        build(drafter, drafter_params, smaller=(2,), policy=learner)
    with pytest.raises(UserError, match="plain_rows 7"):
        build(drafter, drafter_params, plain_rows=7)


def test_the_next_call_begins_with_what_the_last_one_learnt(learning, learner, prompts):
    decoder = learning(0)
    asked = decoder.requests(prompts, ANSWER)

    def known():
        return float(decoder.prefill(asked[:1])[0].learnt.hits[0])

    calls = (
        lambda: decoder.generate(prompts, ANSWER),
        lambda: list(serve(decoder, asked, slots=1)),
        lambda: list(decoder.stream(prompts[0], ANSWER)),
    )
    for call in calls:
        decoder.keep(learner.start())
        begun = known()
        call()
        assert known() < begun / 2, "every draft was wrong"
        compiled = decoder.compilations
        call()
        assert decoder.compilations == compiled
    decoder.keep(learner.start())
    decoder.generate(prompts, ANSWER, live_slots=1)
    list(serve(decoder, asked, slots=1, live_slots=1))
    assert known() == begun, "plain decoding tells nothing of drafts"
