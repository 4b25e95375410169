"""Where a decoding state lies on a mesh."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dscout_jax.decode.state import DecodeState
from dscout_jax.sharding import BATCH


def state_shardings(state: DecodeState, mesh: Mesh) -> DecodeState:
    """NamedShardings of a state (arrays or shapes): rows over the batch axes, cache heads over `tensor`.

    What an axis does not divide lies whole on each of its devices.
    """
    [batch_axes] = BATCH
    count = math.prod(mesh.shape[axis] for axis in batch_axes)

    def one(leaf: Any) -> NamedSharding:
        rows = batch_axes if leaf.shape[0] % count == 0 else None
        is_cache = leaf.ndim == 4  # [B, G, S, K]
        heads = "tensor" if is_cache and leaf.shape[1] % mesh.shape["tensor"] == 0 else None
        return NamedSharding(mesh, PartitionSpec(rows, heads) if is_cache else PartitionSpec(rows))

    rows = jax.tree.map(one, state._replace(learnt=None))
    # What a policy has learnt belongs to no row.
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state.learnt)
    return rows._replace(learnt=whole)
