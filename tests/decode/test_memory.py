"""Caches are written where they lie; long prompts are read in chunks."""

import re

import jax
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS

from dscout_jax.decode import Adaptive, fixed, make_loop

LEARNS = Adaptive((1, 3, BLOCK_MAX), (1.0, 1.2, 1.4), (0.5, 0.4, 0.3, 0.2, 0.1))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (ROWS, {}),
        (1, dict(smaller=(1, 2), policy=fixed(1), min_confidence=0.5)),
        (1, dict(smaller=(1, 3), policy=LEARNS, plain_rows=2)),
        (1, dict(block_size=1)),
    ],
    ids=["one row", "rows", "sizes", "learning", "plain"],
)
def test_the_compiled_loop_copies_no_cache(rows, options, build, drafter, drafter_params, prompts):
    decoder = build(drafter, drafter_params, **options)
    state, _ = decoder.prefill(decoder.requests(prompts[:rows], ANSWER))
    loop = decoder.compiled("loop", make_loop(decoder.round), decoder.weights, state)
    text = loop.as_text()
    _, heads, _, width = state.target.k[0].shape
    buffer = rf"f32\[{rows},{heads},{CAPACITY},{width}\]"
    assert re.search(buffer, text), "the pattern must fit the caches"
    assert not re.findall(rf"= {buffer}\S* copy\(", text)
    caches = 2 * (len(state.target.k) + (len(state.context.k) if state.context else 0))
    assert len(re.findall("may-alias|must-alias", text.split("\n")[0])) >= caches, "and is given them"


def test_chunks_read_what_one_forward_reads(build, drafter, drafter_params, prompts):
    """Chunks of 4 end before, at and after the prompts' last tokens: 5, 1, 9 and 14."""
    states = []
    for options in ({}, dict(prefill_chunk=4, bucket=2)):
        decoder = build(drafter, drafter_params, **options)
        states.append(decoder.prefill(decoder.requests(prompts, ANSWER))[0])
    whole, chunked = states
    np.testing.assert_array_equal(chunked.tokens, whole.tokens)
    held = (np.arange(CAPACITY) < np.asarray(whole.lengths)[:, None])[:, None, :, None]
    for a, b in zip(*(jax.tree.leaves((s.target, s.context)) for s in states), strict=True):
        np.testing.assert_allclose(np.where(held, a, 0), np.where(held, b, 0), atol=2e-4)
