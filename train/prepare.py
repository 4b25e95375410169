"""What a run works with: rows, the drafter's shape, the mesh, and the target laid out on it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dscout_jax.config import DrafterConfig
from dscout_jax.interop import LoadedTarget, check_pair, default_mask_id
from dscout_jax.models import Drafter, StackedTarget, Target, stack_layers
from dscout_jax.sharding import BATCH, shardings
from train.convert import open_target
from train.dataset import Rows, load_rows
from train.hosts import mesh_for, put
from train.settings import TrainSettings
from train.step import Features, make_features, used_layers


class Prepared(NamedTuple):
    """Of a run, before its first step.

    split: how rows lie. weights: the target's, whole and by name, on the mesh. compute: (params, tokens) ->
    Features, with the params it takes: stacked where layers are scanned.
    """

    rows: Rows
    target: LoadedTarget
    config: DrafterConfig
    drafter: Drafter
    mesh: Mesh
    split: NamedSharding
    weights: dict[str, Any]
    compute: Callable[..., Features]
    params: dict[str, Any]

    @property
    def places(self) -> dict[int, int]:
        """Row id -> row of stored features."""
        ids = sorted(self.rows.train.row_ids() + self.rows.heldout.row_ids())
        return {row: place for place, row in enumerate(ids)}

    def features_contract(self, settings: TrainSettings) -> dict[str, Any]:
        """What stored features depend on, and their shape."""
        width = self.target.config.hidden_size
        return {
            "target": self.target.name,
            "fingerprint": self.target.fingerprint,
            "layers": list(self.config.target_layer_ids),
            "data": self.rows.digest,
            "heldout": settings.heldout,
            "rows": len(self.rows.train) + len(self.rows.heldout),
            "seq_len": settings.seq_len,
            "dtype": settings.dtype,
            "width": len(self.config.target_layer_ids) * width,
            "hidden": width if settings.objective.sees_target else None,
        }


def run_contract(settings: TrainSettings, fingerprint: str, digest: str) -> dict[str, Any]:
    """What a run's checkpoints must agree on: settings, the target's fingerprint, the data's digest."""
    return settings.contract() | {"fingerprint": fingerprint, "data": digest}


def prepare(settings: TrainSettings, target: LoadedTarget | None = None) -> Prepared:
    """Reads data and target, and puts the target onto the mesh.

    Raises:
        UserError: data, shapes or a mesh that do not fit.
    """
    rows = load_rows(settings.data, settings.seq_len, settings.heldout)
    dtype = jnp.dtype(settings.dtype)
    target = target or open_target(settings.target, dtype, mesh=settings.named_mesh())
    config = drafter_config(settings, target)
    mesh = mesh_for(settings, target.config, config)
    sees_target = settings.objective.sees_target
    drafter = Drafter(config, dtype, settings.remat, settings.scan_layers)
    weights = params = put(target.params, shardings(target.params, mesh))
    module: Target | StackedTarget = Target(target.config, dtype)
    if settings.scan_layers:
        used = used_layers(target.config, config, sees_target)
        module = StackedTarget(target.config, used, dtype)
        params = jax.jit(lambda p: stack_layers(p, used))(params)
        params = jax.device_put(params, shardings(params, mesh))
    compute = make_features(module, drafter, sees_target, mesh)
    split = NamedSharding(mesh, BATCH)
    return Prepared(rows, target, config, drafter, mesh, split, weights, compute, params)


def drafter_config(settings: TrainSettings, target: LoadedTarget) -> DrafterConfig:
    """The drafter that a run trains."""
    mask = settings.mask_token_id
    config = DrafterConfig.for_target(
        target.config,
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        mask_token_id=default_mask_id(target) if mask is None else mask,
        target_layer_ids=settings.target_layer_ids,
        fusion=settings.fusion,
    )
    check_pair(config, target.config, target.tokenizer.special_ids)
    return config
