"""Continuous batching: a fixed number of slots, each refilled from a queue as soon as its answer ends."""

import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from dscout_jax.decode.api import Decoder
from dscout_jax.decode.batch import Request
from dscout_jax.decode.generation import Generation, to_host
from dscout_jax.decode.loop import insert, make_loop
from dscout_jax.errors import UserError


def serve(
    decoder: Decoder,
    requests: Sequence[Request],
    slots: int,
    live_slots: int | None = None,
    clock: Callable[[float], object] | None = None,
    block_size: int | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Yields (index of the request, answer) as answers end; at most `slots` are decoded at a time.

    A new prompt is prefilled by itself into the place of the row that ended; the others stay as they are.
    Caches are sized once, for the longest request. In fp32 each answer is what its request gets alone.
    `decode_seconds` of an answer is the time from its first token to its last, prefills of others included;
    `done_seconds` runs from the queue's start, what the caller does between answers included.

    Args:
        live_slots, block_size: as in `Decoder.generate`.
        clock: is told the seconds of each stretch of rounds; together they are decoding without prefills.
    Raises:
        UserError: no slot, or a request that cannot be answered; before anything runs.
    """
    if slots < 1:
        raise UserError(f"slots {slots} must be at least 1")
    if not requests:
        return iter(())
    decoder = decoder.sized(block_size)
    options = dict(shape=decoder.shape(requests), live_slots=live_slots)
    return _serve(decoder, requests, min(slots, len(requests)), options, clock)


def _serve(decoder, requests, slots, options, clock) -> Iterator[tuple[int, Generation]]:
    state, seconds = decoder.prefill(requests[:slots], **options)
    waiting = iter(range(slots, len(requests)))
    # Every program is compiled before the clock of any answer starts.
    for request in {decoder.prompt_slots([r]): r for r in requests[slots:]}.values():
        row, _ = decoder.prefill([request], **options)
        decoder.compiled("insert", insert, row, state, jnp.int32(0))
    advance = decoder.compiled("advance", make_loop(decoder.round, refill=True), decoder.weights, state)
    # For each busy slot the request that it decodes, seconds of its prefill, and when decoding began.
    start = time.perf_counter()
    owners = {slot: (slot, seconds, start) for slot in range(slots)}
    start -= seconds  # the first prefill belongs to the queue, what was compiled since does not
    while owners:
        host, now = to_host(state), time.perf_counter()
        ended = [slot for slot in owners if not host.live[slot]]
        if not ended:
            started = time.perf_counter()
            state = advance(decoder.weights, state)
            if clock:
                jax.block_until_ready(state.lengths)
                clock(time.perf_counter() - started)
        for slot in ended:
            index, seconds, begun = owners.pop(slot)
            if (follower := next(waiting, None)) is not None:
                row, prefill_seconds = decoder.prefill([requests[follower]], **options)
                place = jnp.int32(slot)
                state = decoder.compiled("insert", insert, row, state, place)(row, state, place)
                owners[slot] = (follower, prefill_seconds, time.perf_counter())
            yield index, decoder.generation(host, slot, seconds, now - begun, now - start)
    if options["live_slots"] is None:  # fewer would teach that drafts are wrong
        decoder.keep(state.learnt)
