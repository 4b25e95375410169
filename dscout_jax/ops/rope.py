"""Rotary position embedding in the half-rotation form of Llama and Qwen3."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config import RopeConfig


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2], in radians a position."""
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "llama3":
        # Long waves are stretched by `factor`, short ones kept, the band between blended.
        turns = rope.original_max_position * inv / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        inv = inv / rope.factor * (1 - blend) + inv * blend
    return inv.astype(np.float32)


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> jax.Array:
    """Angles [..., head_dim / 2] in fp32 radians for absolute positions [...]."""
    return positions[..., None].astype(jnp.float32) * _inverse_frequencies(rope, head_dim)


def apply_rope(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + K/2}) of heads.

    Args:
        x: [..., heads, K].
        angles: [..., K / 2], the axes before the heads as in `x`.
    """
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
