"""Proposals: what a round offers to the target. Any pure function of weights and state can stand here."""

from collections.abc import Callable

import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.decode.sampling import Proposals, draw_drafts
from dscout_jax.decode.state import DecodeState, Weights
from dscout_jax.models import Drafter, embed, target_head

NO_TOKEN = -1
"""A proposal that no target ever accepts."""

Draft = Callable[[Weights, DecodeState], Proposals]
"""(weights, state) -> proposals for W-1 slots: the guess for position `lengths + k` at index k-1."""


def block_draft(drafter: Drafter, block_size: int, sampled: bool = False) -> Draft:
    """The drafter's own proposals: one forward over [anchor, MASK, ...], argmax of slots 1..W-1.

    Args:
        sampled: rows with a temperature draw from the drafter's distribution instead, and are verified by
            full rejection sampling. Slots are drawn one apart from another: less coherent than argmaxes.
    """
    mask = drafter.config.mask_token_id

    def draft(weights: Weights, state: DecodeState) -> Proposals:
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
        logits_BxWxR = ops.head_logits(hidden_BxNxWxD[:, 0], head)
        best_BxW = ops.argmax(logits_BxWxR)
        # The share of the likeliest token; left out of the program where nothing reads it.
        largest = logits_BxWxR.max(axis=-1, keepdims=True)
        confidence_BxW = 1 / jnp.exp(logits_BxWxR - largest).sum(axis=-1)
        probs = None
        if sampled:
            positions = state.lengths[:, None] + jnp.arange(block_size)
            best_BxW, probs = draw_drafts(logits_BxWxR, best_BxW, state.sampling, positions)
            if weights.draft_ids is not None:
                everywhere = jnp.zeros((*best_BxW.shape, target_head(weights.target).shape[0]), probs.dtype)
                probs = everywhere.at[..., weights.draft_ids].set(probs)
            probs = probs[:, 1:]
        ids_BxW = best_BxW if weights.draft_ids is None else weights.draft_ids[best_BxW]
        return Proposals(ids_BxW[:, 1:], confidence_BxW[:, 1:], probs)

    return draft


def no_draft(block_size: int) -> Draft:
    """Plain decoding: proposes nothing. With block_size > 1 the idle slots only choose the kernels' shape."""

    def draft(weights: Weights, state: DecodeState) -> Proposals:
        shape = (state.lengths.shape[0], block_size - 1)
        return Proposals(jnp.full(shape, NO_TOKEN, jnp.int32), jnp.zeros(shape))

    return draft
