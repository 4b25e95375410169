"""Caches are written where they lie; long prompts are read in chunks."""

import re

import jax
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS

from dscout_jax.decode import Adaptive, fixed, make_loop
from dscout_jax.decode.loop import insert

SIZES = dict(smaller=(1, 2), policy=fixed(1), min_confidence=0.5)
LEARNS = Adaptive((1, 3, BLOCK_MAX), (1.0, 1.2, 1.4), (0.5, 0.4, 0.3, 0.2, 0.1))


@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("loop", 1, {}),
        ("loop", ROWS, {}),
        ("loop", 1, SIZES),
        ("loop", 1, dict(smaller=(1, 3), policy=LEARNS, plain_rows=2)),
        ("loop", 1, dict(block_size=1)),
        ("round", 1, {}),
        ("round", 1, SIZES),
        ("advance", ROWS, {}),
        ("advance", ROWS, SIZES),
        ("insert", ROWS, {}),
    ],
    ids=[
        *("one row", "rows", "sizes", "learning", "plain"),
        *("streamed", "streamed sizes", "queue", "queue of sizes", "insert"),
    ],
)
def test_no_compiled_program_copies_a_cache(name, rows, options, build, drafter, drafter_params, prompts):
    decoder = build(drafter, drafter_params, **options)
    state, _ = decoder.prefill(decoder.requests(prompts[:rows], ANSWER))
    run = {"loop": make_loop(decoder.round), "round": decoder.round, "insert": insert}
    run["advance"] = make_loop(decoder.round, refill=True)
    arguments = [decoder.weights, state]
    if name == "insert":
        arguments = [jax.tree.map(lambda x: x[:1], state), state, np.int32(0)]
    text = decoder.compiled(name, run[name], *arguments).as_text()
    _, heads, _, width = state.target.k[0].shape
    buffer = rf"\[{rows},{heads},{CAPACITY},{width}\]"
    assert re.search(f"f32{buffer}", text), "the pattern must fit the caches"
    # Nor is one written anew in another dtype.
    assert not re.findall(rf"= \w+{buffer}\S* (?:copy|convert)\(", text)
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
