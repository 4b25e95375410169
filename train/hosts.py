"""A run over one process or many: joining, the mesh, rows onto devices and back, stopping together."""

import signal
import threading
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from dscout_jax.config import DrafterConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.sharding import choose_fsdp, make_mesh
from train.settings import TrainSettings


def join(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Joins the run's other processes; before anything else touches a device.

    Without arguments the cluster says who they are, as TPU slices, Slurm and Open MPI do; where nothing
    does, this process runs alone.

    Raises:
        UserError: some but not all of the three were given, or the cluster says less than is needed.
    """
    given = (coordinator, processes, process_id)
    if all(x is None for x in given):
        try:
            jax.distributed.initialize()
        except ValueError as error:
            # What it says where nothing names the other processes; anything else is half an answer.
            if "coordinator_address should be defined" not in str(error):
                raise UserError(
                    f"this cluster does not say who its processes are ({error}); give --coordinator, "
                    "--processes and --process-id"
                ) from None
    elif any(x is None for x in given):
        raise UserError(f"coordinator, processes and process_id go together; got {given}")
    else:
        jax.distributed.initialize(coordinator, processes, process_id)


def first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def share() -> tuple[int, int]:
    """(this process, of how many)."""
    return jax.process_index(), jax.process_count()


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def everywhere(ok: bool) -> bool:
    """Whether it holds on every process; all of them ask."""
    if jax.process_count() == 1:
        return ok
    return bool(multihost_utils.process_allgather(np.int32(ok)).all())


def state_bytes(target: TargetConfig, drafter: DrafterConfig, itemsize: int) -> int:
    """Bytes that stay: the target's weights, the drafter's fp32 masters and Adam's two moments."""
    count = [
        sum(int(np.prod(shape)) for shape in shapes.values())
        for shapes in (names.target_shapes(target), names.drafter_shapes(drafter))
    ]
    return count[0] * itemsize + count[1] * 12


def mesh_for(
    settings: TrainSettings,
    target: TargetConfig,
    drafter: DrafterConfig,
    devices: list[Any] | None = None,
    memory: int | None = None,
) -> Mesh:
    """The mesh that the settings name, or the widest `data` that the memory of a device allows.

    Args:
        devices: default: all. memory: bytes of one; default: what the device reports, if it does.
    Raises:
        UserError: sizes that do not fit the devices, the heads or the batch.
    """
    if settings.mesh is None:
        count = jax.device_count() if devices is None else len(devices)
        if memory is None:
            memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        kept = state_bytes(target, drafter, jax.numpy.dtype(settings.dtype).itemsize)
        sizes = (None, choose_fsdp(count, kept, memory, [target.hidden_size]), 1)
    else:
        sizes = settings.mesh
    mesh = make_mesh(*sizes, devices=devices)
    if settings.anchor_chunk is not None and mesh.shape["fsdp"] > 1:
        raise UserError(
            f"anchor_chunk {settings.anchor_chunk} would gather every weight anew for each chunk from the "
            f"{mesh.shape['fsdp']} devices along fsdp; set scan_layers and attention_chunk in its place"
        )
    tensor, spread = mesh.shape["tensor"], mesh.shape["data"] * mesh.shape["fsdp"]
    for config in (target, drafter):
        if config.num_kv_heads % tensor:
            raise UserError(
                f"{tensor} devices along the mesh axis tensor do not divide {config.num_kv_heads} KV heads"
            )
    if settings.batch // settings.accumulation % spread:
        raise UserError(
            f"batch {settings.batch} / accumulation {settings.accumulation} is not divisible by the "
            f"{spread} devices that hold different rows (data x fsdp)"
        )
    return mesh


def own_rows(sharding: NamedSharding, batch: int) -> np.ndarray:
    """Places, in a global batch, of the rows that this process's devices hold."""
    spans = sharding.addressable_devices_indices_map((batch,)).values()
    return np.unique(np.concatenate([np.arange(batch)[span] for span in spans]))


def put_rows(tree: Any, sharding: NamedSharding, batch: int) -> Any:
    """Global arrays of `batch` rows from this process's own, in the order of `own_rows`.

    By callback, not `make_array_from_process_local_data`: that wants neighbouring rows from a process, and
    on a torus they need not be neighbours.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    own = own_rows(sharding, batch)

    def one(local: np.ndarray) -> jax.Array:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            return local[np.searchsorted(own, np.arange(batch)[index[0]])]

        return jax.make_array_from_callback((batch, *local.shape[1:]), sharding, read)

    return jax.tree.map(one, tree)


def put(tree: Any, places: Any) -> Any:
    """Arrays that every process has in full, onto the mesh; `places`: a sharding, or a tree of them."""
    if jax.process_count() == 1:
        return jax.device_put(tree, places)

    def one(value: Any, place: NamedSharding) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, place)  # on the mesh already
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    if isinstance(places, NamedSharding):
        return jax.tree.map(lambda value: one(value, places), tree)
    return jax.tree.map(one, tree, places)


def fetch(tree: Any) -> Any:
    """Host copies, in full, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


class Termination:
    """Notes a SIGTERM in place of dying of it.

    One process catches the signal itself, in the main thread. Several agree, through jax's coordination
    service, on the step after which all of them stop.
    """

    _noted = False

    def __enter__(self) -> "Termination":
        alone = jax.process_count() == 1
        self._catches = alone and threading.current_thread() is threading.main_thread()
        if self._catches:
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, *_: object) -> None:
        self._noted = True

    def asked(self, step: int) -> bool:
        """Whether to stop before the step after `step`; every process gets the same answer."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._noted

    def __exit__(self, *_: object) -> None:
        if self._catches:
            signal.signal(signal.SIGTERM, self._previous)
