"""The product of the three factors, as sums that add over devices and accumulation steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax.errors import UserError
from dscout_jax.objective import prediction as prediction_
from dscout_jax.objective.inclusion import Blocks
from dscout_jax.objective.presets import Objective
from dscout_jax.objective.weighting import BlindScores, Scores, detached


class LossSums(NamedTuple):
    """Sums over a batch; loss = numerator / denominator of the GLOBAL sums.

    numerator: sum m sg(w) l (+ the chain term, each block's times the block's share of the denominator).
    denominator: sum m sg(w).
    slots: per slot [W]: `included` (sum m), `weight` (sum m w), `loss` (sum m l), `hits` (sum m hit),
        `gradient` (sum m w |dl/dh|, the slot's pull on the drafter's output), `reach` (blocks that show only
        the anchor and include slot k), of those `bare_hits` (slot k hits) and `survived` (slots 1..k all
        hit), so that S_k = survived / reach.
    """

    numerator: jax.Array
    denominator: jax.Array
    slots: dict[str, jax.Array]


def factorized_loss(
    objective: Objective,
    hidden_BxNxWxD: jax.Array,
    head_VxD: jax.Array,
    blocks: Blocks,
    target_hidden_BxSxD: jax.Array | None = None,
    *,
    rows_per_sequence: int | None = None,
    chunk: int = 1024,
) -> LossSums:
    """L = sum m sg(w) l / sum m sg(w), returned as its two sums.

    Args:
        objective: the three factors.
        hidden_BxNxWxD: the drafter's output.
        head_VxD: the target's head; frozen.
        blocks: from `sample_blocks`.
        target_hidden_BxSxD: the target's hidden states after the final norm, for objectives that see it.
        rows_per_sequence: static bound on a sequence's included slots, such as the query budget: the head
            works on so many rows. A sequence with more makes the loss NaN. None: N (W - 1).
        chunk: rows through the head at a time.
    Raises:
        UserError: an objective that sees the target, without the target's hidden states; or a weighting that
            looks at the target's side of the scores without saying so.
    """
    if objective.sees_target and target_hidden_BxSxD is None:
        raise UserError(
            f"objective {objective.name!r} compares with the target: pass the target's hidden states"
        )
    B, N, W, D = hidden_BxNxWxD.shape
    most = N * (W - 1)
    R = min(rows_per_sequence or most, most)
    # Only included slots go through the head: it is the dear part, and mixed horizons leave half out.
    mask_BxM = blocks.mask.reshape(B, N * W)
    index_BxR = jax.vmap(lambda m: jnp.flatnonzero(m, size=R, fill_value=N * W))(mask_BxM)

    def take(values_BxM):
        at = jnp.minimum(index_BxR, N * W - 1).reshape(B, R, *[1] * (values_BxM.ndim - 2))
        return jnp.take_along_axis(values_BxM, at, axis=1)

    target_hidden = None
    if objective.sees_target:
        before_BxM = (blocks.anchors[..., None] + jnp.arange(W) - 1).reshape(B, N * W)
        before_BxR = jnp.clip(take(before_BxM), 0, target_hidden_BxSxD.shape[1] - 1)
        target_hidden = jnp.take_along_axis(target_hidden_BxSxD, before_BxR[..., None], axis=1)
        target_hidden = target_hidden.reshape(B * R, D)
    out = prediction_.rows(
        objective.prediction,
        take(hidden_BxNxWxD.reshape(B, N * W, D)).reshape(B * R, D),
        head_VxD,
        take(blocks.labels.reshape(B, N * W)).reshape(B * R),
        target_hidden,
        chunk,
        logp_gradient=bool(objective.chain),
    )

    def put(values_M):
        flat = jnp.zeros((B, N * W), values_M.dtype)
        rows = jnp.arange(B)[:, None]
        flat = flat.at[rows, index_BxR].set(values_M.reshape(B, R), mode="drop")
        return flat.reshape(B, N, W)

    full = jax.tree.map(put, out)
    mask = blocks.mask
    kind = Scores if objective.sees_target else BlindScores
    scores = kind(full.logp, full.hit, mask, blocks.revealed, full.overlap, full.target_logp)
    weights = jnp.where(mask, detached(objective.weighting, scores), 0.0)
    numerator, denominator = (weights * full.loss).sum(), weights.sum()
    if objective.chain:
        numerator += objective.chain * (weights.sum(-1) * _chain(full.logp, mask)).sum()
    if most > R:
        # A slot that found no row would count with a loss of zero: better no step at all.
        numerator = jnp.where(mask_BxM.sum(axis=1).max() > R, jnp.nan, numerator)
    return LossSums(numerator, denominator, _diagnostics(full, weights, blocks))


def _chain(logp_BxNxW: jax.Array, mask_BxNxW: jax.Array) -> jax.Array:
    """[B, N]: -mean over a block's included slots of prod_{j<=k} q_j(y_j) [arXiv 2606.11552].

    Differentiable. The mean over a block's slots is the published one; how blocks are averaged is a choice of
    ours: by the block's share of the loss's denominator, as a constant. So the loss stays one quotient of two
    sums that add over devices and accumulation steps, and `chain` weighs the term against the loss of the
    same block. Within a block no weighting touches it.
    """
    reach = jnp.exp(jnp.cumsum(jnp.where(mask_BxNxW, logp_BxNxW, 0.0), axis=-1))
    return -(reach * mask_BxNxW).sum(-1) / jnp.maximum(mask_BxNxW.sum(-1), 1)


def _diagnostics(full, weights: jax.Array, blocks: Blocks) -> dict[str, jax.Array]:
    mask = blocks.mask
    over = (0, 1)
    bare = ~blocks.revealed.any(-1, keepdims=True) & mask
    alive = jnp.cumprod(jnp.where(mask, full.hit, True), axis=-1).astype(bool)
    sums = {
        "included": mask.sum(over),
        "weight": weights.sum(over),
        "loss": (full.loss * mask).sum(over),
        "hits": (full.hit & mask).sum(over),
        "gradient": (weights * full.slope).sum(over),
        "reach": bare.sum(over),
        "bare_hits": (full.hit & bare).sum(over),
        "survived": (bare & alive).sum(over),
    }
    return {name: jax.lax.stop_gradient(value.astype(jnp.float32)) for name, value in sums.items()}
