"""The target's features of each row: computed, kept in memory, or read from what `dscout features` wrote.

    FOLDER/features.json   written first: what the rows were computed from, and how the arrays are cut
    FOLDER/taps/           zarr3 [rows, S, C * D], one shard a row, each part of it with its crc32c
    FOLDER/hidden/         the same [rows, S, D], where the objective sees the target's own distribution

Folders are local or in a bucket (gs://...). Padding is not stored: parts that hold zeros only are left out.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding

from dscout_jax.errors import UserError
from train.dataset import Batch
from train.hosts import put_rows
from train.paths import is_remote, place, write_whole
from train.step import Features

MANIFEST = "features.json"
_PART = 256  # tokens of a row that are stored and checked together


def answer_end(row: Batch) -> int:
    """Tokens of a row up to its answer's last: no block looks past it."""
    return int(np.flatnonzero(row.answer)[-1]) + 1


class FeatureStore:
    """The target's features of each row, computed once and kept in `rows`, host memory; None keeps none.

    A batch is this process's rows of `count`.
    """

    def __init__(
        self,
        compute: Callable[..., Features],
        params: dict[str, Any],
        rows: dict[int, Features] | None,
        sharding: NamedSharding,
    ) -> None:
        self._compute, self._params, self._sharding = compute, params, sharding
        self._keep, self._rows = rows is not None, {} if rows is None else rows

    def __call__(self, batch: Batch, count: int) -> Features:
        """Features of a batch, on devices."""
        ids = batch.row_ids.tolist()
        if not all(i in self._rows for i in ids):
            found = self._compute(self._params, put_rows(batch.tokens, self._sharding, count))
            if self._keep:
                host = jax.tree.map(np.asarray, found)
                for at, i in enumerate(ids):
                    end = answer_end(Batch(*(part[at] for part in batch)))
                    self._rows[i] = jax.tree.map(lambda a, p=at, e=end: a[p, :e].copy(), host)
            return found
        S = batch.tokens.shape[1]
        rows = [jax.tree.map(lambda a: np.pad(a, ((0, S - len(a)), (0, 0))), self._rows[i]) for i in ids]
        return put_rows(jax.tree.map(lambda *a: np.stack(a), *rows), self._sharding, count)


class FeatureFiles:
    """The arrays of a folder. Opening makes what is missing; a row is there when its shard is.

    Args:
        contract: all that a feature depends on, and `rows`, `seq_len`, `dtype`, `width` (of a token's taps),
            `hidden` (its width, or None): the shape of the arrays.
        create: else a folder without a manifest is refused.
    Raises:
        UserError: no manifest, or another contract's: the fields that differ are named.
    """

    def __init__(self, folder: str | Path, contract: dict[str, Any], create: bool) -> None:
        self._folder = place(folder)
        manifest = self._folder / MANIFEST
        contract = json.loads(json.dumps(contract))
        if manifest.is_file():
            found = json.loads(manifest.read_text())
            odd = [k for k in sorted(found | contract) if found.get(k) != contract.get(k)]
            if odd:
                what = "; ".join(f"{k}: {found.get(k)!r} there, {contract.get(k)!r} now" for k in odd)
                raise UserError(f"{folder} holds features of something else ({what}); name another folder")
        elif not create:
            raise UserError(f"{folder} has no {MANIFEST}; write it with `dscout features`")
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(manifest, json.dumps(contract, indent=1) + "\n")
        R, S, kind = contract["rows"], contract["seq_len"], contract["dtype"]
        widths = {"hidden": contract["hidden"], "taps": contract["width"]}
        self._arrays = {name: self._open(name, R, S, w, kind) for name, w in widths.items() if w is not None}

    def _store(self, name: str) -> dict[str, Any] | str:
        at = self._folder / name
        return f"{at}/" if is_remote(at) else {"driver": "file", "path": f"{at}/"}

    def _open(self, name: str, rows: int, length: int, width: int, dtype: str) -> ts.TensorStore:
        part = min(_PART, length)
        checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        cut = {"chunk_shape": [1, part, width], "codecs": checked, "index_codecs": checked}
        shard = [1, -(-length // part) * part, width]
        spec = {
            "driver": "zarr3",
            "kvstore": self._store(name),
            "metadata": {
                "shape": [rows, length, width],
                "data_type": dtype,
                "fill_value": 0.0,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
                "codecs": [{"name": "sharding_indexed", "configuration": cut}],
            },
        }
        return ts.open(spec, open=True, create=True).result()

    def finished(self) -> set[int]:
        """Rows that are there; taps are written after hidden states, so theirs decide."""
        keys = ts.KvStore.open(self._store("taps")).result().list().result()
        places = [key.decode().split("/") for key in keys]
        return {int(parts[1]) for parts in places if parts[0] == "c"}

    def write(self, places: Sequence[int], rows: Sequence[Features]) -> None:
        """Stores rows; each appears whole or not at all."""
        for name, array in self._arrays.items():
            pending = [array[at].write(getattr(row, name)) for at, row in zip(places, rows, strict=True)]
            for one in pending:
                one.result()

    def read(self, places: Sequence[int]) -> Features:
        """Rows of both arrays, stacked.

        Raises:
            UserError: a row that is damaged.
        """
        pending = {name: [array[p].read() for p in places] for name, array in self._arrays.items()}
        found: dict[str, np.ndarray | None] = {"taps": None, "hidden": None}
        for name, reads in pending.items():
            values = []
            for at, one in zip(places, reads, strict=True):
                try:
                    values.append(one.result())
                except ValueError as error:
                    shard = f"{self._folder}/{name}/c/{at}"
                    raise UserError(
                        f"{shard} is damaged ({str(error).splitlines()[0][:160]}); delete it and run "
                        "`dscout features` again"
                    ) from None
            found[name] = np.stack(values)
        return Features(**found)


class StoredFeatures:
    """`FeatureStore` over files.

    Args:
        places: row id -> row of the arrays.
    Raises:
        UserError: rows are missing.
    """

    def __init__(self, files: FeatureFiles, places: dict[int, int], sharding: NamedSharding) -> None:
        missing = len(set(places.values()) - files.finished())
        if missing:
            said = f"{missing} of {len(places)} rows have no features yet"
            raise UserError(f"{said}; run `dscout features` again")
        self._files, self._places, self._sharding = files, places, sharding

    def __call__(self, batch: Batch, count: int) -> Features:
        """Features of a batch, on devices."""
        rows = self._files.read([self._places[i] for i in batch.row_ids.tolist()])
        return put_rows(rows, self._sharding, count)
