"""Rows keep to themselves; shapes are bucketed; capacity is checked before anything runs."""

import itertools
from collections import Counter

import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS, check

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.models import Drafter


def test_rows_do_not_depend_on_company(plain, puppet, prompts, answers):
    """Padding rows that write into row 0's cache were a real fault: MAT 3.0 -> 0.55."""
    rights = np.zeros((ROWS, CAPACITY), np.int32)
    rights[:, :] = [[0], [BLOCK_MAX], [2], [1]]
    alone = puppet(rights).generate(prompts, ANSWER)
    assert len({g.rounds for g in alone}) > 2, "the rows must accept differently"
    for generation, answer in zip(alone, answers, strict=True):
        check(generation, answer, ANSWER)
    for order in itertools.permutations(range(3), 2):
        for generation, i in zip(
            plain.generate([prompts[i] for i in order], ANSWER, rows=ROWS), order, strict=True
        ):
            check(generation, answers[i], ANSWER)


def test_nor_do_a_drafters_own_drafts(build, drafter, drafter_params, prompts, answers):
    """In every order and beside any number of padding rows: the same tokens, by the same rounds."""
    often = [token for token, _ in Counter(token for a in answers for token in a).most_common(4)]
    decoder = build(
        drafter, drafter_params, draft_ids=often
    )  # so few that a random drafter is right at times
    alone = [decoder.generate([prompt], ANSWER, rows=ROWS)[0] for prompt in prompts]
    assert sum(max(g.accepted) > 0 for g in alone) >= 2
    for count in range(1, ROWS + 1):
        for order in itertools.islice(itertools.permutations(range(ROWS), count), 0, None, count):
            generations = decoder.generate([prompts[i] for i in order], ANSWER, rows=ROWS)
            for generation, i in zip(generations, order, strict=True):
                check(generation, answers[i], ANSWER)
                assert generation.accepted == alone[i].accepted


def test_finished_rows_disturb_nobody(puppet, prompts, answers):
    budgets = [1, ANSWER, 2, ANSWER]
    stops = [[], [], [], [answers[3][4]]]
    for right in (0, 3):
        generations = puppet(right).generate(prompts, budgets, stop_ids=stops)
        for generation, answer, budget, stop in zip(generations, answers, budgets, stops, strict=True):
            check(generation, answer, budget, stop)


def test_padding_rows_leave_a_speculative_batch_as_it_is(puppet, prompts, answers):
    decoder = puppet(2)
    for count in (1, 2, 3):
        generations = decoder.generate(prompts[:count], ANSWER, rows=ROWS)
        assert len(generations) == count
        for generation, answer in zip(generations, answers, strict=False):
            check(generation, answer, ANSWER)
            assert set(generation.accepted[:-1]) == {2}


def test_twenty_unlike_batches_compile_once_a_bucket(build):
    decoder = build()
    rng = np.random.default_rng(1)
    for _ in range(20):
        ps = [rng.integers(0, 60, n).tolist() for n in rng.integers(1, 33, 2)]
        decoder.generate(ps, int(rng.integers(1, 12)), stop_ids=[[1], [2, 3, 4]])
    # Prompts of up to 32 tokens fall into two buckets of 16; one capacity, one loop.
    assert sorted(key[0] for key in decoder.programs) == ["loop", "prefill", "prefill"]
    assert decoder.compilations == 3


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([1] * 40, 30, r"40 tokens \+ 30 new \+ a block of 1 = 71 positions, but the model has 64"),
        ([], 4, "prompt 0 is empty"),
        ([64], 4, "outside the vocabulary of 64"),
        ([-1], 4, "outside the vocabulary"),
        ([1], 0, "max_new_tokens 0"),
    ],
)
def test_refused_before_anything_runs(prompt, budget, message, build):
    decoder = build()
    with pytest.raises(UserError, match=message):
        decoder.generate([prompt], budget)
    assert decoder.compilations == 0


def test_capacity_counts_the_last_block(puppet):
    decoder = puppet(0)
    with pytest.raises(UserError, match=r"40 tokens \+ 19 new \+ a block of 6 = 65 positions"):
        next(decoder.stream([1] * 40, 19))


def test_a_wrong_pair_is_refused(build, target, drafter, drafter_params):
    with pytest.raises(UserError, match="block size 7"):
        build(drafter, drafter_params, block_size=BLOCK_MAX + 1)
    with pytest.raises(UserError, match="drafter_params"):
        build(drafter)
    other = DrafterConfig(**vars(drafter.config) | {"hidden_size": 16})
    with pytest.raises(UserError, match="hidden_size 32 against 16"):
        build(Drafter(other), drafter_params)
    with pytest.raises(UserError, match="live_slots 2"):
        build().generate([[1]], 4, live_slots=2)
    assert build().generate([], 4) == []


def test_a_full_cache_is_still_lossless(plain, puppet):
    """The last block ends at the last position of the capacity."""
    prompt, budget = [7] * 34, CAPACITY - 34 - BLOCK_MAX
    [expected] = plain.generate([prompt], budget, rows=ROWS)
    [got] = puppet(0).generate([prompt], budget, rows=ROWS)
    assert got.tokens == expected.tokens
    assert len(got.tokens) == budget
