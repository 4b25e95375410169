"""Prefill and the round: the whole of decoding, as pure functions of weights and state."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.decode.draft import Draft
from dscout_jax.decode.sampling import Choose
from dscout_jax.decode.state import DecodeState, Weights
from dscout_jax.decode.verify import accept_greedy, is_stop
from dscout_jax.models import Drafter, KVCache, Target, init_cache, target_head, write_cache

Round = Callable[[Weights, DecodeState], DecodeState]


def extend_context(
    drafter: Drafter, weights: Weights, cache: KVCache, taps_BxTxCD: jax.Array, starts_B: jax.Array
) -> KVCache:
    """Adds context entries for T tapped positions a row, from position `starts` on."""
    variables = {"params": weights.drafter}
    positions_BxT = starts_B[:, None] + jnp.arange(taps_BxTxCD.shape[1], dtype=jnp.int32)
    ctx = drafter.apply(variables, taps_BxTxCD, method="context")
    entries = drafter.apply(variables, ctx, positions_BxT, method="context_kv")
    return write_cache(cache, entries, positions_BxT)


def prefill(
    target: Target,
    drafter: Drafter | None,
    capacity: int,
    cache_dtype: jnp.dtype,
    choose: Choose,
    weights: Weights,
    tokens_BxP: jax.Array,
    prompts_B: jax.Array,
    budgets_B: jax.Array,
    stops_BxE: jax.Array,
    slots_B: jax.Array,
) -> DecodeState:
    """Reads the prompts [B, P], padded on the right, and emits each row's first token."""
    B, P = tokens_BxP.shape
    rows, zeros = jnp.arange(B), jnp.zeros(B, jnp.int32)
    taps = drafter.config.target_layer_ids if drafter else ()
    cache = init_cache(target.config, B, capacity, cache_dtype)
    out = target.apply({"params": weights.target}, tokens_BxP, zeros, cache, taps)
    logits_BxV = ops.head_logits(out.hidden[rows, prompts_B - 1], target_head(weights.target))
    first_B = choose(logits_BxV[:, None], tokens_BxP, prompts_B, prompts_B[:, None])[:, 0]
    context = None
    if drafter:
        empty = init_cache(drafter.config, B, capacity, cache_dtype)
        context = extend_context(drafter, weights, empty, out.taps, zeros)
    tokens_BxS = jnp.zeros((B, capacity), jnp.int32).at[:, :P].set(tokens_BxP)
    return DecodeState(
        tokens=tokens_BxS.at[rows, prompts_B].set(first_B, mode="drop"),
        lengths=prompts_B,
        prompts=prompts_B,
        limits=prompts_B + budgets_B,
        stops=stops_BxE,
        slots=slots_B,
        stopped=is_stop(first_B, stops_BxE),
        rounds=zeros,
        committed=jnp.zeros((B, capacity), jnp.int32),
        target=out.cache,
        context=context,
    )


def make_round(target: Target, drafter: Drafter | None, draft: Draft, choose: Choose) -> Round:
    """One round: draft, verify, accept, commit. Rows that are not live only keep their slot.

    Every slot's entries are written to both caches, and only the length moves by the count committed:
    entries of rejected slots lie at or past the new length, where the next round overwrites them before
    any query can see them. A row that is not live writes past its own length and never moves it.
    """
    taps = drafter.config.target_layer_ids if drafter else ()

    def round_fn(weights: Weights, state: DecodeState) -> DecodeState:
        proposals_BxW1 = draft(weights, state)
        # Slots without a proposal still need an id to embed; the anchor's is as good as any.
        anchors_Bx1 = state.anchors[:, None]
        fed_BxW1 = jnp.where(proposals_BxW1 < 0, anchors_Bx1, proposals_BxW1)
        block_BxW = jnp.concatenate([anchors_Bx1, fed_BxW1], axis=1)

        out = target.apply({"params": weights.target}, block_BxW, state.lengths, state.target, taps)
        logits_BxWxV = ops.head_logits(out.hidden, target_head(weights.target))
        after_BxW = state.lengths[:, None] + 1 + jnp.arange(block_BxW.shape[1])
        choices_BxW = choose(logits_BxWxV, state.tokens, state.prompts, after_BxW)
        live_B = state.live
        commit = accept_greedy(proposals_BxW1, choices_BxW, state.slots, state.stops, state.room, live_B)
        context = state.context
        if drafter:
            # The bonus is the next anchor: its features do not exist yet, and none are written for it.
            context = extend_context(drafter, weights, context, out.taps, state.lengths)

        B, S = state.tokens.shape
        rows = jnp.arange(B)
        round_B = jnp.where(live_B, state.rounds, S)  # S is out of range: dropped
        return state._replace(
            tokens=state.tokens.at[rows[:, None], after_BxW].set(choices_BxW, mode="drop"),
            lengths=state.lengths + commit.count,
            stopped=state.stopped | commit.stopped,
            rounds=state.rounds + live_B,
            committed=state.committed.at[rows, round_B].set(commit.count, mode="drop"),
            target=out.cache,
            context=context,
        )

    return round_fn


def make_loop(round_fn: Round) -> Round:
    """Rounds until no row is live, as one `lax.while_loop`."""

    def loop(weights: Weights, state: DecodeState) -> DecodeState:
        return jax.lax.while_loop(lambda s: s.live.any(), lambda s: round_fn(weights, s), state)

    return loop
