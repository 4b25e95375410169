"""Checkpoints of a run: train state, position and the contract that a resume must keep."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dscout_jax.errors import UserError
from train.step import TrainState


class Checkpoints:
    """The checkpoints in `run/checkpoints`, written in the background, the newest `keep` kept."""

    def __init__(self, run: str | Path, keep: int) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        folder = (Path(run) / "checkpoints").resolve()
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, state: TrainState, position: dict[str, Any], contract: dict[str, Any]) -> None:
        """Starts writing the state at its step; `position` is JSON: where data and clock stand."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()),
            position=ocp.args.JsonSave(position),
            contract=ocp.args.JsonSave(contract),
        )
        self._manager.save(step, args=parts)

    def restore(self, like: TrainState, contract: dict[str, Any]) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest state and its position; None when there is none.

        Raises:
            UserError: the run was made under another contract; the fields that differ are named.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        saved = self._manager.restore(step, args=ocp.args.Composite(contract=ocp.args.JsonRestore()))[
            "contract"
        ]
        wrong = [k for k in sorted(saved | contract) if saved.get(k) != contract.get(k)]
        if wrong:
            what = "; ".join(f"{k}: {saved.get(k)!r} then, {contract.get(k)!r} now" for k in wrong)
            raise UserError(
                f"the run at {self._manager.directory} was made under another contract ({what}); "
                "name another run folder"
            )
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        parts = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), position=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=parts)
        return TrainState(**found["state"]), found["position"]

    def wait(self) -> None:
        """Until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes and lets go."""
        self._manager.close()
