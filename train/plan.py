"""What a training step will cost on machines that are not here: compiled, never run, nothing allocated."""

import contextlib
import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dscout_jax.config import DrafterConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.interop.safetensors import read_json
from dscout_jax.models import Drafter, StackedTarget, Target, stack_layers, target_head
from dscout_jax.sharding import BATCH, named, shardings
from train import flops
from train.collectives import Moved, moved
from train.hosts import mesh_for
from train.plan_page import advice, page
from train.settings import TrainSettings, load_settings
from train.step import (
    Frozen,
    first_state,
    frozen_specs,
    make_features,
    make_optimizer,
    make_step,
    used_layers,
)

_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class Program(NamedTuple):
    """One compiled program, in bytes of a chip; `resident` stays though the program does not use it."""

    arguments: int
    temporaries: int
    results: int
    resident: int
    collectives: dict[str, Moved]

    @property
    def peak(self) -> int:
        """All that is alive at once; donated arguments are counted once."""
        return self.arguments + self.temporaries + self.results + self.resident


def abstract_devices(topology: str) -> list[Any]:
    """Devices of a TPU topology ("v5p:4x4x4"), or so many simulated ones ("cpu:8").

    Raises:
        UserError: a name that is not understood, or a TPU without the package libtpu.
    """
    jax.config.update("jax_platforms", "cpu")  # nothing runs: no accelerator that may be here is taken
    if found := re.fullmatch(r"cpu:(\d+)", topology):
        count = int(found[1])
        # RuntimeError: devices exist already; they are counted below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
        if len(jax.devices("cpu")) < count:
            raise UserError(
                f"{topology}: there are {len(jax.devices('cpu'))} simulated devices; set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            )
        return jax.devices("cpu")[:count]
    if topology.partition(":")[0] not in flops.CHIPS:
        raise UserError(f"topology {topology!r}: name one of {', '.join(flops.CHIPS)} as v5p:4x4x4, or cpu:8")
    from jax.experimental import topologies

    # libtpu would look for the machine's own TPU, and wait for it.
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"topology {topology!r} cannot be described ({reason}); it needs the package libtpu: "
            "pip install 'dscout-jax[plan]'"
        ) from None


def abstract_target(config: TargetConfig, dtype: Any) -> dict[str, Any]:
    """Shapes of a target's parameters."""
    shapes = names.target_shapes(config).items()
    return names.nest({path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in shapes})


def _place(tree: Any, places: Any) -> Any:
    """Shapes with their shardings."""
    put = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(put, tree, places)


def _bytes(tree: Any) -> int:
    """Of one chip's share."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


def compile_step(
    settings: TrainSettings, target: TargetConfig, drafter: DrafterConfig, mesh: Mesh
) -> dict[str, Program]:
    """The two programs of a training step, features and step, compiled for `mesh`'s devices."""
    dtype, sees_target = jnp.dtype(settings.dtype), settings.objective.sees_target
    whole = abstract_target(target, dtype)
    used = used_layers(target, drafter, sees_target)
    module: Target | StackedTarget = Target(target, dtype)
    params = whole
    if settings.scan_layers:
        module = StackedTarget(target, used, dtype)
        params = jax.eval_shape(lambda p: stack_layers(p, used), whole)
    params = _place(params, shardings(params, mesh))
    optimizer = make_optimizer(settings)
    fresh = dataclasses.replace(settings, init="fresh")
    state = jax.eval_shape(lambda: first_state(fresh, drafter, None, optimizer))
    state = _place(state, shardings(state, mesh))
    frozen = Frozen(whole["embed_tokens"], target_head(whole))
    frozen = _place(frozen, named(frozen_specs(frozen, mesh), mesh))
    split = NamedSharding(mesh, BATCH)
    rows, square = (settings.batch,), (settings.batch, settings.seq_len)
    kinds = ((square, jnp.int32), (square, jnp.bool_), (rows, jnp.int32))
    arrays = [jax.ShapeDtypeStruct(shape, kind, sharding=split) for shape, kind in kinds]

    model = Drafter(drafter, dtype, settings.remat, settings.scan_layers)
    lowered = make_features(module, model, sees_target, mesh).lower(params, arrays[0])
    features = _place(lowered.out_info, jax.tree.map(lambda _: split, lowered.out_info))
    # A tied head, and the table that both programs read, exist once.
    apart = 0 if target.tie_embeddings or not settings.scan_layers else _bytes(frozen.head)
    first = _program(lowered, _bytes(state) + apart, mesh)
    step = make_step(model, settings, optimizer, mesh)
    progress = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = step.lower(state, frozen, settings.seed, progress, features, *arrays)
    layers = {name: leaf for name, leaf in params.items() if name not in ("embed_tokens", "lm_head")}
    return {"features": first, "step": _program(lowered, _bytes(layers), mesh)}


