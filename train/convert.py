"""Targets as Orbax checkpoints, for pods that read from a bucket, and back to their Hugging Face folders.

    OUT/params/       the weights as this library names them, in their stored dtype
    OUT/folder/       every other file of the Hugging Face folder
    OUT/target.json   written last: name, fingerprint, a checksum a tensor, which file held which tensor

Paths are etils paths: a bucket (gs://...) where etils can reach it, or a local folder. Back to a Hugging Face
folder it is a local one.
"""

import dataclasses
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh
from safetensors.numpy import save_file

from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, gguf, load_target, names, onto
from dscout_jax.interop.folders import whole_folder
from dscout_jax.interop.huggingface import CONVERTED, as_stored, name_of, read_words, target_folder
from dscout_jax.interop.safetensors import TensorFolder, listing
from dscout_jax.sharding import shardings
from train.paths import local_path, place

_FORMAT = 1
# Tensors that loading drops because they say nothing of their own; kept beside the other files.
_EXTRAS = "extras.safetensors"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_HEAD, _TABLE = names.to_hf("lm_head/weight"), names.to_hf("embed_tokens/weight")


def convert(source: str | Path, out: str | Path, cache_dir: str | Path | None = None) -> str:
    """A target as an Orbax checkpoint; what this function wrote, back as the folder it came from.

    Both ways need host memory for all weights in their stored dtype.

    Returns:
        `out`.
    Raises:
        UserError: `out` exists, `source` is neither, or it is damaged; or a Hugging Face folder was to be
            written to a bucket.
    """
    if place(out).exists():
        raise UserError(f"{out} exists; name a new folder")
    if is_converted(source):
        _to_hugging_face(place(source), local_path(out, "a Hugging Face folder is written"))
    else:
        _to_orbax(source, place(out), cache_dir)
    return str(out)


def is_converted(source: str | Path) -> bool:
    """Whether `convert` wrote this as an Orbax checkpoint, and finished."""
    # The embedded target's name is no path, whatever lies there.
    return source != gguf.NAME and (place(source) / CONVERTED).is_file()


def open_target(
    source: str | Path,
    dtype: Any = jnp.bfloat16,
    cache_dir: str | Path | None = None,
    mesh: Mesh | None = None,
) -> LoadedTarget:
    """A target from wherever it lies: all that `load_target` takes, or what `convert` wrote.

    Args:
        mesh: puts the weights there by the table of `sharding`; each device reads its own slices. On more
            than one device no host then holds a whole tensor, and a converted target's checksums, which are
            of whole ones, are not held against them.

    Raises:
        UserError: as `load_target`; a checkpoint that is damaged.
    """
    if not is_converted(source):
        return load_target(source, dtype, cache_dir, None if mesh is None else onto(mesh))
    words, folder = open_words(source), place(source)
    shapes = names.nest(
        {path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in names.target_shapes(words.config).items()}
    )
    where = None if mesh is None else shardings(shapes, mesh)
    if mesh is None or mesh.size == 1:
        params = _read_params(folder, _read_about(folder), shapes)
        params = jax.tree.map(lambda value: jnp.asarray(value.astype(dtype or value.dtype)), params)
        params = params if where is None else jax.device_put(params, where)
    else:
        how = jax.tree.map(lambda to: ocp.ArrayRestoreArgs(sharding=to, dtype=dtype), where)
        params = _restore(folder, shapes, how)
    return dataclasses.replace(words, params=params)


def open_words(source: str | Path, cache_dir: str | Path | None = None) -> LoadedTarget:
    """A target without its weights, wherever it lies: no params, and of a Hugging Face folder no fingerprint.

    Raises:
        UserError: as `load_target`, as far as it looks.
    """
    if not is_converted(source):
        folder = target_folder(source, cache_dir)
        config, tokenizer = read_words(folder)
        return LoadedTarget(config, {}, tokenizer, name_of(source, folder), "")
    about = _read_about(place(source))
    with tempfile.TemporaryDirectory() as copy:
        for file in (place(source) / "folder").iterdir():
            (Path(copy) / file.name).write_bytes(file.read_bytes())
        config, tokenizer = read_words(copy)
    return LoadedTarget(config, {}, tokenizer, about["name"], about["fingerprint"])


