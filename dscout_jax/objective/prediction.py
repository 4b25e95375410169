"""Prediction loss: what a slot pays for its distribution q against the true token y or the target's p.

A prediction is a function `(logq, logp, labels) -> loss` of a few rows; `rows` runs it in chunks with
recomputation, so neither q nor p ever exists for a whole batch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.errors import UserError

RowLoss = Callable[[jax.Array, jax.Array | None, jax.Array], jax.Array]
"""(logq [M, V], logp [M, V] or None, labels [M]) -> loss [M]."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A row loss, and whether it needs the target's distribution."""

    loss: RowLoss
    sees_target: bool = False


def _label(logq: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logq, labels[:, None], axis=1)[:, 0]


def _tv(logq: jax.Array, logp: jax.Array, labels: jax.Array) -> jax.Array:
    return 1.0 - jnp.minimum(jnp.exp(logp), jnp.exp(logq)).sum(-1)


ce = Prediction(lambda logq, logp, labels: -_label(logq, labels))
"""-log q(y): hard cross-entropy on the true token."""

soft_ce = Prediction(lambda logq, logp, labels: -(jnp.exp(logp) * logq).sum(-1), sees_target=True)
"""-sum_v p log q."""

kl = Prediction(lambda logq, logp, labels: (jnp.exp(logp) * (logp - logq)).sum(-1), sees_target=True)
"""sum_v p log (p / q)."""

tv = Prediction(_tv, sees_target=True)
"""1 - sum_v min(p, q): the chance that sampling rejects."""


def mixture(parts: Sequence[tuple[float, Prediction]]) -> Prediction:
    """sum_i c_i l_i."""
    if not parts:
        raise UserError("a mixture needs at least one (coefficient, prediction) pair")

    def loss(logq, logp, labels):
        return sum(c * p.loss(logq, logp, labels) for c, p in parts)

    return Prediction(loss, any(p.sees_target for _, p in parts))


class Rows(NamedTuple):
    """What the head says of M rows, [M] each; overlap and target_logp are None for blind predictions."""

    loss: jax.Array
    logp: jax.Array
    hit: jax.Array
    overlap: jax.Array | None
    target_logp: jax.Array | None


def rows(
    prediction: Prediction,
    hidden_MxD: jax.Array,
    head_VxD: jax.Array,
    labels_M: jax.Array,
    target_hidden_MxD: jax.Array | None = None,
    chunk: int = 1024,
) -> Rows:
    """Loss, log-probability of the label and greedy hit of every row.

    Args:
        hidden_MxD: of the drafter, after its final norm; gradients flow here only.
        head_VxD: the target's head, frozen.
        target_hidden_MxD: the target's, at the position before each label; needed when the prediction
            sees the target.
        chunk: rows worked on at a time; chunk x V logits exist at once, forward and backward.
    """
    if prediction.sees_target and target_hidden_MxD is None:
        raise UserError("this prediction compares with the target: pass the target's hidden states")
    head = jax.lax.stop_gradient(head_VxD)
    M = hidden_MxD.shape[0]
    chunk = min(chunk, M)
    pad = -M % chunk

    @jax.checkpoint
    def work(part):
        hidden, labels, target_hidden = part
        logq = jax.nn.log_softmax(ops.head_logits(hidden, head), axis=-1)
        logp, overlap, target_logp = None, None, None
        if prediction.sees_target:
            target_hidden = jax.lax.stop_gradient(target_hidden)
            logp = jax.nn.log_softmax(ops.head_logits(target_hidden, head), axis=-1)
            overlap, target_logp = 1.0 - _tv(logq, logp, labels), _label(logp, labels)
        loss = prediction.loss(logq, logp, labels)
        hit = jnp.argmax(logq, axis=-1) == labels
        return Rows(loss, _label(logq, labels), hit, overlap, target_logp)

    seen = target_hidden_MxD if prediction.sees_target else None
    parts = (hidden_MxD, labels_M, seen)
    if pad or chunk < M:
        split = jax.tree.map(
            lambda a: jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, chunk, *a.shape[1:]),
            parts,
        )
        out = jax.lax.map(work, split)
        return jax.tree.map(lambda a: a.reshape(-1)[:M], out)
    return work(parts)
