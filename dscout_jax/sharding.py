"""Where parameters lie on a mesh: one table from parameter path to PartitionSpec.

Axes: `data` holds different rows, `fsdp` different rows and a share of every weight, `tensor` shares of
heads and of the feed-forward width.
"""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dscout_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))

# Weights are [out, in]. Each parameter of target and drafter matches exactly one line.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(embed_tokens|lm_head)/weight", PartitionSpec("tensor", "fsdp")),
    (r"fc/weight", PartitionSpec("fsdp", None)),
    (r"layers_\d+/fusion/weight", PartitionSpec()),
    (r"layers_\d+/self_attn/[qkv]_proj/weight", PartitionSpec("tensor", "fsdp")),
    (r"layers_\d+/self_attn/o_proj/weight", PartitionSpec("fsdp", "tensor")),
    (r"layers_\d+/self_attn/[qk]_norm/weight", PartitionSpec()),
    (r"layers_\d+/mlp/(gate|up)_proj/weight", PartitionSpec("tensor", "fsdp")),
    (r"layers_\d+/mlp/down_proj/weight", PartitionSpec("fsdp", "tensor")),
    (r"layers_\d+/(input|post_attention)_layernorm/weight", PartitionSpec()),
    (r"(hidden_norm|norm)/weight", PartitionSpec()),
)


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over all devices; `data` takes what the other axes leave.

    Raises:
        UserError: the sizes do not multiply to the device count.
    """
    count = jax.device_count()
    data = count // (fsdp * tensor) if data is None else data
    if data * fsdp * tensor != count or data < 1:
        raise UserError(f"a mesh of {data} x {fsdp} x {tensor} does not fit {count} devices")
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of one parameter, `path` joined by slashes.

    Raises:
        UserError: no line or several of the table match, or an axis does not divide the shape.
    """
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise UserError(f"parameter {path!r} matches {len(found)} sharding rules; it must match exactly one")
    for size, axis in zip(shape, found[0], strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"parameter {path!r} of shape {shape}: {size} is not divisible by the {mesh.shape[axis]} "
                f"devices of mesh axis {axis!r}; choose another mesh"
            )
    return found[0]


def shardings(params: Any, mesh: Mesh) -> Any:
    """NamedShardings of a parameter tree (arrays or shapes), by the table."""

    def one(path, leaf):
        return NamedSharding(mesh, spec_of("/".join(str(p.key) for p in path), np.shape(leaf), mesh))

    return jax.tree_util.tree_map_with_path(one, params)
