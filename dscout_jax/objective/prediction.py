"""Prediction loss: what a slot pays for its distribution q against the true token y or the target's p.

A prediction is a function `(logq, logp, labels) -> loss` of a few rows; `rows` runs it in chunks and keeps
each row's loss and gradient, so neither q nor p ever exists for a whole batch.
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


# Functions with names: a run's contract tells predictions apart by them.
def _ce(logq: jax.Array, logp: jax.Array | None, labels: jax.Array) -> jax.Array:
    return -_label(logq, labels)


def _soft_ce(logq: jax.Array, logp: jax.Array, labels: jax.Array) -> jax.Array:
    return -(jnp.exp(logp) * logq).sum(-1)


def _kl(logq: jax.Array, logp: jax.Array, labels: jax.Array) -> jax.Array:
    return (jnp.exp(logp) * (logp - logq)).sum(-1)


def _tv(logq: jax.Array, logp: jax.Array, labels: jax.Array) -> jax.Array:
    return 1.0 - jnp.minimum(jnp.exp(logp), jnp.exp(logq)).sum(-1)


ce = Prediction(_ce)
"""-log q(y): hard cross-entropy on the true token."""

soft_ce = Prediction(_soft_ce, sees_target=True)
"""-sum_v p log q."""

kl = Prediction(_kl, sees_target=True)
"""sum_v p log (p / q)."""

tv = Prediction(_tv, sees_target=True)
"""1 - sum_v min(p, q): the chance that sampling rejects."""


def mixture(parts: Sequence[tuple[float, Prediction]]) -> Prediction:
    """sum_i c_i l_i. Raises UserError without a part, or for a coefficient that is not positive."""
    if not parts:
        raise UserError("a mixture needs at least one (coefficient, prediction) pair")
    if not all(c > 0 for c, _ in parts):
        raise UserError(f"a mixture's coefficients {[c for c, _ in parts]} must be positive")

    def loss(logq, logp, labels):
        return sum(c * p.loss(logq, logp, labels) for c, p in parts)

    return Prediction(loss, any(p.sees_target for _, p in parts))


class Rows(NamedTuple):
    """What the head says of M rows, [M] each; overlap and target_logp are None without the target.

    slope: norm of the loss's gradient in the row's hidden state.
    """

    loss: jax.Array
    slope: jax.Array
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
    logp_gradient: bool = False,
) -> Rows:
    """Loss, log-probability of the label and greedy hit of every row.

    Args:
        hidden_MxD: of the drafter, after its final norm; gradients flow here only, and only from `loss`.
        head_VxD: the target's head, frozen.
        target_hidden_MxD: the target's, at the position before each label; without it `overlap` and
            `target_logp` are None.
        chunk: rows worked on at a time; chunk x V logits exist at once.
        logp_gradient: lets gradients flow from `logp` too.
    """
    head = jax.lax.stop_gradient(head_VxD)
    M = hidden_MxD.shape[0]
    chunk = min(chunk, M)
    pad = -M % chunk

    def work(part):
        hidden, labels, target_hidden = part
        logp, overlap, target_logp = None, None, None
        if target_hidden is not None:
            logp = jax.nn.log_softmax(ops.head_logits(target_hidden, head), axis=-1)

        def scores(hidden):
            logq = jax.nn.log_softmax(ops.head_logits(hidden, head), axis=-1)
            return (prediction.loss(logq, logp, labels), _label(logq, labels)), logq

        (loss, label_logp), pull, logq = jax.vjp(scores, hidden, has_aux=True)
        if target_hidden is not None:
            overlap, target_logp = 1.0 - _tv(logq, logp, labels), _label(logp, labels)
        hit = jnp.argmax(logq, axis=-1) == labels
        # Each row's loss depends on that row alone, so its gradient is known now, while its logits exist:
        # two products with the head, where a recomputing backward pass would take three.
        one, none = jnp.ones_like(loss), jnp.zeros_like(loss)
        loss_slope = pull((one, none))[0]
        norm = jnp.linalg.norm(loss_slope.astype(jnp.float32), axis=-1)
        out = Rows(loss, norm, label_logp, hit, overlap, target_logp)
        return out, loss_slope, pull((none, one))[0] if logp_gradient else None

    parts = jax.lax.stop_gradient((hidden_MxD, labels_M, target_hidden_MxD))
    split = jax.tree.map(
        lambda a: jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(-1, chunk, *a.shape[1:]), parts
    )
    out = jax.lax.map(work, split)
    out, loss_slope, logp_slope = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:M], out)
    out = out._replace(loss=_linear(out.loss, loss_slope, hidden_MxD))
    return out._replace(logp=_linear(out.logp, logp_slope, hidden_MxD)) if logp_gradient else out


def _linear(value_M: jax.Array, slope_MxD: jax.Array, hidden_MxD: jax.Array) -> jax.Array:
    """`value`, with `slope` as its gradient in `hidden`."""
    zero_MxD = (hidden_MxD - jax.lax.stop_gradient(hidden_MxD)).astype(jnp.float32)
    return jax.lax.stop_gradient(value_M) + (zero_MxD * slope_MxD.astype(jnp.float32)).sum(-1)
