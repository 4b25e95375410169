"""Acceptance on held-out answers without decoding: the walk that decoding would take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax import ops
from dscout_jax.models import Drafter, embed
from train.dataset import Batch
from train.step import Frozen


def make_hits(drafter: Drafter, block_size: int, chunk: int = 512) -> Callable[..., jax.Array]:
    """(params, frozen, taps [1, S, CD], tokens [S]) -> [S, W-1] bool; jitted.

    Entry [t, k-1]: drafted from the anchor at t, slot k's argmax is the text's token at t + k. The blocks are
    truly `block_size` = W long: a slot sees all of its block, so a longer block's first slots differ.
    """
    W, mask = block_size, drafter.config.mask_token_id

    @jax.jit
    def hits(params, frozen: Frozen, taps_1xSxCD, tokens_S):
        S = tokens_S.shape[0]
        anchors = jnp.arange(S, dtype=jnp.int32)
        ids_SxW = jnp.full((S, W), mask, jnp.int32).at[:, 0].set(tokens_S)
        x_1xSxWxD = embed({"embed_tokens": frozen.embed_tokens}, ids_SxW)[None]
        hidden = drafter.apply({"params": params}, taps_1xSxCD, x_1xSxWxD, anchors[None])[0, :, 1:]
        rows = hidden.reshape(S * (W - 1), -1)
        size = min(chunk, len(rows))
        rows = jnp.pad(rows, ((0, -len(rows) % size), (0, 0))).reshape(-1, size, rows.shape[1])
        best = jax.lax.map(lambda r: ops.argmax(ops.head_logits(r, frozen.head)), rows)
        best = best if frozen.ids is None else frozen.ids[best]
        best = best.reshape(-1)[: S * (W - 1)].reshape(S, W - 1)
        at = anchors[:, None] + jnp.arange(1, W)
        return (best == tokens_S[jnp.minimum(at, S - 1)]) & (at < S)

    return hits


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


def evaluate(
    hits: Mapping[int, Callable[..., jax.Array]],
    params: dict[str, Any],
    frozen: Frozen,
    taps: Callable[[Batch], jax.Array],
    rows: Sequence[Batch],
) -> dict[str, Any]:
    """Walked MAT for each block size of `hits` (`make_hits`), prefix survival, accuracy over all anchors.

    mat: {B: committed tokens / rounds}. survival: S_k at the largest. slots: per-slot accuracy over
    every anchor of the answers, not over rounds; it flatters and is never called MAT.
    """
    block_size = max(hits)
    rounds: dict[int, list[int]] = {B: [] for B in hits}
    right, count = np.zeros(block_size - 1), np.zeros(block_size - 1)
    for row in rows:
        features = taps(row)
        tables = {B: np.asarray(h(params, frozen, features, row.tokens)) for B, h in hits.items()}
        for B, table in tables.items():
            rounds[B] += walk(table, row.answer)
        table = tables[block_size]
        first, last = np.flatnonzero(row.answer)[[0, -1]]
        for k in range(1, block_size):
            inside = table[first : max(first, last - k + 1), k - 1]
            right[k - 1] += inside.sum()
            count[k - 1] += len(inside)
    full = np.array(rounds[block_size])
    return {
        "mat": {str(B): float(np.mean(found)) + 1.0 for B, found in rounds.items()},
        "survival": [float(np.mean(full >= k)) for k in range(1, block_size)],
        "slots": (right / np.maximum(count, 1)).tolist(),
    }
