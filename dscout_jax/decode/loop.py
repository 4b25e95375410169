"""Prefill, the round and the loop: the whole of decoding, as pure functions of weights and state."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.decode.adapt import Adaptive
from dscout_jax.decode.draft import Draft
from dscout_jax.decode.policy import Policy, observe
from dscout_jax.decode.sampling import Proposals, choose
from dscout_jax.decode.state import Acceptance, Batch, DecodeState, Learnt, Weights
from dscout_jax.decode.verify import accept, is_stop
from dscout_jax.models import Drafter, KVCache, Target, init_cache, target_head, write_cache

Round = Callable[[Weights, DecodeState], DecodeState]
Caches = tuple[KVCache, KVCache | None]


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
    chunk: int,
    tracked: int,
    weights: Weights,
    batch: Batch,
    learnt: Learnt | None = None,
) -> DecodeState:
    """Reads the prompts and emits each row's first token.

    Args:
        chunk: positions read in one forward; longer batches [B, P] are read chunk by chunk, P a multiple.
        tracked: slots whose acceptance is counted for a policy; 0: none.
        learnt: what an `Adaptive` policy begins with.
    """
    tokens_BxP, prompts_B = batch.tokens, batch.prompts
    B, P = tokens_BxP.shape
    rows, zeros = jnp.arange(B), jnp.zeros(B, jnp.int32)
    taps = drafter.config.target_layer_ids if drafter else ()

    def read(carry, part):
        cache, context, last_BxD = carry
        tokens_BxC, start = part
        starts_B = zeros + start
        out = target.apply({"params": weights.target}, tokens_BxC, starts_B, cache, taps)
        if drafter:
            context = extend_context(drafter, weights, context, out.taps, starts_B)
        at_B = prompts_B - 1 - start
        here_B = (at_B >= 0) & (at_B < tokens_BxC.shape[1])
        hidden_BxD = out.hidden[rows, jnp.clip(at_B, 0, tokens_BxC.shape[1] - 1)]
        return (out.cache, context, jnp.where(here_B[:, None], hidden_BxD, last_BxD)), None

    cache = init_cache(target.config, B, capacity, cache_dtype)
    context = init_cache(drafter.config, B, capacity, cache_dtype) if drafter else None
    carry = (cache, context, jnp.zeros((B, target.config.hidden_size), target.dtype))
    if chunk >= P:
        carry, _ = read(carry, (tokens_BxP, 0))
    else:
        chunks_NxBxC = tokens_BxP.reshape(B, P // chunk, chunk).swapaxes(0, 1)
        carry, _ = jax.lax.scan(read, carry, (chunks_NxBxC, jnp.arange(P // chunk) * chunk))
    cache, context, last_BxD = carry
    logits_BxV = ops.head_logits(last_BxD, target_head(weights.target))
    first_B = choose(logits_BxV[:, None], None, batch.sampling, prompts_B[:, None])[:, 0]
    tokens_BxS = jnp.zeros((B, capacity), jnp.int32).at[:, :P].set(tokens_BxP)
    return DecodeState(
        tokens=tokens_BxS.at[rows, prompts_B].set(first_B, mode="drop"),
        lengths=prompts_B,
        prompts=prompts_B,
        limits=prompts_B + batch.budgets,
        stops=batch.stops,
        slots=batch.slots,
        sampling=batch.sampling,
        stopped=is_stop(first_B, batch.stops),
        rounds=zeros,
        committed=jnp.zeros((B, capacity), jnp.int32),
        target=cache,
        context=context,
        acceptance=Acceptance(*jnp.zeros((2, B, tracked))) if tracked else None,
        learnt=learnt,
    )


def make_round(
    target: Target,
    drafter: Drafter | None,
    drafts: Sequence[tuple[int, Draft]],
    policy: Policy | None = None,
    min_confidence: float = 0.0,
    plain_rows: int = 1,
) -> Round:
    """One round: draft, verify, accept, commit. Rows that are not live only keep their slot.

    Every slot's entries are written to both caches, and only the length moves by the count committed:
    entries of rejected slots lie at or past the new length, where the next round overwrites them before
    any query can see them. A row that is not live writes past its own length and never moves it.

    Args:
        drafts: block sizes, ascending, and what drafts at each. With several, a round drafts at one of them
            and verifies at the smallest that holds what is sent; each is a branch of the one program.
        policy: chooses the size that drafts; None: the largest.
        min_confidence: drafts are sent while the running product of their confidence is at least this.
        plain_rows: slots that a round computes at the least, sent or not.
    """
    sizes = [size for size, _ in drafts]
    W = sizes[-1]
    widths = sorted({max(size, plain_rows) for size in sizes})
    taps = drafter.config.target_layer_ids if drafter else ()

    def propose(weights: Weights, state: DecodeState) -> tuple[Proposals, jax.Array | int]:
        """Proposals for W-1 slots, and the size that they were drafted at."""
        if policy is None:
            return drafts[-1][1](weights, state), W

        def wide(draft: Draft) -> Proposals:
            def filled(x: jax.Array) -> jax.Array:
                return jnp.pad(x, ((0, 0), (0, W - 1 - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))

            return jax.tree.map(filled, draft(weights, state))

        index = policy(state)
        branches = [lambda _, draft=draft: wide(draft) for _, draft in drafts]
        empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: wide(drafts[-1][1])))
        return _switch_in_place(index, branches, empty), jnp.asarray(sizes)[index]

    def verify(weights: Weights, state: DecodeState, proposals: Proposals, size: int, caches: Caches):
        """The target's choices [B, W] at the first `size` slots, and both caches with their entries."""
        cache, context = caches
        sent = jax.tree.map(lambda x: x[:, : size - 1], proposals)
        # Slots without a proposal still need an id to embed; the anchor's is as good as any.
        anchors_Bx1 = state.anchors[:, None]
        fed_BxW1 = jnp.where(sent.ids < 0, anchors_Bx1, sent.ids)
        block_BxW = jnp.concatenate([anchors_Bx1, fed_BxW1], axis=1)
        out = target.apply({"params": weights.target}, block_BxW, state.lengths, cache, taps)
        logits_BxWxV = ops.head_logits(out.hidden, target_head(weights.target))
        after_BxW = state.lengths[:, None] + 1 + jnp.arange(size)
        choices_BxW = choose(logits_BxWxV, sent, state.sampling, after_BxW)
        if drafter:
            # The bonus is the next anchor: its features do not exist yet, and none are written for it.
            context = extend_context(drafter, weights, context, out.taps, state.lengths)
        return jnp.pad(choices_BxW, ((0, 0), (0, W - size))), (out.cache, context)

    def round_fn(weights: Weights, state: DecodeState) -> DecodeState:
        proposals, drafted = propose(weights, state)
        live_B = state.live
        slots_B = jnp.minimum(state.slots, drafted)
        if min_confidence:
            sure_BxW1 = jnp.cumprod(proposals.confidence, axis=1) >= min_confidence
            slots_B = jnp.minimum(slots_B, 1 + sure_BxW1.sum(axis=1))
        caches = (state.target, state.context)
        state = state._replace(target=None, context=None)
        if len(widths) == 1:
            choices_BxW, caches = verify(weights, state, proposals, W, caches)
        else:
            widest = jnp.where(live_B, slots_B, 1).max()
            enough = jnp.searchsorted(jnp.asarray(widths), widest).astype(jnp.int32)
            branches = [
                lambda carry, size=size: verify(weights, state, proposals, size, carry[1]) for size in widths
            ]
            nothing = jnp.zeros((len(live_B), W), jnp.int32)
            choices_BxW, caches = _switch_in_place(enough, branches, (nothing, caches))
        commit = accept(proposals.ids, choices_BxW, slots_B, state.stops, state.room, live_B)

        B, S = state.tokens.shape
        rows = jnp.arange(B)
        after_BxW = state.lengths[:, None] + 1 + jnp.arange(W)
        round_B = jnp.where(live_B, state.rounds, S)  # S is out of range: dropped
        acceptance = state.acceptance
        if acceptance is not None:
            acceptance = observe(acceptance, slots_B - 1, commit.accepted, live_B)
        learnt = state.learnt
        if isinstance(policy, Adaptive):
            learnt = policy.learn(learnt, slots_B - 1, commit.accepted, live_B)
        return state._replace(
            tokens=state.tokens.at[rows[:, None], after_BxW].set(choices_BxW, mode="drop"),
            lengths=state.lengths + commit.count,
            stopped=state.stopped | commit.stopped,
            rounds=state.rounds + live_B,
            committed=state.committed.at[rows, round_B].set(commit.count, mode="drop"),
            target=caches[0],
            context=caches[1],
            acceptance=acceptance,
            learnt=learnt,
        )

    return round_fn


