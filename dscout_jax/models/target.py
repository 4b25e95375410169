"""The target: a Llama or Qwen3 decoder whose layers can be tapped."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.config import TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.models.cache import KVCache, write_layer
from dscout_jax.models.layers import MLP, Linear, RMSNorm, matrix


class TargetOutput(NamedTuple):
    """What one forward gives.

    hidden: [B, T, D] after the final norm.
    taps: [B, T, C * D], the residual stream after each tapped layer, in the order asked; None without taps.
    cache: the cache with this forward's entries; None without a cache.
    """

    hidden: jax.Array
    taps: jax.Array | None
    cache: KVCache | None


class Attention(nn.Module):
    """Causal self-attention of grouped heads, over a cache or over the tokens themselves."""

    config: TargetConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, angles, positions, buffers):
        c, (B, T, _) = self.config, x.shape

        def heads(name: str, count: int) -> jax.Array:
            return Linear(count * c.head_dim, self.dtype, name=name)(x).reshape(B, T, count, c.head_dim)

        q, k = heads("q_proj", c.num_heads), heads("k_proj", c.num_kv_heads)
        v = heads("v_proj", c.num_kv_heads)
        if c.qk_norm:
            q = RMSNorm(c.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(c.rms_norm_eps, name="k_norm")(k)
        q, k = ops.apply_rope(q, angles), ops.apply_rope(k, angles)
        if buffers is None:
            keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
        else:
            buffers = tuple(write_layer(b, e, positions) for b, e in zip(buffers, (k, v), strict=True))
            keys, values = buffers
        out = ops.cached_attention(q, keys, values, positions).reshape(B, T, -1)
        return Linear(x.shape[-1], self.dtype, name="o_proj")(out), buffers


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and around a residual."""

    config: TargetConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, angles, positions, buffers):
        c = self.config
        h = RMSNorm(c.rms_norm_eps, name="input_layernorm")(x)
        h, buffers = Attention(c, self.dtype, name="self_attn")(h, angles, positions, buffers)
        x = x + h
        h = RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)
        return x + MLP(c.intermediate_size, self.dtype, name="mlp")(h), buffers


class Embedding(nn.Module):
    """A table [V, D] of token embeddings."""

    vocab_size: int
    width: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        return ops.embed_rows(matrix(self, (self.vocab_size, self.width)), ids)


class OutputHead(nn.Module):
    """Holds the untied head [V, D]; callers read it through `target_head`."""

    vocab_size: int

    @nn.compact
    def __call__(self, width: int) -> None:
        self.param("weight", nn.initializers.normal(0.02), (self.vocab_size, width), jnp.float32)


class Target(nn.Module):
    """A decoder over pure functions. Layers are unrolled: XLA:CPU copies scanned weights every step."""

    config: TargetConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens_BxT: jax.Array,
        lengths_B: jax.Array | None = None,
        cache: KVCache | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Runs T tokens a row; token t of row b stands at position `lengths[b] + t`.

        With a cache, its entries are written at those positions (dropped beyond the capacity) and a token
        sees every entry at or before its own position. Padding on the right is harmless: its entries lie
        later than any real query until real tokens overwrite them. Without a cache the tokens attend to
        one another, and `lengths` must be zero.

        Raises:
            UserError: a tapped layer that the target does not have.
        """
        c = self.config
        bad = [i for i in taps if not 0 <= i < c.num_layers]
        if bad:
            raise UserError(f"tapped layers {bad} lie outside the target's layers 0..{c.num_layers - 1}")
        B, T = tokens_BxT.shape
        start = jnp.zeros(B, jnp.int32) if lengths_B is None else lengths_B
        positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)
        angles = ops.rope_angles(c.rope, c.head_dim, positions)
        x = Embedding(c.vocab_size, c.hidden_size, name="embed_tokens")(tokens_BxT).astype(self.dtype)
        tapped, keys, values = {}, [], []
        for i in range(c.num_layers):
            buffers = None if cache is None else (cache.k[i], cache.v[i])
            x, buffers = Block(c, self.dtype, name=f"layers_{i}")(x, angles, positions, buffers)
            if i in taps:
                tapped[i] = x
            if buffers is not None:
                keys.append(buffers[0])
                values.append(buffers[1])
        hidden = RMSNorm(c.rms_norm_eps, name="norm")(x)
        if not c.tie_embeddings and self.is_initializing():
            OutputHead(c.vocab_size, name="lm_head")(c.hidden_size)
        features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
        return TargetOutput(hidden, features, None if cache is None else KVCache(tuple(keys), tuple(values)))


def target_head(params: dict[str, Any]) -> jax.Array:
    """The output head [V, D]: the target's own, or its embedding where the two are tied."""
    return params["lm_head"]["weight"] if "lm_head" in params else params["embed_tokens"]["weight"]


def embed(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    """The target's embeddings [..., D] of ids [...], unscaled: what a drafter's block is made of."""
    return ops.embed_rows(params["embed_tokens"]["weight"], ids)