def _program(lowered: Any, resident: int, mesh: Mesh) -> Program:
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = moved(compiled.as_text(), mesh.size)
    return Program(memory.argument_size_in_bytes, memory.temp_size_in_bytes, results, resident, found)


def plan(
    config: str | Path,
    topology: str,
    *,
    batch: int | None = None,
    mesh: tuple[int, int, int] | None = None,
    out: str | Path | None = None,
) -> str:
    """Compiles a config's step for a topology; returns a page, and writes out.md and out.json.

    Args:
        config: a config file; of its target only config.json is read, and mask_token_id must be named.
        topology: see `abstract_devices`.
        batch, mesh: in place of the config's.
    Raises:
        UserError: settings that do not go together. Not fitting the memory is a result and no error.
    """
    settings = load_settings(config)
    changes = {"batch": batch, "mesh": mesh}
    settings = dataclasses.replace(settings, **{k: v for k, v in changes.items() if v is not None})
    if settings.mask_token_id is None:
        raise UserError(f"{config}: name a mask_token_id, since no tokenizer is read here")
    target = TargetConfig.from_hf(read_json(Path(settings.target) / "config.json"))
    drafter = DrafterConfig.for_target(
        target,
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        target_layer_ids=settings.target_layer_ids,
        fusion=settings.fusion,
    )
    devices = abstract_devices(topology)
    chip = flops.CHIPS.get(topology.partition(":")[0])
    placed = mesh_for(settings, target, drafter, devices, chip.hbm_bytes if chip else None)
    counted = flops.step_flops(
        settings, target, drafter, used_layers(target, drafter, settings.objective.sees_target)
    )
    record: dict[str, Any] = {
        "target": Path(settings.target).name,
        "topology": topology,
        "chips": len(devices),
        "mesh": dict(placed.shape),
        "global_batch": settings.batch,
        "accumulation": settings.accumulation,
        "sequence": settings.seq_len,
        "anchors": settings.anchors,
        "block_size": settings.block_size,
        "draft_layers": settings.num_layers,
        "recipe": settings.objective.name,
        "dtype": settings.dtype,
        "remat": settings.remat,
        "chunk": settings.chunk,
        "attention_chunk": settings.attention_chunk,
        "anchor_chunk": settings.anchor_chunk,
        "hbm_bytes": chip.hbm_bytes if chip else None,
        "flops_per_step": counted.needed,
        "flops_executed": counted.executed,
        "flops_by_part": counted.parts,
        "jax": jax.__version__,
    }
    begun = time.monotonic()
    try:
        programs = compile_step(settings, target, drafter, placed)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = next(
            (line for line in str(error).splitlines() if "Used" in line), str(error).splitlines()[0]
        )
        record |= {"fits": False, "peak_bytes": None, "compiler": reason.strip()}
    else:
        record |= _measured(programs, counted, chip, settings, len(devices))
    record["compile_seconds"] = round(time.monotonic() - begun, 1)
    if not record["fits"] and chip:
        record["advice"] = advice(settings, dict(placed.shape))
    text = page(record)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        Path(f"{out}.md").write_text(text, encoding="utf-8")
    return text


def _measured(
    programs: dict[str, Program],
    counted: flops.Flops,
    chip: flops.Chip | None,
    settings: TrainSettings,
    chips: int,
) -> dict[str, Any]:
    peak = max(p.peak for p in programs.values())
    kinds: dict[str, Moved] = {}
    for program in programs.values():
        for kind, found in program.collectives.items():
            before = kinds.get(kind, Moved(0, 0.0))
            kinds[kind] = Moved(before.count + found.count, before.bytes + found.bytes)
    sent = sum(found.bytes for found in kinds.values())
    result: dict[str, Any] = {
        "peak_bytes": peak,
        "fits": None if chip is None else peak <= chip.hbm_bytes,
        "memory": {
            name: {k: getattr(p, k) for k in ("arguments", "temporaries", "results", "resident", "peak")}
            for name, p in programs.items()
        },
        "collective_bytes_per_chip": sent,
        "collectives": {kind: found._asdict() for kind, found in sorted(kinds.items())},
    }
    if chip is not None:
        tokens = settings.batch * settings.seq_len
        result["roofline"] = flops.roofline(counted, chip, chips, sent, tokens)._asdict()
    return result
