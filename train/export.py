"""Drafters out of runs and into them: Orbax checkpoints on one side, DFlash folders on the other.

A run says in `drafter.json` what its checkpoints are: shapes, special tokens, drafted ids, origin. With it
a checkpoint becomes a folder without the target, the data or the config file of the run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import load_draft_ids, load_drafter, load_provenance, names, save_drafter
from dscout_jax.interop.drafter import PROVENANCE
from dscout_jax.interop.folders import whole_folder
from dscout_jax.interop.huggingface import as_stored
from dscout_jax.interop.jsonl import parse_jsonl
from dscout_jax.interop.safetensors import listing, read_json
from train.checksums import checksums, differing
from train.paths import local_path, place, write_whole

ABOUT = "drafter.json"
_IMPORTED = "imported_from"
Step = int | Literal["best"] | None
"""A checkpoint of a run: by its step; the best on held-out rows; None: the newest."""


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


def read_run(run: str | Path, step: Step = None) -> Saved:
    """The drafter of a checkpoint, held against its checksums; no other part of the train state is read.

    Raises:
        UserError: no run, no such checkpoint, or a damaged one; none was evaluated, of which one is the best.
    """
    run = place(run)
    steps = _steps(run)
    about = read_json(run / ABOUT)
    config = DrafterConfig.from_hf(about["config"])
    root = run / "checkpoints"
    if step == "best":
        step = _best(run, steps, config.block_size)
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
        _check_sums(root / str(step) / "checksums", found["params"])
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


def _steps(run: epath.Path) -> list[int]:
    """Steps of a run's checkpoints, at least one, ascending."""
    if not is_run(run):
        raise UserError(f"{run} has no {ABOUT}; name a folder that `dscout train` or `dscout import` wrote")
    # A checkpoint appears under its number when it is whole.
    steps = sorted(int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdigit())
    if not steps:
        raise UserError(f"{run} has no checkpoint yet; a run writes one every save_every steps")
    return steps


def _best(run: epath.Path, steps: Sequence[int], block_size: int) -> int:
    """Of the evaluated checkpoints the one with the highest MAT; of equals the newest."""
    mats = {row["step"]: row["eval"]["mat"][str(block_size)] for row in _evaluations(run)}
    mats = {step: mats[step] for step in steps if mats.get(step) is not None}
    if not mats:
        raise UserError(f"{run}: no checkpoint was evaluated; name a step of {', '.join(map(str, steps))}")
    return max(mats, key=lambda step: (mats[step], step))


def _check_sums(folder: epath.Path, params: dict[str, Any]) -> None:
    """Raises ValueError for values that are not those that were saved; runs of before have no checksums."""
    if not folder.exists():
        return
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        saved = reader.restore(folder, args=ocp.args.JsonRestore())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        odd = differing(saved, {"params": params})
    if odd:
        raise ValueError(f"{', '.join(odd[:3])} differ from what was saved")


def export(run: str | Path, out: str | Path, step: Step = None, dtype: Any = None) -> Path:
    """Writes a checkpoint of a run as a DFlash folder; the newest, or that of `step`.

    Args:
        dtype: of the stored tensors; None: bf16, and of an imported run each tensor's own.
    Raises:
        UserError: as `read_run` and `save_drafter`; `out` in a bucket.
    """
    out = local_path(out, "a drafter is exported")
    saved = read_run(run, step)
    if dtype is None and _IMPORTED not in saved.about:
        dtype = jnp.bfloat16
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
        UserError: a folder that `load_drafter` refuses, or a run that exists; either of them in a bucket.
    """
    folder, run = (local_path(path, "a drafter is imported") for path in (folder, run))
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
        checksums=ocp.args.JsonSave(checksums(state)),
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
        source = local_path(source, "a drafter's folder is read")
        return *load_drafter(source, dtype=jnp.float32), load_provenance(source)
    saved = read_run(source)
    params = jax.tree.map(lambda value: jnp.array(value, jnp.float32), saved.params)
    return saved.config, params, saved.provenance


def decodable(source: str | Path) -> Path:
    """A DFlash folder for decoding: `source` itself, or of a run its newest checkpoint, exported in fp32.

    The export stays in the run, under `exported/STEP`, and is made anew for a newer checkpoint of that step.

    Raises:
        UserError: as `read_run`; `source` in a bucket.
    """
    local_path(source, "a drafter is decoded with")
    source = Path(source).expanduser()
    if not is_run(source):
        return source
    step = _steps(place(source))[-1]
    out = source / "exported" / str(step)
    made = out / PROVENANCE
    checkpoint = source / "checkpoints" / str(step)
    if not made.is_file() or made.stat().st_mtime < checkpoint.stat().st_mtime:
        export(source, out, step, jnp.float32)
    return out


def _write_about(
    path: epath.Path | Path,
    config: DrafterConfig,
    provenance: Mapping[str, Any],
    special_ids: Mapping[str, Any],
    draft_ids: Sequence[int] | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    about = {
        "config": config.to_hf(),
        "special_ids": dict(special_ids),
        "draft_ids": None if draft_ids is None else [int(i) for i in draft_ids],
        "provenance": dict(provenance),
        **(more or {}),
    }
    write_whole(path, json.dumps(about, indent=2, ensure_ascii=False) + "\n")


def _scores(run: epath.Path, step: int) -> dict[str, Any] | None:
    """The newest evaluation up to `step`, with the step it was made at; None where there is none."""
    scored = [row for row in _evaluations(run) if row["step"] <= step]
    return {"step": scored[-1]["step"], **scored[-1]["eval"]} if scored else None


def _evaluations(run: epath.Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    rows = parse_jsonl(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else []
    return [row for row in rows if "eval" in row]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
