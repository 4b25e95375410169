"""Safetensors folders: one reader (single file or sharded) and one writer.

Files are memory-mapped, so checking names and shapes reads headers only, and a tensor or a slice of one is
read when its values are touched. Anything wrong is refused before a tensor is read, with the names of what
is wrong.
"""

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dscout_jax.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def listing(names: Any, most: int = 8) -> str:
    """The first few of many names, for an error text."""
    names = sorted(names)
    tail = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + tail


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UserError: missing, unreadable, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name a complete Hugging Face folder") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object; fetch it again")
    return value


def write_json(path: Path, value: Any) -> None:
    """Readable JSON with a newline at its end."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class TensorFolder:
    """The tensors of a folder, headers read; `shapes`, `dtypes` and `files` by stored name.

    Raises:
        UserError: no safetensors file, a missing or truncated shard, a tensor that the index promises and
            no shard has. A dtype other than fp32, fp16 and bf16 is refused by `check` and `view`: what a
            tensor is called may tell more of why it is not wanted.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UserError(f"{index} has no weight_map; fetch it again")
            files = sorted(set(weight_map.values()))
            missing = [f for f in files if not (self.folder / f).is_file()]
            if missing:
                raise UserError(f"{self.folder} lacks the shards {listing(missing)} named by {INDEX}")
        elif (self.folder / SINGLE).is_file():
            weight_map, files = None, [SINGLE]
        else:
            raise UserError(f"{self.folder} has neither {SINGLE} nor {INDEX}; name a safetensors folder")

        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self._begins: dict[str, int] = {}
        for file in files:
            begin, header = _header(self.folder / file)
            self.metadata[file] = header.pop("__metadata__", None) or {}
            for name, entry in header.items():
                if name in self.files:
                    raise UserError(f"{self.folder}: tensor {name} stands in two shards; fetch it again")
                self.files[name] = file
                self.shapes[name] = tuple(entry["shape"])
                self.dtypes[name] = entry["dtype"]
                self._begins[name] = begin + entry["data_offsets"][0]
        if weight_map is not None and (missing := set(weight_map) - set(self.shapes)):
            raise UserError(f"{self.folder}: no shard holds {listing(missing)}, which {INDEX} names")

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuses tensors that are missing, unknown, of another shape than `expected` or of a dtype that is
        not read, naming them.
        """
        faults = []
        if missing := set(expected) - set(self.shapes):
            faults.append(f"missing tensors: {listing(missing)}")
        if unknown := set(self.shapes) - set(expected):
            faults.append(f"unknown tensors: {listing(unknown)}")
        wrong = {
            f"{name} is {list(self.shapes[name])}, config.json asks for {list(shape)}"
            for name, shape in expected.items()
            if name in self.shapes and self.shapes[name] != shape
        }
        if wrong:
            faults.append(f"wrong shapes: {listing(wrong)}")
        if odd := {
            f"{name} ({self.dtypes[name]})" for name in self.shapes if self.dtypes[name] not in DTYPES
        }:
            faults.append(f"only {', '.join(DTYPES)} are read; found {listing(odd)}")
        if faults:
            raise UserError(f"{self.folder} does not fit its config.json: {'; '.join(faults)}")

    def view(self, name: str) -> np.ndarray:
        """One tensor as it lies in the mapped file, read-only: only what is touched of it is read.

        Raises:
            UserError: a dtype that is not read.
        """
        if self.dtypes[name] not in DTYPES:
            raise UserError(
                f"{self.folder}: only {', '.join(DTYPES)} are read; found {name} ({self.dtypes[name]})"
            )
        shape, dtype = self.shapes[name], np.dtype(DTYPES[self.dtypes[name]])
        # One map a tensor, dropped with it: pages of tensors already read do not stay.
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.zeros(shape, dtype)
        raw = np.memmap(self.folder / self.files[name], np.uint8, "r", self._begins[name], size)
        return raw.view(dtype, np.ndarray).reshape(shape)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the header's entries; the library vouches that they fit the file."""
    try:
        with safe_open(str(path), framework="np"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return 8 + size, json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from None


def write_tensors(
    folder: str | Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `model.safetensors`, or numbered shards and their index above `shard_bytes`.

    Each file appears under its name only when it is complete.
    """
    folder = Path(folder)
    shards: list[dict[str, np.ndarray]] = [{}]
    room = shard_bytes
    for name, value in tensors.items():
        if shards[-1] and value.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = np.ascontiguousarray(value)
        room -= value.nbytes
    # "pt" is what transformers and the serving engines look for; it says layout, not framework.
    about = {"format": "pt", **(metadata or {})}
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], about)
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard, about)
        weight_map |= dict.fromkeys(shard, file)
    size = sum(value.nbytes for value in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_file(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        save_file(tensors, str(part), metadata=metadata)
        part.chmod(0o644)  # the library writes for the owner alone; weights are shared like any file
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
