"""How the target's logits become tokens: the argmax, or draws that hang on a row's seed and a position alone.

Every position has its own noise, a pure function of (seed, position). Plain decoding draws the token at
position t as `argmax(log p_t + gumbel(seed, t))`, and so does verification, whatever was proposed: a proposal
x is accepted when it *is* that draw, which has probability p(x), and a rejected one leaves a draw from p
without x. So speculative text equals plain text token for token at any temperature, and a row's text does not
depend on its company, on the drafter or on block sizes.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.errors import UserError

_DRAW, _ACCEPT, _DRAFT = range(3)  # independent noise for each purpose


class Sampling(NamedTuple):
    """How a row draws: scalars for one row on the host, arrays [B] in a state.

    Logits are divided by the temperature; of what `top_k` keeps, `top_p` keeps the smallest set of likeliest
    tokens whose probabilities reach it; of all tokens `min_p` keeps those at least so likely as that share of
    the likeliest. Equals at a border stay together.

    temperature: 0 takes the argmax.
    top_k: 0 keeps all.
    top_p: 1 keeps all.
    min_p: 0 keeps all.
    seed: equal seeds draw equal noise: give samples of one prompt different ones.
    """

    temperature: float | jax.Array = 0.0
    top_k: int | jax.Array = 0
    top_p: float | jax.Array = 1.0
    min_p: float | jax.Array = 0.0
    seed: int | jax.Array = 0

    def check(self) -> None:
        """Raises UserError for a setting of one row that means nothing."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature} must be 0 (greedy) or more")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p {self.min_p} must be from 0 (all tokens) to 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed {self.seed} must be from 0 to 2^32 - 1")


def seed_of(seed: int, ids: Sequence[int]) -> int:
    """A row's seed from a job's seed and the prompt: neither company nor an interruption changes it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {list(ids)}".encode()).digest()[:4], "little")


class Proposals(NamedTuple):
    """What a round offers to the target for slots 1..W-1.

    ids: [B, W-1] int32; negative proposes nothing.
    confidence: [B, W-1] fp32, the drafter's probability of its likeliest token there; 0 where nothing is
        proposed. It must not depend on what was drawn (see `probs`): a cut by it would bias the output.
    probs: [B, W-1, V] fp32, what the ids were drawn from; None: they were not drawn, each is certain.
    """

    ids: jax.Array
    confidence: jax.Array
    probs: jax.Array | None = None


def allowed_logits(logits_BxWxV: jax.Array, sampling: Sampling) -> jax.Array:
    """`logits / temperature`, -inf where top-k, top-p or min-p forbid: the one distribution of a row.

    Greedy rows keep their logits. Borders are found by bisection over the bits of a float: exact, without
    sorting the vocabulary.
    """
    warm_B = sampling.temperature > 0
    z = logits_BxWxV.astype(jnp.float32)
    z = z / jnp.where(warm_B, sampling.temperature, 1.0)[:, None, None]
    # An unreachable share, and an unreachable count, keep all.
    need_k = jnp.where(sampling.top_k > 0, sampling.top_k, jnp.inf)[:, None, None]
    need_p = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)[:, None, None]
    filtered_B = warm_B & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))

    def filtered():
        kept = jnp.where(_at_least(z, jnp.ones_like(z), need_k), z, -jnp.inf)
        kept = jnp.where(_at_least(z, jax.nn.softmax(kept), need_p), kept, -jnp.inf)
        border = z.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)[:, None, None]
        return jnp.where(z >= border, kept, -jnp.inf)

    return jax.lax.cond(filtered_B.any(), filtered, lambda: z)


def _at_least(z: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Where z >= t, t the largest value for which the weights of {z >= t} sum to `need`; all if none does."""
    bits = jax.lax.bitcast_convert_type(z, jnp.uint32)
    top = jnp.uint32(1 << 31)
    order = jnp.where(bits >= top, ~bits, bits | top)  # unsigned integers in the order of the floats

    def bit(i, t):
        higher = t | (top >> i)
        enough = jnp.where(order >= higher, weights, 0.0).sum(axis=-1, keepdims=True) >= need
        return jnp.where(enough, higher, t)

    start = jnp.zeros((*z.shape[:-1], 1), jnp.uint32)
    return order >= jax.lax.fori_loop(0, 32, lambda i, t: bit(i.astype(jnp.uint32), t), start)


