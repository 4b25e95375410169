"""What a run works with: rows, the drafter's shape, the mesh, and the target laid out on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from dscout_jax.config import DrafterConfig
from dscout_jax.interop import LoadedTarget, check_pair, default_mask_id
from dscout_jax.models import Drafter, StackedTarget, Target, stack_layers
from dscout_jax.sharding import BATCH, shardings
from train.convert import open_target, open_words
from train.dataset import Rows, load_rows
from train.hosts import mesh_for, put
from train.settings import TrainSettings
from train.step import Features, make_features, used_layers


class Prepared(NamedTuple):
    """Of a run, before its first step.

    target: without its parameters, which would be a second copy of stacked ones. split: how rows lie.
    weights: the target's, whole and by name, on the mesh; to be dropped once drafter and head are made of
    them. compute: (params, tokens) -> Features, with the params it takes: stacked where layers are scanned.
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


def prepare(
    settings: TrainSettings, target: LoadedTarget | None = None, cache_dir: str | Path | None = None
) -> Prepared:
    """Reads data and target, and puts the target onto the mesh.

    Args:
        target: already loaded; whoever passes it holds it. None reads `settings.target` straight onto a mesh
            that was chosen from its shapes: then no device ever has more of it than its share.
        cache_dir: where the embedded target lies; default $DSCOUT_CACHE, else ~/.cache/dscout.
    Raises:
        UserError: data, shapes or a mesh that do not fit.
    """
    rows = load_rows(settings.data, settings.seq_len, settings.heldout)
    dtype = jnp.dtype(settings.dtype)
    words = target or open_words(settings.target, cache_dir)
    config = drafter_config(settings, words)
    mesh = mesh_for(settings, words.config, config)
    target = target or open_target(settings.target, dtype, cache_dir, mesh)
    sees_target = settings.objective.sees_target
    drafter = Drafter(config, dtype, settings.remat, settings.scan_layers)
    weights = params = put(target.params, shardings(target.params, mesh))
    module: Target | StackedTarget = Target(target.config, dtype)
    if settings.scan_layers:
        used = used_layers(target.config, config, sees_target)
        module = StackedTarget(target.config, used, dtype)
        stack = lambda p: stack_layers(p, used)  # noqa: E731
        places = shardings(jax.eval_shape(stack, params), mesh)
        # Made where they stay: left to itself the program could put all layers on every device.
        params = jax.jit(stack, out_shardings=places)(params)
        # The table and the norm stay the arrays they were, which the step reads too.
        params |= {name: weights[name] for name in params.keys() & weights.keys()}
    compute = make_features(module, drafter, sees_target, mesh)
    split = NamedSharding(mesh, BATCH)
    known = LoadedTarget(target.config, {}, target.tokenizer, target.name, target.fingerprint)
    return Prepared(rows, known, config, drafter, mesh, split, weights, compute, params)


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
