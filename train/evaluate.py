"""Acceptance on held-out answers without decoding: the walk that decoding would take."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dscout_jax import ops
from dscout_jax.models import Drafter, embed
from dscout_jax.sharding import BATCH, by_rows, over_rows, specs, whole
from train.step import Frozen, frozen_specs


def make_hits(
    drafter: Drafter, block_size: int, chunk: int = 512, mesh: Mesh | None = None
) -> Callable[..., jax.Array]:
    """(params, frozen, taps [R, S, CD], tokens [R, S]) -> [R, S, W-1] bool; jitted.

    Entry [r, t, k-1]: drafted from the anchor at t, slot k's argmax is the text's token at t + k. The blocks
    are truly `block_size` = W long: a slot sees all of its block, so a longer block's first slots differ.

    Args:
        chunk: slots worked on at a time. mesh: as in `make_step`; R is then a multiple of data x fsdp.
    """
    W, mask = block_size, drafter.config.mask_token_id
    count = max(1, chunk // (W - 1))

    def one_row(params, table, head, ids_R, taps_SxCD, tokens_S):
        S = tokens_S.shape[0]
        apply = partial(drafter.apply, {"params": params})
        positions = jnp.arange(S, dtype=jnp.int32)
        context = apply(apply(taps_SxCD[None], method="context"), positions[None], method="context_kv")

        def best(anchors_N):
            ids_NxW = jnp.full((count, W), mask, jnp.int32).at[:, 0].set(tokens_S[anchors_N])
            x_1xNxWxD = embed({"embed_tokens": {"weight": table}}, ids_NxW)[None]
            hidden = apply(x_1xNxWxD, anchors_N[None], context, method="block")[0, :, 1:]
            found = ops.argmax(ops.head_logits(hidden, head))
            return found if ids_R is None else ids_R[found]

        some = jnp.pad(positions, (0, -S % count), mode="edge").reshape(-1, count)
        found_SxW1 = jax.lax.map(best, some).reshape(-1, W - 1)[:S]
        at = positions[:, None] + jnp.arange(1, W)
        return (found_SxW1 == tokens_S[jnp.minimum(at, S - 1)]) & (at < S)

    def hits(params, frozen: Frozen, taps_RxSxCD, tokens_RxS):
        table = whole("embed_tokens/weight", frozen.embed_tokens["weight"])
        one = partial(one_row, params, table, whole("lm_head/weight", frozen.head), frozen.ids)
        return jax.lax.map(lambda row: one(*row), (taps_RxSxCD, tokens_RxS))

    def spread(params, frozen: Frozen, taps_RxSxCD, tokens_RxS):
        weights = by_rows(specs(params, mesh)), by_rows(frozen_specs(frozen, mesh))
        return over_rows(hits, mesh, (*weights, BATCH, BATCH), BATCH)(params, frozen, taps_RxSxCD, tokens_RxS)

    return jax.jit(hits if mesh is None else spread)


def walk(hits_SxW1: np.ndarray, answer_S: np.ndarray) -> list[int]:
    """Accepted drafts of each round that decoding with blocks of W would take over one answer.

    Starts at the first answer token, counts the leading hits, jumps by acc + 1; a round ends at the
    answer's end, so `sum(acc + 1) + 1` is the answer's length.
    """
    at, last = np.flatnonzero(answer_S)[[0, -1]]
    accepted = []
    while at < last:
        leading = np.cumprod(hits_SxW1[at]).sum()
        committed = min(int(leading) + 1, int(last - at))
        accepted.append(committed - 1)
        at += committed
    return accepted


def evaluate(rows: Iterable[tuple[np.ndarray, Mapping[int, np.ndarray]]]) -> dict[str, Any]:
    """Walked MAT for each block size, prefix survival, accuracy over all anchors.

    Args:
        rows: of each, its answer's mask [S] and, by block size B, the table [S, B-1] of `make_hits`.
    Returns:
        mat: {B: committed tokens / rounds}. survival: S_k at the largest. slots: per-slot accuracy over
        every anchor of the answers, not over rounds; it flatters and is never called MAT.
    """
    rounds: dict[int, list[int]] = {}
    right: Any = 0
    count: Any = 0
    for answer_S, tables in rows:
        for B, table in tables.items():
            rounds.setdefault(B, []).extend(walk(table, answer_S))
        table = tables[max(tables)]
        first, last = np.flatnonzero(answer_S)[[0, -1]]
        inside = [table[first : max(first, last - k), k] for k in range(table.shape[1])]
        right = right + np.array([x.sum() for x in inside], float)
        count = count + np.array([len(x) for x in inside], float)
    block_size = max(rounds)
    full = np.array(rounds[block_size])
    return {
        "mat": {str(B): float(np.mean(found)) + 1.0 for B, found in rounds.items()},
        "survival": [float(np.mean(full >= k)) for k in range(1, block_size)],
        "slots": (right / np.maximum(count, 1)).tolist(),
    }
