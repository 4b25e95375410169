"""Attention over a cache, and attention of draft blocks over a context. Softmax in fp32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dscout_jax.ops import backend

_MASKED = -1e30  # finite, so that a row that sees nothing stays finite
_QUERIES = 512  # of a long prompt that attend at a time: scores grow with it, not with the prompt's square


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """[..., M, K] x [..., S, K] -> [..., M, S] in fp32, scaled by K^-0.5."""
    return jnp.einsum("...mk,...sk->...ms", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5


def _values(p: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("...ms,...sk->...mk", p.astype(v.dtype), v, preferred_element_type=jnp.float32)


def _scores_by_sums(q: jax.Array, k: jax.Array) -> jax.Array:
    """`_scores` without a product: XLA:CPU packs k anew for every few rows of q, which costs more."""
    q32, k32 = q.astype(jnp.float32), k.astype(jnp.float32)
    return (q32[..., :, None, :] * k32[..., None, :, :]).sum(-1) * q.shape[-1] ** -0.5


def _values_by_sums(p: jax.Array, v: jax.Array) -> jax.Array:
    return (p[..., :, :, None] * v.astype(jnp.float32)[..., None, :, :]).sum(-2)


def cached_attention(
    q_BxTxHxK: jax.Array, k_BxGxSxK: jax.Array, v_BxGxSxK: jax.Array, positions_BxT: jax.Array
) -> jax.Array:
    """Causal attention by absolute position: the query at position p sees cache entries s <= p.

    Returns:
        [B, T, H, K] in q's dtype. Query head h reads KV head h // (H / G).
    """
    B, T, H, K = q_BxTxHxK.shape
    if T > _QUERIES and T % _QUERIES == 0:
        parts = (q_BxTxHxK, positions_BxT)
        split = jax.tree.map(lambda a: a.reshape(B, -1, _QUERIES, *a.shape[2:]).swapaxes(0, 1), parts)
        out = jax.lax.map(lambda part: cached_attention(part[0], k_BxGxSxK, v_BxGxSxK, part[1]), split)
        return out.swapaxes(0, 1).reshape(q_BxTxHxK.shape)
    G, S = k_BxGxSxK.shape[1:3]
    q = q_BxTxHxK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4).reshape(B, G, H // G * T, K)
    visible_BxTxS = jnp.arange(S) <= positions_BxT[..., None]
    one_token = T == 1 and B > 1 and backend.sums_beat_products()
    score, combine = (_scores_by_sums, _values_by_sums) if one_token else (_scores, _values)
    scores = score(q.astype(k_BxGxSxK.dtype), k_BxGxSxK).reshape(B, G, H // G, T, S)
    p = jax.nn.softmax(jnp.where(visible_BxTxS[:, None, None], scores, _MASKED), axis=-1)
    out = combine(p.reshape(B, G, H // G * T, S), v_BxGxSxK)
    out = out.reshape(B, G, H // G, T, K).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, H, K).astype(q_BxTxHxK.dtype)


def block_attention(
    q_BxNxWxHxK: jax.Array,
    k_BxNxWxGxK: jax.Array,
    v_BxNxWxGxK: jax.Array,
    context_k_BxGxSxK: jax.Array,
    context_v_BxGxSxK: jax.Array,
    anchors_BxN: jax.Array,
    horizons_BxN: jax.Array,
    chunk: int | None = None,
) -> jax.Array:
    """Attention of N independent blocks a row: one softmax over [context ; own block].

    Block n sees context s < anchors[n], strictly: the anchor's own features do not exist yet when decoding
    drafts from it. Inside the block it sees, in both directions, the slots < horizons[n].

    Args:
        chunk: blocks worked on at a time (with recomputation in the backward pass), so that memory grows
            with the chunk and not with N; None takes all at once.
    Returns:
        [B, N, W, H, K] in q's dtype.
    """
    B, N, W, H, K = q_BxNxWxHxK.shape
    G, S = context_k_BxGxSxK.shape[1:3]
    R = H // G

    def attend(part):
        q, k, v, anchors, horizons = part  # [B, n, W, ...], [B, n]
        n = q.shape[1]
        q = q.reshape(B, n, W, G, R, K).transpose(0, 3, 1, 4, 2, 5)  # B G n R W K
        k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)  # B G n W K
        flat = q.reshape(B, G, n * R * W, K)
        sees = jnp.arange(S) < anchors[..., None]  # B n S
        own = jnp.arange(W) < horizons[..., None]  # B n W
        s_context = _scores(flat.astype(context_k_BxGxSxK.dtype), context_k_BxGxSxK)
        s_context = s_context.reshape(B, G, n, R * W, S)
        s_block = _scores(q.reshape(B, G, n, R * W, K), k)
        s_context = jnp.where(sees[:, None, :, None, :], s_context, _MASKED)
        s_block = jnp.where(own[:, None, :, None, :], s_block, _MASKED)
        p = jax.nn.softmax(jnp.concatenate([s_context, s_block], axis=-1), axis=-1)
        out = _values(p[..., :S].reshape(B, G, n * R * W, S), context_v_BxGxSxK)
        out = out.reshape(B, G, n, R * W, K) + _values(p[..., S:], v)
        out = out.reshape(B, G, n, R, W, K).transpose(0, 2, 4, 1, 3, 5)
        return out.reshape(B, n, W, H, K).astype(q_BxNxWxHxK.dtype)

    parts = (q_BxNxWxHxK, k_BxNxWxGxK, v_BxNxWxGxK, anchors_BxN, horizons_BxN)
    if chunk is None or chunk >= N:
        return attend(parts)
    return map_chunks(jax.checkpoint(attend), parts, chunk)


def map_chunks(
    work: Callable[[tuple[jax.Array, ...]], jax.Array], parts: tuple[jax.Array, ...], chunk: int
) -> jax.Array:
    """`work(parts)` for arrays [B, N, ...], computed for `chunk` of the N at a time.

    The last chunk is filled up with zeros, whose results are dropped.
    """
    B, N = parts[0].shape[:2]
    count = -(-N // chunk)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * chunk - N), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    out = jax.lax.map(work, jax.tree.map(split, parts))
    return out.swapaxes(0, 1).reshape(B, count * chunk, *out.shape[3:])[:, :N]
