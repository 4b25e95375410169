"""Drafters out of runs and into them: Orbax checkpoints on one side, DFlash folders on the other.

A run says in `drafter.json` what its checkpoints are: shapes, special tokens, drafted ids, origin. With it
a checkpoint becomes a folder without the target, the data or the config file of the run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import load_draft_ids, load_drafter, load_provenance, names, save_drafter
from dscout_jax.interop.folders import whole_folder
from dscout_jax.interop.huggingface import as_stored
from dscout_jax.interop.jsonl import parse_jsonl
from dscout_jax.interop.safetensors import listing, read_json, write_json
from train.paths import place

ABOUT = "drafter.json"
_IMPORTED = "imported_from"


class Saved(NamedTuple):
    """One checkpoint of a run.

    params: as stored, in host memory. about: the run's drafter.json. provenance: the drafter's at that step.
    """

    config: DrafterConfig
    params: dict[str, Any]
    step: int
    about: dict[str, Any]
    provenance: dict[str, Any]


def describe(
    run: str | Path,
    config: DrafterConfig,
    provenance: Mapping[str, Any],
    special_ids: Mapping[str, Any],
    draft_ids: Sequence[int] | None = None,
) -> None:
    """Writes what the run's checkpoints are, before the first of them."""
    _write_about(place(run) / ABOUT, config, provenance, special_ids, draft_ids)


def refuse_imported(run: str | Path) -> None:
    """Raises UserError for an imported drafter's run: a training starts from it, but in a run of its own."""
    if is_run(run) and _IMPORTED in read_json(place(run) / ABOUT):
        raise UserError(f"{run} holds an imported drafter; set init={str(run)!r} and name another run folder")


def is_run(folder: str | Path) -> bool:
    """Whether a folder is a run, not a drafter's own folder."""
    return (place(folder) / ABOUT).is_file()


def read_run(run: str | Path, step: int | None = None) -> Saved:
    """The drafter of a checkpoint; no other part of the train state is read.

    Args:
        step: None takes the newest.

    Raises:
        UserError: no run, no such checkpoint, or a damaged one.
    """
    run = place(run)
    if not is_run(run):
        raise UserError(f"{run} has no {ABOUT}; name a folder that `dscout train` or `dscout import` wrote")
    about = read_json(run / ABOUT)
    config = DrafterConfig.from_hf(about["config"])
    root = run / "checkpoints"
    # A checkpoint appears under its number when it is whole.
    steps = sorted(int(place.name) for place in root.glob("*") if place.name.isdigit())
    if not steps:
        raise UserError(f"{run} has no checkpoint yet; a run writes one every save_every steps")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    wanted = {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in names.drafter_shapes(config).items()}
    like = {"params": names.nest(wanted), "skipped": jax.ShapeDtypeStruct((), jnp.int32)}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    parts = ocp.args.PyTreeRestore(item=like, restore_args=as_numpy, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(root / str(step) / "state", args=parts)
    except Exception as error:  # whatever the storage below raises
        others = [s for s in steps if s < step]
        fix = f"try --step {others[-1]}" if others else "no earlier one is left"
        raise UserError(f"checkpoint {root / str(step)} is damaged ({_first_line(error)}); {fix}") from None
    flat = names.flatten(found["params"])
    odd = {path for path, like in wanted.items() if np.shape(flat[path]) != like.shape}
    if odd:
        raise UserError(f"checkpoint {root / str(step)} does not fit {ABOUT} at {listing(odd)}")
    provenance = dict(about["provenance"])
    if _IMPORTED not in about:
        provenance |= {"steps": step, "skipped_steps": int(found["skipped"]), "heldout": _scores(run, step)}
    return Saved(config, found["params"], step, about, provenance)


def export(run: str | Path, out: str | Path, step: int | None = None, dtype: Any = jnp.bfloat16) -> Path:
    """Writes a checkpoint of a run as a DFlash folder; the newest, or that of `step`.

    Raises:
        UserError: as `read_run` and `save_drafter`.
    """
    saved = read_run(run, step)
    return save_drafter(
        out,
        saved.config,
        saved.params,
        saved.provenance,
        dtype=dtype,
        special_ids=saved.about["special_ids"],
        draft_ids=saved.about["draft_ids"],
    )


def import_drafter(folder: str | Path, run: str | Path) -> Path:
    """Writes a DFlash folder, ours or another project's, as a run with one checkpoint, bit for bit.

    A training starts from it by `init`; `export` gives the folder back.

    Raises:
        UserError: a folder that `load_drafter` refuses, or a run that exists.
    """
    folder, run = Path(folder).expanduser(), Path(run)
    if run.exists():
        raise UserError(f"{run} exists; name a new run folder")
    config, params = load_drafter(folder, place=as_stored)
    special = {k: v for k, v in read_json(folder / "config.json").items() if k.endswith("_token_id")}
    special_ids = {k.removesuffix("_id"): v for k, v in special.items() if v is not None}
    state = {"params": params, "step": np.int32(0), "skipped": np.int32(0)}
    parts = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        position=ocp.args.JsonSave({}),
        contract=ocp.args.JsonSave({_IMPORTED: str(folder)}),
    )
    with whole_folder(run, replace=False) as part:
        with ocp.CheckpointManager((part / "checkpoints").resolve()) as manager:
            manager.save(0, args=parts)
        about = {_IMPORTED: str(folder.resolve())}
        provenance = load_provenance(folder) or {_IMPORTED: folder.resolve().name}
        _write_about(part / ABOUT, config, provenance, special_ids, load_draft_ids(folder), about)
    return run


def load_start(source: str | Path) -> tuple[DrafterConfig, dict[str, Any], dict[str, Any]]:
    """What a training may start from: a run's newest checkpoint or a DFlash folder, as fp32.

    Returns:
        Its config, its parameters, each in a buffer of its own, and its provenance.

    Raises:
        UserError: as `read_run` and `load_drafter`.
    """
    if not is_run(source):
        return *load_drafter(source, dtype=jnp.float32), load_provenance(source)
    saved = read_run(source)
    params = jax.tree.map(lambda value: jnp.array(value, jnp.float32), saved.params)
    return saved.config, params, saved.provenance


def decodable(source: str | Path) -> Path:
    """A DFlash folder for decoding: `source` itself, or of a run its newest checkpoint, exported in fp32.

    The export stays in the run, under `exported/STEP`, and is made once.
    """
    if not is_run(source):
        return Path(source)
    saved = read_run(source)
    out = Path(source) / "exported" / str(saved.step)
    return out if out.is_dir() else export(source, out, saved.step, jnp.float32)


def _write_about(
    path: Path,
    config: DrafterConfig,
    provenance: Mapping[str, Any],
    special_ids: Mapping[str, Any],
    draft_ids: Sequence[int] | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    part = path.with_name(f".{path.name}.part")
    about = {
        "config": config.to_hf(),
        "special_ids": dict(special_ids),
        "draft_ids": None if draft_ids is None else [int(i) for i in draft_ids],
        "provenance": dict(provenance),
        **(more or {}),
    }
    write_json(part, about)
    part.replace(path)


def _scores(run: Path, step: int) -> dict[str, Any] | None:
    """The newest evaluation up to `step`, with the step it was made at; None where there is none."""
    path = run / "metrics.jsonl"
    rows = parse_jsonl(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else []
    scored = [row for row in rows if "eval" in row and row["step"] <= step]
    return {"step": scored[-1]["step"], **scored[-1]["eval"]} if scored else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
