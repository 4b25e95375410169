"""Weighting: how much each included slot counts. Every weight is detached by the product.

A weighting is a function `Scores -> weights [B, N, W]`. Slots count from 0 (the anchor, never scored).
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax.errors import UserError


class Scores(NamedTuple):
    """What a weighting may look at, [B, N, W] each.

    logp: the drafter's log-probability of the true token. hit: its argmax is the true token.
    mask: the inclusion m. revealed: slots that showed their token.
    overlap: sum_v min(p, q); target_logp: the target's log-probability of the true token.
    """

    logp: jax.Array
    hit: jax.Array
    mask: jax.Array
    revealed: jax.Array
    overlap: jax.Array | None = None
    target_logp: jax.Array | None = None


class BlindScores(Scores):
    """Scores of an objective that does not see the target: reading its side of them raises UserError."""

    @property
    def overlap(self) -> jax.Array:
        """Refused."""
        raise _unseen("overlap")

    @property
    def target_logp(self) -> jax.Array:
        """Refused."""
        raise _unseen("target_logp")


def _unseen(name: str) -> UserError:
    return UserError(
        f"the weighting reads scores.{name}, which needs the target's distribution: decorate it with "
        "@sees_target of dscout_jax.objective.weighting"
    )


Weighting = Callable[[Scores], jax.Array]
"""Scores -> weights [B, N, W]; one that reads `overlap` or `target_logp` is marked by `@sees_target`."""


def sees_target(weighting: Weighting) -> Weighting:
    """Marks a weighting that needs the target's distribution, whatever the prediction loss is."""
    weighting.sees_target = True
    return weighting


# DFlash's decay lengths; other block sizes take a proportional one.
_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


def uniform(scores: Scores) -> jax.Array:
    """w_k = 1."""
    return jnp.ones_like(scores.logp)


def decay(gamma: float | None = None) -> Weighting:
    """w_k = exp(-(k - 1) / gamma); gamma 7 / 5 / 4 for blocks of 16 / 10 / 8 [DFlash].

    Raises:
        UserError: a gamma that is not positive.
    """
    if gamma is not None and not gamma > 0:
        raise UserError(f"decay's gamma {gamma} must be positive; None takes the block size's own")

    def weights(scores: Scores) -> jax.Array:
        W = scores.logp.shape[-1]
        g = _GAMMAS.get(W, max(1.0, 7.0 * W / 16)) if gamma is None else gamma
        return jnp.broadcast_to(jnp.exp(-(jnp.arange(W) - 1.0) / g), scores.logp.shape)

    return weights


def awl(
    score: Literal["probability", "hit", "overlap"] = "probability",
    prefix: Literal["exclusive", "inclusive", "suffix"] = "exclusive",
    eps: float = 0.5,
) -> Weighting:
    """Acceptance-weighted: the chance that verification gets as far as slot k [DScout].

    With a~ = (1 - eps) a + eps and a slot's acceptance score a (1 where revealed or outside m):
    exclusive w_k = prod_{j<k} a~_j; inclusive prod_{j<=k} a~_j; suffix sum_{m>=k} prod_{j<=m} a~_j over
    included m, which is D-PACE.
    """
    if not 0 <= eps <= 1:
        raise UserError(f"awl's floor eps {eps} must lie in 0..1")
    if prefix not in ("exclusive", "inclusive", "suffix"):
        raise UserError(f"awl's prefix {prefix!r} must be exclusive, inclusive or suffix")
    if score not in ("probability", "hit", "overlap"):
        raise UserError(f"awl's score {score!r} must be probability, hit or overlap")
    if prefix == "suffix" and score == "hit":
        raise UserError("the suffix sum (D-PACE) is an expected length: its score must be a probability")

    def weights(scores: Scores) -> jax.Array:
        a = jnp.exp(scores.logp) if score == "probability" else getattr(scores, score)
        a = (1 - eps) * a.astype(jnp.float32) + eps
        reach = jnp.cumprod(jnp.where(scores.mask, a, 1.0), axis=-1)
        if prefix == "inclusive":
            return reach
        if prefix == "exclusive":
            return jnp.concatenate([jnp.ones_like(reach[..., :1]), reach[..., :-1]], axis=-1)
        return jnp.flip(jnp.cumsum(jnp.flip(reach * scores.mask, -1), axis=-1), -1)

    return sees_target(weights) if score == "overlap" else weights


def product(*parts: Weighting) -> Weighting:
    """w_k = the product of what several weightings give."""

    def weights(scores: Scores) -> jax.Array:
        return math.prod(part(scores) for part in parts)

    return sees_target(weights) if any(getattr(part, "sees_target", False) for part in parts) else weights


def dpace(eps: float = 0.5) -> Weighting:
    """w_k = sum_{m>=k} prod_{j<=m} a~_j: what slot k adds to the expected accepted length [D-PACE]."""
    return awl("probability", "suffix", eps)


def auf(scores: Scores) -> jax.Array:
    """1 up to and including the first greedy error, then 0 [Spec-AUF]."""
    return awl("hit", "exclusive", 0.0)(scores)


def first_error(gamma: float | None = None, extra: float = 0.3) -> Weighting:
    """decay + extra * 1[k is the first greedy error] [arXiv 2606.11552].

    Raises:
        UserError: a gamma that is not positive, or a negative extra.
    """
    decay(gamma)  # refuses a wrong gamma now, not in the first step
    if not extra >= 0:
        raise UserError(f"first_error's extra {extra} must be 0 or more")

    def weights(scores: Scores) -> jax.Array:
        wrong = scores.mask & ~scores.hit
        first = wrong & (jnp.cumsum(wrong, axis=-1) == 1)
        return decay(gamma)(scores) + extra * first

    return weights


@sees_target
def confidence(scores: Scores) -> jax.Array:
    """prod_{j<k} p_j(y_j): how sure the target itself was of getting here [PARD-2]."""
    p = jnp.where(scores.mask, jnp.exp(scores.target_logp), 1.0)
    return jnp.concatenate([jnp.ones_like(p[..., :1]), jnp.cumprod(p, axis=-1)[..., :-1]], axis=-1)


def detached(weighting: Weighting, scores: Scores) -> jax.Array:
    """The weights as constants: no gradient reaches the scores."""
    return jax.lax.stop_gradient(weighting(jax.tree.map(jax.lax.stop_gradient, scores)))
