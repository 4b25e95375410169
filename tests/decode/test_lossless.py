"""Speculative decoding emits plain decoding's tokens, whatever is proposed and wherever it must end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS, VOCAB, bigger, check
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.decode import block_draft, serve
from dscout_jax.errors import UserError


@pytest.fixture(scope="session")
def naive(target, target_params):
    """naive(prompt, n) -> n greedy tokens, each from a full forward without any cache."""

    @jax.jit
    def step(tokens_1xT, last):
        hidden = target.apply({"params": target_params}, tokens_1xT).hidden[0, last]
        return jnp.argmax(hidden @ target_params["lm_head"]["weight"].T)

    def run(prompt, n):
        tokens = np.zeros((1, CAPACITY), np.int32)
        tokens[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + n):
            tokens[0, at] = step(tokens, at - 1)
        return tokens[0, len(prompt) : len(prompt) + n].tolist()

    return run


def test_plain_equals_full_forwards(naive, prompts, answers):
    assert [naive(p, ANSWER) for p in prompts] == answers
    assert all(len(set(a)) >= 6 for a in answers), "a constant answer would test nothing"


@pytest.mark.parametrize("block_size", range(1, BLOCK_MAX + 1))
def test_random_drafters_at_every_block_size(block_size, build, drafter, drafter_params, prompts, answers):
    decoder = build(drafter, drafter_params, block_size=block_size)
    for budget in range(1, 2 * block_size + 2):
        for generation, answer in zip(decoder.generate(prompts, budget), answers, strict=True):
            check(generation, answer, budget)
    noise = jax.tree.map(lambda w: w + jax.random.normal(jax.random.key(w.size), w.shape), drafter_params)
    if block_size > 1:
        decoder.weights = decoder.weights._replace(drafter=bigger(noise))
    for generation, answer in zip(decoder.generate(prompts, ANSWER), answers, strict=True):
        check(generation, answer, ANSWER)


@pytest.mark.parametrize("right", range(BLOCK_MAX))
def test_right_until_slot_j(right, puppet, prompts, answers):
    generations = puppet(right).generate(prompts, ANSWER)
    for generation, answer in zip(generations, answers, strict=True):
        check(generation, answer, ANSWER)
        assert set(generation.accepted[:-1]) == {right}, "every round but the cut one accepts just these"


@pytest.mark.parametrize("budget", range(1, 2 * BLOCK_MAX + 2))
def test_every_budget_with_a_right_drafter(budget, puppet, prompts, answers):
    decoder = puppet(BLOCK_MAX)
    for generation, answer in zip(decoder.generate(prompts, budget), answers, strict=True):
        check(generation, answer, budget)
        assert generation.rounds == -(-(budget - 1) // BLOCK_MAX)


@pytest.mark.parametrize("place", [0, 1, BLOCK_MAX // 2, BLOCK_MAX, ANSWER - 1])
@pytest.mark.parametrize("right", [0, 2, BLOCK_MAX])
def test_a_token_of_the_answer_as_stop(place, right, puppet, prompts, answers):
    stops = [[answer[place]] for answer in answers]
    generations = puppet(right).generate(prompts, ANSWER, stop_ids=stops)
    for generation, answer, stop in zip(generations, answers, stops, strict=True):
        check(generation, answer, ANSWER, stop)
    assert generations[0].finish == "stop"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_anything_at_once(data, puppet, prompts, answers):
    """Any of the ragged prompts, a budget and several stop ids a row, and proposals right by chance."""
    order = data.draw(st.lists(st.sampled_from(range(ROWS)), min_size=1, max_size=ROWS))
    asked, expected = [prompts[i] for i in order], [answers[i] for i in order]
    budgets = data.draw(st.lists(st.integers(1, ANSWER), min_size=len(order), max_size=len(order)))
    places = st.lists(st.integers(0, 2 * ANSWER), max_size=4)
    stops = [[a[i] for i in data.draw(places) if i < ANSWER] for a in expected]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    decoder = puppet(rng.integers(0, BLOCK_MAX, (ROWS, CAPACITY)), order=order)
    slots = data.draw(st.integers(1, BLOCK_MAX))
    generations = decoder.generate(asked, budgets, stop_ids=stops, live_slots=slots, rows=ROWS)
    for generation, answer, budget, stop in zip(generations, expected, budgets, stops, strict=True):
        check(generation, answer, budget, stop)
        assert max(generation.accepted, default=0) < slots


def test_one_live_slot_is_plain_decoding(puppet, prompts, answers):
    for generation, answer in zip(
        puppet(BLOCK_MAX).generate(prompts, ANSWER, live_slots=1), answers, strict=True
    ):
        check(generation, answer, ANSWER)
        assert set(generation.accepted) == {0}


def test_plain_with_idle_rows(plain, prompts, answers):
    for generation, answer in zip(plain.plain(rows=2).generate(prompts, ANSWER), answers, strict=True):
        check(generation, answer, ANSWER)


def test_stream_yields_what_generate_returns(puppet, prompts, answers):
    decoder = puppet(3)
    lists = list(decoder.stream(prompts[0], ANSWER, stop_ids=[answers[0][20]]))
    generation = decoder.generate(prompts, ANSWER, stop_ids=[[answers[0][20]]] * ROWS)[0]
    assert [token for tokens in lists for token in tokens] == generation.tokens
    assert [len(tokens) - 1 for tokens in lists[1:]] == generation.accepted
    assert list(decoder.stream(prompts[0], 1)) == [answers[0][:1]]


def test_a_size_a_call(build, drafter, drafter_params, prompts, answers):
    """One decoder, any size up to the drafter's: also from one that was built to decode plainly."""
    decoder = build(drafter, drafter_params, block_size=1, draft_ids=range(VOCAB))
    for size in (4, None, 4):
        generations = decoder.generate(prompts, ANSWER, block_size=size)
        assert [g.tokens for g in generations] == answers
        assert {g.block_size for g in generations} == {size or 1}
    sized = decoder.sized(4)
    assert sized is decoder.sized(4) and sized.drafter is drafter and sized.compilations == 2
    assert sized.weights.draft_ids.shape == (VOCAB,)
    for index, served in serve(decoder, decoder.requests(prompts, ANSWER), ROWS, block_size=4):
        assert (served.tokens, served.block_size) == (answers[index], 4)
    with pytest.raises(UserError, match="block size 7"):
        decoder.generate(prompts, ANSWER, block_size=BLOCK_MAX + 1)


def test_drafts_from_some_ids_only_change_no_output(build, drafter, drafter_params, prompts, answers):
    allowed = sorted({token for answer in answers for token in answer[::2]})
    decoder = build(drafter, drafter_params, draft_ids=allowed)
    state, _ = decoder.prefill(decoder.requests(prompts, ANSWER))
    proposals = np.asarray(block_draft(drafter, BLOCK_MAX)(decoder.weights, state).ids)
    free = np.asarray(block_draft(drafter, BLOCK_MAX)(build(drafter, drafter_params).weights, state).ids)
    assert set(proposals.flat) <= set(allowed) and not set(free.flat) <= set(allowed)
    inside = np.isin(free, allowed)
    np.testing.assert_array_equal(proposals[inside], free[inside])
    for generation, answer in zip(decoder.generate(prompts, ANSWER), answers, strict=True):
        check(generation, answer, ANSWER)
    for wrong in ([], [64], [-1]):
        with pytest.raises(UserError, match="draft_ids"):
            build(drafter, drafter_params, draft_ids=wrong)
