"""Layers that target and drafter share. Parameters carry Hugging Face's names and [out, in] layout."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.sharding import whole


def matrix(module: nn.Module, shape: tuple[int, int], dtype: jnp.dtype | None = None) -> jax.Array:
    """The module's parameter `weight` [out, in] in full, also where it only holds a share of it."""
    if module.has_variable("params", "weight"):
        weight = module.get_variable("params", "weight")  # `param` would refuse a share's shape
    else:
        weight = module.param("weight", nn.initializers.normal(0.02), shape, jnp.float32)
    return whole("/".join((*module.path, "weight")), weight, dtype)


class Linear(nn.Module):
    """`x @ weight.T` without bias."""

    features: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return ops.dot(x, matrix(self, (self.features, x.shape[-1]), self.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return ops.rms_norm(x, weight, self.eps)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    intermediate_size: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = Linear(self.intermediate_size, self.dtype, name="gate_proj")(x)
        up = Linear(self.intermediate_size, self.dtype, name="up_proj")(x)
        return Linear(x.shape[-1], self.dtype, name="down_proj")(jax.nn.silu(gate) * up)