def _to_orbax(source: str | Path, out: epath.Path, cache_dir: str | Path | None) -> None:
    folder = target_folder(source, cache_dir)
    loaded = load_target(source, None, cache_dir, place=as_stored)
    tensors = TensorFolder(folder)
    flat = names.flatten(loaded.params)
    extras = {
        name: np.array(tensors.view(name))
        for name in tensors.shapes
        if names.from_hf(name) not in flat and name != _HEAD
    }
    about = {
        "format": _FORMAT,
        "name": loaded.name,
        "fingerprint": loaded.fingerprint,
        "crc32": {path: _crc(value) for path, value in flat.items()},
        "files": tensors.files,
        "metadata": tensors.metadata,
    }
    try:
        out.mkdir(parents=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(out / "params", args=ocp.args.PyTreeSave(loaded.params))
        (out / "folder").mkdir()
        for file in folder.iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS:
                (out / "folder" / file.name).write_bytes(file.read_bytes())
        if extras:
            with tempfile.TemporaryDirectory() as part:
                save_file(extras, Path(part) / _EXTRAS)
                (out / _EXTRAS).write_bytes((Path(part) / _EXTRAS).read_bytes())
        (out / CONVERTED).write_text(json.dumps(about, indent=1) + "\n")
    except BaseException:
        out.rmtree(missing_ok=True)
        raise


def _to_hugging_face(source: epath.Path, out: Path) -> None:
    about = _read_about(source)
    wanted = names.nest(dict.fromkeys(about["crc32"], jax.ShapeDtypeStruct((), jnp.float32)))
    flat = names.flatten(_read_params(source, about, wanted))
    with whole_folder(out, replace=False) as part:
        for file in (source / "folder").iterdir():
            (part / file.name).write_bytes(file.read_bytes())
        stored = {names.to_hf(path): value for path, value in flat.items()}
        stored.setdefault(_HEAD, stored[_TABLE])  # a tied head that the folder spelt out
        if (source / _EXTRAS).is_file():
            with tempfile.TemporaryDirectory() as temporary:
                (Path(temporary) / "model.safetensors").write_bytes((source / _EXTRAS).read_bytes())
                extras = TensorFolder(temporary)
                stored |= {name: np.array(extras.view(name)) for name in extras.shapes}
        for file, metadata in about["metadata"].items():
            held = {name: stored[name] for name, where in about["files"].items() if where == file}
            save_file(held, part / file, metadata=metadata or None)
            (part / file).chmod(0o644)


def _read_about(source: epath.Path) -> dict[str, Any]:
    try:
        about = json.loads((source / CONVERTED).read_text())
        if about["format"] != _FORMAT:
            raise UserError(
                f"{source} is of format {about['format']}, not {_FORMAT}; convert the target again"
            )
        return about
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{source / CONVERTED} is not readable ({error}); convert the target again") from None


def _read_params(source: epath.Path, about: dict[str, Any], like: Any) -> dict[str, Any]:
    """The weights in host memory, as stored, each held against its checksum: Orbax has none."""
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    params = _restore(source, like, as_numpy)
    bad = {path for path, value in names.flatten(params).items() if _crc(value) != about["crc32"][path]}
    if bad:
        raise UserError(f"{source} is damaged at {listing(bad)} (checksum differs); convert the target again")
    return params


def _restore(source: epath.Path, like: Any, how: Any) -> dict[str, Any]:
    parts = ocp.args.PyTreeRestore(item=like, restore_args=how)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(source / "params", args=parts)
    except Exception as error:  # whatever the storage below raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{source / 'params'} is damaged ({reason}); convert the target again") from None


def _crc(value: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