def _switch_in_place(index: jax.Array, branches: Sequence[Callable[[Any], Any]], carry: Any) -> Any:
    """`lax.switch` over a carry with big buffers: loops of one or no turn, which update it in place.

    XLA copies the buffers that a conditional's branches touch, but not those of a loop's body.
    """
    for i, branch in enumerate(branches):
        index, carry = jax.lax.while_loop(
            lambda c, i=i: c[0] == i, lambda c, run=branch: (jnp.int32(-1), run(c[1])), (index, carry)
        )
    return carry


def make_loop(round_fn: Round, refill: bool = False) -> Round:
    """Rounds as one `lax.while_loop`, until no row is live; with `refill`, until any live row has ended."""

    def loop(weights: Weights, state: DecodeState) -> DecodeState:
        enough = state.live.sum() if refill else 1

        def on(s: DecodeState) -> jax.Array:
            return (s.live.sum() >= enough) & s.live.any() if refill else s.live.any()

        return jax.lax.while_loop(on, lambda s: round_fn(weights, s), state)

    return loop


def insert(row: DecodeState, state: DecodeState, slot: jax.Array) -> DecodeState:
    """`state` with the one row of `row` in the place of its row `slot`; no other row changes.

    What a policy has learnt of all rows stays.
    """
    rows = (state._replace(learnt=None), row._replace(learnt=None))
    return jax.tree.map(lambda whole, one: whole.at[slot].set(one[0]), *rows)._replace(learnt=state.learnt)