def _keys(sampling: Sampling, positions_BxW: jax.Array, purpose: int) -> jax.Array:
    base = jax.random.fold_in(jax.random.key(0), purpose)
    rows = jax.vmap(lambda seed: jax.random.fold_in(base, seed))(sampling.seed)
    return jax.vmap(lambda row, at: jax.vmap(lambda p: jax.random.fold_in(row, p))(at))(rows, positions_BxW)


def _draw(z_BxWxV: jax.Array, sampling: Sampling, positions_BxW: jax.Array, purpose: int) -> jax.Array:
    """[B, W] ids from softmax(z), by the noise of (seed, position)."""
    keys = _keys(sampling, positions_BxW, purpose)
    noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, z_BxWxV.shape[-1:])))(keys)
    return ops.argmax(z_BxWxV + noise)


def choose(
    logits_BxWxV: jax.Array, proposals: Proposals | None, sampling: Sampling, positions_BxW: jax.Array
) -> jax.Array:
    """The target's tokens [B, W] for `positions`, by which proposals are judged.

    Greedy rows: the argmax. Others: a draw from p. Where proposals d were drawn from q = `probs`, full
    rejection sampling: d itself with probability min(1, p(d) / q(d)), else a draw from max(p - q, 0)
    normalised; a draw from p at the last slot and where nothing was proposed. Either way each token is
    distributed as p, and differs from a proposal that was rejected.

    While no row samples, only the argmax is computed.
    """
    best_BxW = ops.argmax(logits_BxWxV)
    warm_B = sampling.temperature > 0

    def warm():
        z = allowed_logits(logits_BxWxV, sampling)
        if proposals is None or proposals.probs is None:
            drawn_BxW = _draw(z, sampling, positions_BxW, _DRAW)
        else:
            drawn_BxW = _reject(jax.nn.softmax(z), proposals, sampling, positions_BxW)
        return jnp.where(warm_B[:, None], drawn_BxW, best_BxW)

    return jax.lax.cond(warm_B.any(), warm, lambda: best_BxW)


def _reject(p_BxWxV, proposals: Proposals, sampling: Sampling, positions_BxW) -> jax.Array:
    ids_BxW = jnp.pad(proposals.ids, ((0, 0), (0, 1)), constant_values=-1)
    q_BxWxV = jnp.pad(proposals.probs, ((0, 0), (0, 1), (0, 0)))
    q_BxWxV = jnp.where(ids_BxW[..., None] < 0, 0.0, q_BxWxV)
    at = jnp.maximum(ids_BxW, 0)[..., None]
    p_BxW, q_BxW = (jnp.take_along_axis(x, at, axis=-1)[..., 0] for x in (p_BxWxV, q_BxWxV))
    uniform_BxW = jax.vmap(jax.vmap(jax.random.uniform))(_keys(sampling, positions_BxW, _ACCEPT))
    accepted = (ids_BxW >= 0) & (uniform_BxW * q_BxW < p_BxW)
    rest_BxW = _draw(jnp.log(jnp.maximum(p_BxWxV - q_BxWxV, 0.0)), sampling, positions_BxW, _DRAW)
    return jnp.where(accepted, ids_BxW, rest_BxW)


def draw_drafts(
    logits_BxWxV: jax.Array, best_BxW: jax.Array, sampling: Sampling, positions_BxW: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ids [B, W] and the distributions [B, W, V] they are drawn from; greedy rows take `best` and no draw."""
    warm_B = sampling.temperature > 0

    def warm():
        z = allowed_logits(logits_BxWxV, sampling)
        ids_BxW = jnp.where(warm_B[:, None], _draw(z, sampling, positions_BxW, _DRAFT), best_BxW)
        return ids_BxW, jax.nn.softmax(z)

    return jax.lax.cond(warm_B.any(), warm, lambda: (best_BxW, jnp.zeros_like(logits_BxWxV)))
