"""Verification: what the target makes of the proposals, and how much of it is committed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Commit(NamedTuple):
    """What one round adds to each row.

    accepted: [B] int32, leading proposals that equal the target's choices, before any cut.
    count: [B] int32, tokens committed; the choices of slots 0..count-1. Zero where a row is not live.
    stopped: [B] bool, the last of them is a stop id.
    """

    accepted: jax.Array
    count: jax.Array
    stopped: jax.Array


def is_stop(ids: jax.Array, stops_BxE: jax.Array) -> jax.Array:
    """[B, ...] bool: which ids [B, ...] are among their row's stop ids."""
    stops = stops_BxE.reshape(stops_BxE.shape[0], *(1,) * (ids.ndim - 1), -1)
    return jnp.any(ids[..., None] == stops, axis=-1)


def accept(
    proposals_BxW1: jax.Array,
    choices_BxW: jax.Array,
    slots_B: jax.Array,
    stops_BxE: jax.Array,
    room_B: jax.Array,
    live_B: jax.Array,
) -> Commit:
    """Leading matches plus the bonus, cut at the first stop id and at the budget.

        acc   = sum_k prod_{j<=k} [proposal_j = choice_{j-1}],  at most slots - 1
        count = min(acc + 1, slots up to the first stop id, room)

    The cut comes before any state moves, so nothing after a stop is ever emitted or counted. Accepted
    proposals equal the target's choices; so what is committed is `choices[:count]`.

    Args:
        proposals_BxW1: [B, W-1] proposed ids for slots 1..W-1; negative proposes nothing.
        choices_BxW: the target's tokens after slots 0..W-1, argmaxes or draws (see `sampling.choose`).
        slots_B: slots of the block that may be used.
        stops_BxE: stop ids, padded with -1.
        room_B: tokens that the budget allows.
        live_B: rows that take part.
    """
    W = choices_BxW.shape[1]
    matches = jnp.cumprod((proposals_BxW1 == choices_BxW[:, :-1]).astype(jnp.int32), axis=1)
    accepted_B = jnp.minimum(matches.sum(axis=1), slots_B - 1)
    stop_BxW = is_stop(choices_BxW, stops_BxE)
    until_stop_B = jnp.where(stop_BxW.any(axis=1), jnp.argmax(stop_BxW, axis=1) + 1, W)
    count_B = jnp.minimum(jnp.minimum(accepted_B + 1, until_stop_B), room_B)
    count_B = jnp.where(live_B, count_B, 0).astype(jnp.int32)
    stopped_B = jnp.any(stop_BxW & (jnp.arange(W) < count_B[:, None]), axis=1)
    return Commit(accepted_B, count_B, stopped_B)
