"""Copying in the drafter's stead: row by row where the text repeats, and never another output."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER

from dscout_jax.decode import Proposals, block_draft, lookup_or

W = 4
CALLS = []


def drafts_of_nines(block_size):
    def draft(weights, state):
        jax.debug.callback(lambda: CALLS.append(1))
        shape = (state.lengths.shape[0], block_size - 1)
        return Proposals(jnp.full(shape, 9), jnp.full(shape, 0.25))

    return draft


def propose(texts, live, shortest):
    tokens = np.zeros((len(texts), 12), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.array([len(text) - 1 for text in texts])
    state = SimpleNamespace(tokens=jnp.asarray(tokens), lengths=lengths, live=jnp.asarray(live))
    CALLS.clear()
    found = jax.jit(lambda: lookup_or(drafts_of_nines, shortest, 4)(W)(None, state))()
    jax.effects_barrier()
    return found.ids.tolist(), found.confidence[:, 0].tolist(), len(CALLS)


def test_rows_copy_where_enough_tokens_agree_and_draft_elsewhere():
    loop, pair, new = [1, 2, 3, 1, 2, 3], [5, 6, 7, 8, 5, 6], [1, 2, 3, 4]
    nines = [9] * (W - 1)
    assert propose([loop, pair, new], [True] * 3, 3) == ([[1, 2, 3], nines, nines], [1, 0.25, 0.25], 1)
    assert propose([loop, pair, new], [True] * 3, 2) == ([[1, 2, 3], [7, 8, 5], nines], [1, 1, 0.25], 1)
    # The drafter rests when no live row needs it.
    assert propose([loop, pair], [True, True], 2)[2] == 0
    assert propose([loop, new], [True, False], 2)[2] == 0


@pytest.mark.parametrize("shortest", [1, 3])
def test_output_is_plain_decodings_whatever_is_copied(
    shortest, build, drafter, drafter_params, prompts, answers
):
    draft = lookup_or(partial(block_draft, drafter), shortest)
    both = build(drafter, drafter_params, draft=draft, block_size=W, smaller=(2,), min_confidence=0.5)
    assert [g.tokens for g in both.generate(prompts, ANSWER)] == answers
