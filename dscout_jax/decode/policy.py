"""Which of a decoder's block sizes a round takes: a pure function of the state that output never hangs on."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decode.state import Acceptance, DecodeState
from dscout_jax.errors import UserError

Policy = Callable[[DecodeState], jax.Array]
"""state -> the index [] int32 of the next round's size, shared by all rows."""

FADE = 0.95
"""What a round leaves of the counts before it: some twenty rounds are remembered."""


def fixed(index: int) -> Policy:
    """Always the same size, by its index."""
    return lambda state: jnp.int32(index)


def greedy(sizes: Sequence[int], costs: Sequence[float], prior: float = 0.7, weight: float = 2.0) -> Policy:
    """The size with the most tokens expected for its cost: `(1 + sum_{k<size} S_k) / cost(size)`.

    `S_k = prod_{j<=k} a_j`, with `a_j = (hits_j + weight * prior) / (tried_j + weight)`; summed over the live
    rows. Counts fade, so that a slot that was not tried for long is thought to be as good as the prior, and
    is tried again.

    Args:
        sizes: the decoder's, ascending.
        costs: time of a round at each, in any unit.
    Raises:
        UserError: not one cost above zero for each size.
    """
    if len(costs) != len(sizes) or min(costs, default=0) <= 0:
        raise UserError(f"block sizes {tuple(sizes)} need as many costs above 0, not {tuple(costs)}")
    inside = np.arange(1, max(sizes)) < np.array(sizes)[:, None]  # slots that each size has

    def policy(state: DecodeState) -> jax.Array:
        tried, hits = state.acceptance
        survival_BxW1 = jnp.cumprod((hits + weight * prior) / (tried + weight), axis=1)
        tokens = 1 + (survival_BxW1[:, None] * inside).sum(axis=-1)  # [B, sizes]
        gain = (tokens * state.live[:, None]).sum(axis=0) / jnp.asarray(costs)
        return jnp.argmax(gain).astype(jnp.int32)

    return policy


def observe(
    acceptance: Acceptance, sent_B: jax.Array, accepted_B: jax.Array, live_B: jax.Array
) -> Acceptance:
    """The counts after a round that sent `sent` drafts a row, of which the first `accepted` were right."""
    slots = jnp.arange(1, acceptance.tried.shape[1] + 1)
    tried = live_B[:, None] & (slots <= sent_B[:, None]) & (slots <= accepted_B[:, None] + 1)
    hit = tried & (slots <= accepted_B[:, None])
    keep = jnp.where(live_B, FADE, 1.0)[:, None]
    return Acceptance(acceptance.tried * keep + tried, acceptance.hits * keep + hit)
