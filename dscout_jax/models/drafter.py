"""The block-diffusion drafter (DFlash semantics): one forward drafts a whole block."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dscout_jax import ops
from dscout_jax.config import DrafterConfig
from dscout_jax.models.cache import KVCache
from dscout_jax.models.layers import MLP, Linear, RMSNorm

Remat = Literal["none", "layer", "all"]
"""What the backward pass computes again: nothing; each layer but what its attention gave; each layer."""


class DraftAttention(nn.Module):
    """Attention of blocks over context features and over themselves, with one set of K/V weights."""

    config: DrafterConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        c = self.config
        self.q_proj = Linear(c.num_heads * c.head_dim, self.dtype)
        self.k_proj = Linear(c.num_kv_heads * c.head_dim, self.dtype)
        self.v_proj = Linear(c.num_kv_heads * c.head_dim, self.dtype)
        self.o_proj = Linear(c.hidden_size, self.dtype)
        self.q_norm = RMSNorm(c.rms_norm_eps)
        self.k_norm = RMSNorm(c.rms_norm_eps)

    def key_value(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys (normed, rotated) and values [..., G, K] of features x [..., D] at positions [...]."""
        c = self.config
        shape = (*x.shape[:-1], c.num_kv_heads, c.head_dim)
        k = self.k_norm(self.k_proj(x).reshape(shape))
        k = ops.apply_rope(k, ops.rope_angles(c.rope, c.head_dim, positions))
        return k, self.v_proj(x).reshape(shape)

    def __call__(self, h_BxNxWxD, positions_BxNxW, anchors_BxN, horizons_BxN, context_kv, chunk):
        c = self.config
        q = self.q_proj(h_BxNxWxD).reshape(*h_BxNxWxD.shape[:-1], c.num_heads, c.head_dim)
        q = ops.apply_rope(self.q_norm(q), ops.rope_angles(c.rope, c.head_dim, positions_BxNxW))
        k, v = self.key_value(h_BxNxWxD, positions_BxNxW)
        out = ops.block_attention(q, k, v, *context_kv, anchors_BxN, horizons_BxN, chunk)
        out = checkpoint_name(out.reshape(*h_BxNxWxD.shape[:-1], -1), "attention")
        return self.o_proj(out)


class Fusion(nn.Module):
    """One draft layer's weighted mean of the tapped layers.

        f = sum_c softmax(weight)_c * x_c / rms(x_c)

    Each layer's features are scaled to unit RMS first: residual streams grow with depth, and the weights
    would otherwise say little beside the norms.
    """

    eps: float

    @nn.compact
    def __call__(self, taps_BxSxCxD: jax.Array) -> jax.Array:
        C, D = taps_BxSxCxD.shape[-2:]
        share_C = jax.nn.softmax(self.param("weight", nn.initializers.zeros, (C,), jnp.float32))
        even = ops.rms_norm(taps_BxSxCxD.astype(jnp.float32), jnp.ones(D), self.eps)
        return jnp.einsum("bscd,c->bsd", even, share_C).astype(taps_BxSxCxD.dtype)


