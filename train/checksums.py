"""A number for each array of a checkpoint, which any flipped bit changes: Orbax loads what it finds."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Of each leaf's bits: sum_i (2 i + 1) bits_i modulo 2^32, i counting elements.

    Whole numbers, so the same on every mesh; odd factors, so that no single flipped bit goes unseen.
    """

    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        place, stride = jnp.zeros(x.shape, jnp.uint32), 1
        for axis in reversed(range(x.ndim)):
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
            stride = stride * x.shape[axis] % 2**32
        return (bits * (2 * place + 1)).sum(dtype=jnp.uint32)

    return [one(x) for x in leaves]


def checksums(tree: Mapping[str, Any]) -> dict[str, int]:
    """One number for each array of a state, as `TrainState._asdict` or a part of it, computed where it lies.

    Arrays are of 2 or 4 bytes an element.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in flat]))
    return {jax.tree_util.keystr(path): int(s) for (path, _), s in zip(flat, sums, strict=True)}


def differing(saved: Mapping[str, int], tree: Mapping[str, Any]) -> list[str]:
    """The arrays of `tree` that are not what they were when `saved` was made of a state that holds them."""
    return [name for name, value in checksums(tree).items() if saved.get(name) != value]
