"""Proposals: what a round offers to the target. Any pure function of weights and state can stand here."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.decode.state import DecodeState, Weights
from dscout_jax.models import Drafter, embed, target_head

NO_TOKEN = -1
"""A proposal that no target ever accepts."""

Draft = Callable[[Weights, DecodeState], jax.Array]
"""(weights, state) -> proposals [B, W-1]: the guess for position `lengths + k` at index k-1."""


def block_draft(drafter: Drafter, block_size: int) -> Draft:
    """The drafter's own proposals: one forward over [anchor, MASK, ...], argmax of slots 1..W-1."""
    mask = drafter.config.mask_token_id

    def draft(weights: Weights, state: DecodeState) -> jax.Array:
        B = state.lengths.shape[0]
        ids_BxW = jnp.full((B, block_size), mask, jnp.int32).at[:, 0].set(state.anchors)
        hidden_BxNxWxD = drafter.apply(
            {"params": weights.drafter},
            embed(weights.target, ids_BxW)[:, None],
            state.lengths[:, None],
            state.context,
            method="block",
        )
        # Slot 0 goes through the head too: it costs nothing, and with one slot left the product would
        # fall into the slower kernel for a single row.
        head = target_head(weights.target) if weights.draft_head is None else weights.draft_head
        best_BxW = ops.argmax(ops.head_logits(hidden_BxNxWxD[:, 0], head))
        return (best_BxW if weights.draft_ids is None else weights.draft_ids[best_BxW])[:, 1:]

    return draft


def no_draft(block_size: int) -> Draft:
    """Plain decoding: proposes nothing. With block_size > 1 the idle slots only choose the kernels' shape."""

    def draft(weights: Weights, state: DecodeState) -> jax.Array:
        return jnp.full((state.lengths.shape[0], block_size - 1), NO_TOKEN, jnp.int32)

    return draft
