"""The KV cache: one pair of buffers a layer, sized once, written in place, cropped by a length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax.config import DrafterConfig, TargetConfig
from dscout_jax.ops import backend


class KVCache(NamedTuple):
    """Keys and values; the heads stand before the positions so that attention reads contiguously.

    k, v: one array [B, G, S, K] a layer. How much of S is filled is the owner's per-row length.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def capacity(self) -> int:
        """Positions a row can hold."""
        return self.k[0].shape[2]


def init_cache(config: TargetConfig | DrafterConfig, batch: int, capacity: int, dtype=jnp.float32) -> KVCache:
    """An empty cache of `capacity` positions for `batch` rows."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in "kv"))


def write_layer(buffer_BxGxSxK: jax.Array, new_BxTxGxK: jax.Array, positions_BxT: jax.Array) -> jax.Array:
    """Writes one layer's entries at per-row positions; those outside the buffer are dropped."""
    rows = jnp.arange(buffer_BxGxSxK.shape[0])[:, None]
    # A negative index would wrap round to the end.
    positions = jnp.where(positions_BxT < 0, buffer_BxGxSxK.shape[2], positions_BxT)
    new = new_BxTxGxK.astype(buffer_BxGxSxK.dtype)
    if positions.size == 1 and new.dtype == jnp.float32 and backend.single_updates_copy():
        # XLA makes a dynamic-update-slice of a single index, which XLA:CPU fuses into its readers and then
        # copies the buffer for. A second index, outside and so dropped, keeps it a scatter: written in place.
        # In bf16, where one row is the slower form anyway, this gained nothing at short lengths.
        positions = jnp.pad(positions, ((0, 0), (0, 1)), constant_values=buffer_BxGxSxK.shape[2])
        new = jnp.pad(new, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return buffer_BxGxSxK.at[rows, :, positions].set(new, mode="drop")


def write_cache(cache: KVCache, new: KVCache, positions_BxT: jax.Array) -> KVCache:
    """Writes entries [B, G, T, K] of every layer at positions [B, T]; those outside are dropped."""

    def write(buffers, entries):
        return tuple(
            write_layer(b, e.swapaxes(1, 2), positions_BxT) for b, e in zip(buffers, entries, strict=True)
        )

    return KVCache(write(cache.k, new.k), write(cache.v, new.v))
