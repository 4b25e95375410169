"""Checkpoints of a run: train state, position and the contract that a resume must keep."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keeping

from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.interop.safetensors import listing
from train.checksums import checksums, differing
from train.hosts import barrier, everywhere, first
from train.paths import place
from train.step import TrainState

SHAPE = frozenset({"num_layers", "block_size", "target_layer_ids", "mask_token_id", "fusion"})
"""Of a contract, what all of a run's checkpoints are read by: one drafter.json says it for them."""


def _mat(metrics: dict[str, float | None]) -> float:
    """What the best checkpoint is chosen by; one that was not evaluated never is."""
    return -math.inf if metrics["mat"] is None else metrics["mat"]


class Checkpoints:
    """The checkpoints in `run/checkpoints`, written in the background.

    The newest `keep` stay, and the one that did best on the held-out rows.
    """

    def __init__(self, run: str | Path, keep: int) -> None:
        best = keeping.BestN(get_metric_fn=_mat, n=1, keep_checkpoints_without_metrics=False)
        policy = keeping.AnyPreservationPolicy([keeping.LatestN(keep), best])
        # Without a best_fn metrics would not be written, and a resumed run would forget which was the best.
        options = ocp.CheckpointManagerOptions(preservation_policy=policy, best_fn=_mat, create=True)
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
            checksums=ocp.args.JsonSave(checksums(state._asdict())),
        )
        self._manager.save(step, args=parts, metrics={"mat": mat})

    def restore(
        self, like: TrainState, contract: dict[str, Any], accept: Sequence[str] = ()
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest undamaged state, laid out as `like`, and its position; None when there is none at all.

        A checkpoint that cannot be read, or whose values are not those that were saved, is named and
        set aside as N.damaged, and the one before it is taken. Several processes agree on it.

        Args:
            accept: fields of the contract that may differ; later checkpoints hold the new one.
        Raises:
            UserError: the run was made under another contract, the fields that differ are named; `accept`
                names a field that there is not, or the drafter's shape; the arrays are of other shapes; or
                every checkpoint is damaged. Nothing is moved then.
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
            found, why = self._undamaged(step, like, contract, accept)
            if found is None:
                damaged[step] = why
                continue
            self._set_aside(damaged, step)
            return found
        if damaged:
            what = "; ".join(f"{step}: {why}" for step, why in damaged.items())
            raise UserError(
                f"every checkpoint in {self._manager.directory} is damaged ({what}); name another run folder"
            )
        return None

    def _undamaged(
        self, step: int, like: TrainState, contract: dict[str, Any], accept: Sequence[str]
    ) -> tuple[tuple[TrainState, dict[str, Any]] | None, str]:
        """State and position of a step; or None, and why it is damaged."""
        found, why = None, ""
        try:
            found = self._read(step, like, contract, accept)
        except UserError:
            raise
        except Exception as error:  # whatever the storage below raises
            why = (str(error).splitlines() or [type(error).__name__])[0]
        # The sums below are made by all processes together: what one could not read, none goes on with.
        if not everywhere(found is not None):
            return None, why or "another process could not read it"
        state, position, sums = found
        odd = [] if sums is None else differing(sums, state._asdict())
        if odd:
            return None, f"{', '.join(odd[:3])} differ from what was saved"
        return (state, position), ""

    def _set_aside(self, damaged: dict[int, str], step: int) -> None:
        """Gives damaged checkpoints a name that is no step's; `step` is the one that is taken."""
        if not damaged:
            return
        for bad, why in damaged.items() if first() else ():
            folder = self._manager.directory / str(bad)
            aside = folder.with_name(f"{bad}.damaged")
            if aside.exists():
                aside.rmtree()  # of the same step, passed over before
            folder.rename(aside)
            print(f"checkpoint {folder} is damaged, now {aside.name}; going on from {step}: {why}")
        barrier("damaged")
        self._manager.reload()

    def _read(
        self, step: int, like: TrainState, contract: dict[str, Any], accept: Sequence[str]
    ) -> tuple[TrainState, dict[str, Any], dict[str, int] | None]:
        """State, position and checksums of a step, as they are stored."""
        found = self._manager.restore(step, args=ocp.args.Composite(contract=ocp.args.JsonRestore()))
        saved = found["contract"]
        wrong = [k for k in sorted(saved | contract) if saved.get(k) != contract.get(k) and k not in accept]
        if wrong:
            what = "; ".join(f"{k}: {saved.get(k)!r} then, {contract.get(k)!r} now" for k in wrong)
            fix = f"name another run folder, or go on in spite of it with --accept {' '.join(wrong)}"
            raise UserError(
                f"the run at {self._manager.directory} was made under another contract ({what}); "
                f"{self._elsewhere() if SHAPE & set(wrong) else fix}"
            )
        self._check_shapes(step, like)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        parts = {"state": ocp.args.StandardRestore(shapes), "position": ocp.args.JsonRestore()}
        # Runs of before there were checksums have none to compare with.
        if (self._manager.directory / str(step) / "checksums").exists():
            parts["checksums"] = ocp.args.JsonRestore()
        found = self._manager.restore(step, args=ocp.args.Composite(**parts))
        return (
            TrainState(**found["state"]),
            found["position"],
            found["checksums"] if "checksums" in parts else None,
        )

    def _check_shapes(self, step: int, like: TrainState) -> None:
        """Refuses another model's state, which is not damaged."""
        folder = self._manager.directory / str(step)
        stored = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree["params"]
        there, here = (
            {path: tuple(leaf.shape) for path, leaf in names.flatten(tree).items()}
            for tree in (stored, like.params)
        )
        odd = {
            f"{path} ({there.get(path)} there, {here.get(path)} here)"
            for path in there.keys() | here.keys()
            if there.get(path) != here.get(path)
        }
        if odd:
            raise UserError(f"{folder} is of another model: {listing(odd, 3)}; name another run folder")

    def _elsewhere(self) -> str:
        run = self._manager.directory.parent
        return f"name another run folder, with init={str(run)!r} to start from what was learnt here"

    def wait(self) -> None:
        """Until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes and lets go."""
        self._manager.close()
