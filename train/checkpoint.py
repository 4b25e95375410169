"""Checkpoints of a run: train state, position and the contract that a resume must keep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keeping

from dscout_jax.errors import UserError
from train.paths import place
from train.settings import renamed
from train.step import TrainState

SHAPE = frozenset({"num_layers", "block_size", "target_layer_ids", "mask_token_id", "fusion"})
"""Of a contract, what all of a run's checkpoints are read by: one drafter.json says it for them."""


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    """Of each leaf's bits: sum_i (2 i + 1) bits_i modulo 2^32, i counting elements.

    Whole numbers, so the same on every mesh; odd factors, so that no single flipped bit goes unseen.
    """

    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32).astype(jnp.uint32)
        place, stride = jnp.zeros(x.shape, jnp.uint32), 1
        for axis in reversed(range(x.ndim)):
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
            stride = stride * x.shape[axis] % 2**32
        return (bits * (2 * place + 1)).sum(dtype=jnp.uint32)

    return [one(x) for x in leaves]


def checksums(state: TrainState) -> dict[str, int]:
    """One number for each array of a state, computed where it lies."""
    flat = jax.tree_util.tree_leaves_with_path(state._asdict())
    sums = jax.device_get(_sums([leaf for _, leaf in flat]))
    return {jax.tree_util.keystr(path): int(s) for (path, _), s in zip(flat, sums, strict=True)}


class Checkpoints:
    """The checkpoints in `run/checkpoints`, written in the background.

    The newest `keep` stay, and the one that did best on the held-out rows.
    """

    def __init__(self, run: str | Path, keep: int) -> None:
        best = keeping.BestN(get_metric_fn=lambda m: m["mat"], n=1, keep_checkpoints_without_metrics=False)
        policy = keeping.AnyPreservationPolicy([keeping.LatestN(keep), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, create=True)
        folder = place(run) / "checkpoints"
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(
        self,
        state: TrainState,
        position: dict[str, Any],
        contract: dict[str, Any],
        mat: float | None = None,
    ) -> None:
        """Starts writing the state at its step.

        Args:
            position: JSON: where data and clock stand. mat: held-out MAT at this step, where it is known.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()),
            position=ocp.args.JsonSave(position),
            contract=ocp.args.JsonSave(contract),
            checksums=ocp.args.JsonSave(checksums(state)),
        )
        self._manager.save(step, args=parts, metrics=None if mat is None else {"mat": mat})

    def restore(
        self, like: TrainState, contract: dict[str, Any], accept: Sequence[str] = ()
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest undamaged state, laid out as `like`, and its position; None when there is none at all.

        A checkpoint that cannot be read, or whose values are not those that were saved, is named and
        removed, and the one before it is taken.

        Args:
            accept: fields of the contract that may differ; later checkpoints hold the new one.
        Raises:
            UserError: the run was made under another contract, the fields that differ are named; `accept`
                names a field that there is not, or the drafter's shape; or every checkpoint is damaged.
        """
        if fixed := sorted(set(accept) & SHAPE):
            raise UserError(
                f"accept {fixed}: the drafter's shape is what the run's older checkpoints are read by; "
                f"{self._elsewhere()}"
            )
        if odd := sorted(set(accept) - set(contract)):
            raise UserError(f"accept {odd}: the contract has {sorted(contract)}")
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._read(step, like, contract, accept)
            except UserError:
                raise
            except Exception as error:
                damaged[step] = (str(error).splitlines() or [type(error).__name__])[0]
                continue
            for bad, why in damaged.items():
                print(
                    f"checkpoint {self._manager.directory / str(bad)} is damaged, going on from {step}: {why}"
                )
                self._manager.delete(bad)
            return found
        if damaged:
            what = "; ".join(f"{step}: {why}" for step, why in damaged.items())
            raise UserError(
                f"every checkpoint in {self._manager.directory} is damaged ({what}); name another run folder"
            )
        return None

    def _read(
        self, step: int, like: TrainState, contract: dict[str, Any], accept: Sequence[str]
    ) -> tuple[TrainState, dict[str, Any]]:
        found = self._manager.restore(step, args=ocp.args.Composite(contract=ocp.args.JsonRestore()))
        saved = renamed(found["contract"])
        wrong = [k for k in sorted(saved | contract) if saved.get(k) != contract.get(k) and k not in accept]
        if wrong:
            what = "; ".join(f"{k}: {saved.get(k)!r} then, {contract.get(k)!r} now" for k in wrong)
            fix = f"name another run folder, or go on in spite of it with --accept {' '.join(wrong)}"
            raise UserError(
                f"the run at {self._manager.directory} was made under another contract ({what}); "
                f"{self._elsewhere() if SHAPE & set(wrong) else fix}"
            )
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        parts = {"state": ocp.args.StandardRestore(shapes), "position": ocp.args.JsonRestore()}
        # Runs of before there were checksums have none to compare with.
        if (self._manager.directory / str(step) / "checksums").exists():
            parts["checksums"] = ocp.args.JsonRestore()
        found = self._manager.restore(step, args=ocp.args.Composite(**parts))
        state = TrainState(**found["state"])
        if "checksums" in parts:
            here = checksums(state)
            odd = [name for name, value in found["checksums"].items() if here.get(name) != value]
            if odd:
                raise ValueError(f"{', '.join(odd[:3])} differ from what was saved")
        return state, found["position"]

    def _elsewhere(self) -> str:
        run = self._manager.directory.parent
        return f"name another run folder, with init={str(run)!r} to start from what was learnt here"

    def wait(self) -> None:
        """Until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes and lets go."""
        self._manager.close()
