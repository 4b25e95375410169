"""Where parameters lie on a mesh: one table from parameter path to PartitionSpec.

Axes: `data` holds different rows, `fsdp` different rows and a share of every weight, `tensor` shares of
heads and of the feed-forward width. Programs are written for the rows of one device, inside `shard_map` over
`data` and `fsdp`: a weight is gathered where it is used (`whole`), and its gradient comes back scattered.
Left to itself XLA contracts the shares and sums activations over devices, which costs far more. `tensor` is
left to XLA.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dscout_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
BATCH = PartitionSpec(ROWS)

# Weights are [out, in]; `layers` without a number holds stacked layers, one more axis in front, and inside a
# scan over them no `layers` is left. Each parameter of target and drafter matches exactly one line.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(embed_tokens|lm_head)/weight", PartitionSpec("tensor", "fsdp")),
    (r"fc/weight", PartitionSpec("fsdp", None)),
    (r"(layers(_\d+)?/)?fusion/weight", PartitionSpec()),
    (r"(layers(_\d+)?/)?self_attn/[qkv]_proj/weight", PartitionSpec("tensor", "fsdp")),
    (r"(layers(_\d+)?/)?self_attn/o_proj/weight", PartitionSpec("fsdp", "tensor")),
    (r"(layers(_\d+)?/)?self_attn/[qk]_norm/weight", PartitionSpec()),
    (r"(layers(_\d+)?/)?mlp/(gate|up)_proj/weight", PartitionSpec("tensor", "fsdp")),
    (r"(layers(_\d+)?/)?mlp/down_proj/weight", PartitionSpec("fsdp", "tensor")),
    (r"(layers(_\d+)?/)?(input|post_attention)_layernorm/weight", PartitionSpec()),
    (r"(hidden_norm|norm)/weight", PartitionSpec()),
)


def make_mesh(
    data: int | None = None, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over all devices, or over `devices`; `data` takes what the other axes leave.

    Raises:
        UserError: the sizes do not multiply to the device count.
    """
    count = jax.device_count() if devices is None else len(devices)
    if min(fsdp, tensor) < 1:
        raise UserError(f"a mesh of {data} x {fsdp} x {tensor}: every axis needs at least 1 device")
    data = count // (fsdp * tensor) if data is None else data
    if data * fsdp * tensor != count or data < 1:
        raise UserError(
            f"a mesh of {data} x {fsdp} x {tensor} (data, fsdp, tensor) does not fit {count} devices"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def choose_fsdp(count: int, state_bytes: int, memory_bytes: int | None, widths: Sequence[int]) -> int:
    """The fewest devices over which weights are split so that they fill a quarter of a device at most.

    Args:
        state_bytes: of target, masters and optimiser together.
        memory_bytes: of one device; None, where it is not known, leaves weights whole.
        widths: sizes that the split must divide.
    Returns:
        A divisor of `count`; the largest usable one where even that fills more.
    """
    usable = [n for n in range(1, count + 1) if count % n == 0 and all(w % n == 0 for w in widths)]
    if memory_bytes is None:
        return 1
    return next((n for n in usable if state_bytes / n <= memory_bytes / 4), usable[-1])


def rule(path: str) -> PartitionSpec:
    """The table's line for one parameter, `path` joined by slashes, without the axis of stacked layers.

    Raises:
        UserError: no line or several of the table match.
    """
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise UserError(f"parameter {path!r} matches {len(found)} sharding rules; it must match exactly one")
    return found[0]


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of one parameter.

    Raises:
        UserError: see `rule`; or an axis of the mesh does not divide the shape.
    """
    spec = rule(path)
    if path.startswith("layers/"):
        spec = PartitionSpec(None, *spec)
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"parameter {path!r} of shape {shape}: {size} is not divisible by the {mesh.shape[axis]} "
                f"devices of mesh axis {axis!r}; choose another mesh"
            )
    return spec


def specs(tree: Any, mesh: Mesh) -> Any:
    """PartitionSpecs of a tree of arrays or shapes, by the table.

    A leaf's path is made of its dictionary keys, so that the optimiser's moments lie where their parameters
    do; a leaf under no key (a counter) is whole everywhere.
    """

    def one(path, leaf):
        keys = [p.key for p in path if isinstance(p, jax.tree_util.DictKey)]
        return spec_of("/".join(keys), np.shape(leaf), mesh) if keys else PartitionSpec()

    return jax.tree_util.tree_map_with_path(one, tree)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """`specs` as NamedShardings."""
    return named(specs(tree, mesh), mesh)


def named(tree: Any, mesh: Mesh) -> Any:
    """A tree of PartitionSpecs as NamedShardings."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=is_spec)


def by_rows(tree: Any) -> Any:
    """PartitionSpecs without the axes that `shard_map` over rows leaves to XLA."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    keep = lambda axis: None if axis == "tensor" else axis  # noqa: E731
    return jax.tree.map(lambda spec: PartitionSpec(*map(keep, spec)), tree, is_leaf=is_spec)


def over_rows(fun: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fun` on each device's own rows. Sums over devices are written out by hand, hence no check of them."""
    return jax.shard_map(
        fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(ROWS), check_vma=False
    )


def whole(path: str, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """A parameter in full, in `dtype`: gathered over `fsdp` inside `shard_map`, as it is anywhere else.

    It is cast before it travels; its gradient is summed over `fsdp` in fp32 and only the own share kept.
    """
    dtype = dtype or weight.dtype
    if "fsdp" not in jax.sharding.get_abstract_mesh().manual_axes:
        return weight.astype(dtype)
    spec = rule(path)
    if "fsdp" in spec:
        weight = _gather(weight, spec.index("fsdp"), dtype)
    split = PartitionSpec(*(axis if axis == "tensor" else None for axis in spec))
    return jax.lax.with_sharding_constraint(weight.astype(dtype), split)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(share: jax.Array, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.all_gather(share.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_fwd(share, axis, dtype):
    return _gather(share, axis, dtype), jnp.zeros((), share.dtype)


def _gather_bwd(axis, dtype, like, g):
    g = jax.lax.psum_scatter(g.astype(jnp.float32), "fsdp", scatter_dimension=axis, tiled=True)
    return (g.astype(like.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)