class DraftBlock(nn.Module):
    """One draft layer. Only the block's stream is normed on entry; the context arrives normed."""

    config: DrafterConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.self_attn = DraftAttention(c, self.dtype)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.mlp = MLP(c.intermediate_size, self.dtype)
        if c.fusion == "softmax":
            self.fusion = Fusion(c.rms_norm_eps)

    def __call__(self, x, positions, anchors, horizons, context_kv, chunk):
        h = self.input_layernorm(x)
        x = x + self.self_attn(h, positions, anchors, horizons, context_kv, chunk)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Drafts the tokens after an anchor from the target's tapped features.

    `context` and `context_kv` run once a token, `block` once a round; training calls the whole.
    `scan` compiles one layer in place of all, at the price of a copy of the weights.
    """

    config: DrafterConfig
    dtype: jnp.dtype = jnp.float32
    remat: Remat = "none"
    scan: bool = False

    def setup(self) -> None:
        c = self.config
        if c.fusion == "fc":
            self.fc = Linear(c.hidden_size, self.dtype)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        layer = DraftBlock
        if self.remat != "none":
            layer = nn.remat(DraftBlock, policy=self._policy(), static_argnums=(6,))
        self.layers = [layer(c, self.dtype) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)

    def context(self, taps_BxSxCD: jax.Array) -> jax.Array:
        """Context features, never updated.

        Returns:
            `RMSNorm(fc(taps))` [B, S, D], the same for every layer; with softmax fusion
            `RMSNorm(fusion_l(taps))` [B, S, L, D], one for each.
        """
        taps = taps_BxSxCD.astype(self.dtype)
        if self.config.fusion == "fc":
            return self.hidden_norm(self.fc(taps))
        taps_BxSxCxD = taps.reshape(*taps.shape[:-1], -1, self.config.hidden_size)
        return self.hidden_norm(jnp.stack([layer.fusion(taps_BxSxCxD) for layer in self.layers], axis=2))

    def context_kv(self, ctx: jax.Array, positions_BxS: jax.Array) -> KVCache:
        """Every layer's keys and values [B, G, S, K] of `context`'s features at absolute positions."""
        own = [ctx] * len(self.layers) if self.config.fusion == "fc" else jnp.unstack(ctx, axis=2)
        pairs = [
            layer.self_attn.key_value(ctx_BxSxD, positions_BxS)
            for layer, ctx_BxSxD in zip(self.layers, own, strict=True)
        ]
        return KVCache(tuple(k.swapaxes(1, 2) for k, _ in pairs), tuple(v.swapaxes(1, 2) for _, v in pairs))

    def contexts(self, taps_BxSxCD: jax.Array) -> KVCache:
        """`context_kv` of whole rows, position s being taps[:, s]."""
        ctx = self.context(taps_BxSxCD)
        positions = jnp.broadcast_to(jnp.arange(ctx.shape[1], dtype=jnp.int32), ctx.shape[:2])
        return self.context_kv(ctx, positions)

    def block(
        self,
        x_BxNxWxD: jax.Array,
        anchors_BxN: jax.Array,
        context: KVCache,
        horizons_BxN: jax.Array | None = None,
        chunk: int | None = None,
    ) -> jax.Array:
        """Hidden states [B, N, W, D] after the final norm; slot w's predicts the token at anchor + w.

        Args:
            x_BxNxWxD: the target's embeddings of [anchor, MASK, ...].
            anchors_BxN: absolute positions of the anchors; the block sees context s < anchor.
            context: from `context_kv`, position s at index s.
            horizons_BxN: slots >= horizon are invisible, as if the block were that short; None: all W.
            chunk: blocks attended at a time.
        """
        W = x_BxNxWxD.shape[2]
        if horizons_BxN is None:
            horizons_BxN = jnp.full(anchors_BxN.shape, W, jnp.int32)
        positions = anchors_BxN[..., None] + jnp.arange(W, dtype=jnp.int32)
        x = x_BxNxWxD.astype(self.dtype)
        if self.scan and not self.is_initializing():
            return self.norm(self._scanned(x, positions, anchors_BxN, horizons_BxN, context, chunk))
        for layer, k, v in zip(self.layers, context.k, context.v, strict=True):
            x = layer(x, positions, anchors_BxN, horizons_BxN, (k, v), chunk)
        return self.norm(x)

    def _policy(self):
        saved = ("attention",) if self.remat == "layer" else ()
        return jax.checkpoint_policies.save_only_these_names(*saved)

    def _scanned(self, x, positions, anchors, horizons, context: KVCache, chunk):
        params = self.variables["params"]
        weights = [params[f"layers_{i}"] for i in range(self.config.num_layers)]
        block = DraftBlock(self.config, self.dtype, parent=None)

        def layer(x, part):
            weights, k, v = part
            return block.apply({"params": weights}, x, positions, anchors, horizons, (k, v), chunk), None

        if self.remat != "none":
            layer = jax.checkpoint(layer, policy=self._policy(), prevent_cse=False)
        stacked = jax.tree.map(lambda *w: jnp.stack(w), *weights)
        return jax.lax.scan(layer, x, (stacked, jnp.stack(context.k), jnp.stack(context.v)))[0]

    def __call__(
        self,
        taps_BxSxCD: jax.Array,
        x_BxNxWxD: jax.Array,
        anchors_BxN: jax.Array,
        horizons_BxN: jax.Array | None = None,
        chunk: int | None = None,
    ) -> jax.Array:
        """Context and blocks in one go: context position s is taps[:, s]."""
        return self.block(x_BxNxWxD, anchors_BxN, self.contexts(taps_BxSxCD), horizons_BxN, chunk)
