"""A queue over a few slots gives each request what it gets alone."""

import jax
import numpy as np
import pytest
from decoding_tools import ANSWER, ROWS, check, cut

from dscout_jax.decode import Request, Sampling, lookup_draft, serve
from dscout_jax.decode.loop import insert
from dscout_jax.errors import UserError


@pytest.fixture(scope="module")
def requests(prompts, answers):
    """Ragged prompts and budgets, one ended by its first token, one by a stop id, two drawn."""
    drawn = [Sampling(0.9, seed=5), Sampling(1.3, top_k=20, seed=6)]
    return [
        Request(prompts[0], ANSWER),
        Request(prompts[1], 1),
        Request(prompts[2], 7, (answers[2][3],)),
        Request(prompts[3], 2),
        Request(prompts[1], ANSWER),
        Request(prompts[0], 9, (), drawn[0]),
        Request(prompts[3], 1),
        Request(prompts[2], ANSWER, (), drawn[1]),
        Request(prompts[3], ANSWER, (answers[3][0],)),
    ]


@pytest.fixture(scope="module")
def alone(plain, requests, prompts, answers):
    """Each request's tokens by plain decoding, and why they end."""
    by_prompt = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
    expected = []
    for r in requests:
        answer = by_prompt[tuple(r.prompt)]
        if r.sampling.temperature:
            [generation] = plain.generate([r.prompt], ANSWER, sampling=r.sampling, rows=ROWS)
            answer = generation.tokens
        expected.append(cut(answer, r.max_new_tokens, r.stop_ids))
    return expected


@pytest.fixture(scope="module")
def decoder(build):
    return build(draft=lookup_draft, block_size=4, detokenize=lambda ids: " ".join(map(str, ids)))


def test_every_answer_is_the_one_alone(decoder, requests, alone):
    served = list(serve(decoder, requests, slots=3))
    order = [index for index, _ in served]
    assert sorted(order) == list(range(len(requests))), "each exactly once"
    for index, generation in served:
        assert (generation.tokens, generation.finish) == alone[index]
        assert sum(a + 1 for a in generation.accepted) + 1 == len(generation.tokens)
    assert order.index(1) < order.index(0), "one token is sooner done than twenty-four"
    assert order.index(6) < order.index(4), "later requests take the place of finished ones"
    ends = [generation.done_seconds for _, generation in served]
    assert ends == sorted(ends) and ends[0] > 0, "on the queue's own clock"
    assert all(g.done_seconds >= g.decode_seconds for _, g in served)
    assert sorted(key[0] for key in decoder.programs) == ["advance", "insert", "prefill", "prefill"]


def test_a_queue_runs_plainly_through_the_program_that_speculates(decoder, requests, alone):
    for index, generation in serve(decoder, requests[4:8], slots=2, live_slots=1):
        assert (generation.tokens, generation.finish) == alone[4 + index]
        assert not any(generation.accepted)


def test_insert_changes_one_row_only(build, drafter, drafter_params, prompts):
    """The drafter's context included: later drafts are those of the row alone."""
    decoder = build(drafter, drafter_params)
    requests = decoder.requests(prompts, 12, sampling=[Sampling(1.0, seed=i) for i in range(ROWS)])
    whole, _ = decoder.prefill(requests)
    whole = jax.tree.map(np.array, whole)
    row = jax.tree.map(lambda x: x[3:], whole)
    got = jax.tree.map(np.array, jax.jit(insert)(row, whole, 1))
    for before, one, after in zip(*map(jax.tree.leaves, (whole, row, got)), strict=True):
        np.testing.assert_array_equal(after[1], one[0])
        np.testing.assert_array_equal(np.delete(after, 1, axis=0), np.delete(before, 1, axis=0))


def test_refused_before_anything_runs(build):
    decoder = build()
    with pytest.raises(UserError, match="slots 0"):
        serve(decoder, [Request([1], 4)], 0)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        serve(decoder, [Request([1], 4), Request([], 4)], 1)
    assert decoder.compilations == 0
    assert list(serve(decoder, [], 2)) == []


def test_a_generation_says_how_it_came(decoder, requests, answers):
    generation = dict(serve(decoder, requests, slots=3))[0]
    check(generation, answers[0], ANSWER)
    assert generation.text == " ".join(map(str, answers[0]))
    assert len(generation.survival) == 3
    assert np.isclose(generation.mat, 1 + sum(generation.survival))
    assert np.isclose(generation.mat, (ANSWER - 1) / generation.rounds)
