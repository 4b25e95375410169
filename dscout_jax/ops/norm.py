"""RMS normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in fp32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight_D.astype(jnp.float32)).astype(x.dtype)
