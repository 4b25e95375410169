"""`dscout features`: the target's features of all rows, once, for every training that asks the same of it."""

import sys
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from train.dataset import Batch, stack
from train.features import FeatureFiles, answer_end
from train.hosts import barrier, first, own_rows, put_rows
from train.prepare import prepare
from train.settings import TrainSettings
from train.step import Features


def write_features(
    settings: TrainSettings,
    target: LoadedTarget | None = None,
    yes: bool = False,
    cache_dir: str | Path | None = None,
) -> str:
    """Writes what is missing of `settings.features`; a run that was killed goes on where it stopped.

    Args:
        target, cache_dir: as in `prepare`.
        yes: does not ask whether the size that is printed may be written.
    Returns:
        The folder.
    Raises:
        UserError: before anything is written, for a config without `features` or a folder that holds others;
            or the answer was no.
    """
    if settings.features is None:
        raise UserError("the config names no folder for features; set features='FOLDER'")
    # Features need no weights by name: where layers are scanned, they would be a second copy.
    ready = prepare(settings, target, cache_dir)._replace(weights={})
    rows: list[Batch] = sorted([*ready.rows.train, *ready.rows.heldout], key=lambda row: int(row.row_ids))
    contract = ready.features_contract(settings)
    size = jax.numpy.dtype(settings.dtype).itemsize * (contract["width"] + (contract["hidden"] or 0))
    tokens = sum(answer_end(row) for row in rows)
    said = f"{len(rows)} rows, {tokens} tokens: {tokens * size / 1e9:.2f} GB in {settings.features}"
    if first():
        print(said, flush=True)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"{said}: say --yes to write that much")
        if input("write it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UserError("nothing was written")
    if first():
        files = FeatureFiles(settings.features, contract, create=True)
    barrier("features")
    if not first():
        files = FeatureFiles(settings.features, contract, create=False)
    done = files.finished()
    barrier("finished")
    todo = [place for place in range(len(rows)) if place not in done]
    own = own_rows(ready.split, settings.batch)
    for begin in tqdm(range(0, len(todo), settings.batch), desc="features", disable=None):
        group = todo[begin : begin + settings.batch]
        padded = group + [group[-1]] * (settings.batch - len(group))
        local = stack([rows[padded[i]] for i in own])
        found = ready.compute(ready.params, put_rows(local.tokens, ready.split, settings.batch))
        files.write(*_own(found, padded, len(group), rows))
    barrier("written")
    return settings.features


def _own(
    found: Features, places: list[int], count: int, rows: list[Batch]
) -> tuple[list[int], list[Features]]:
    """(places, features) of the first `count` rows, of those that this process holds; zeros past the end."""
    held: dict[int, dict[str, np.ndarray]] = {}
    for name, value in found._asdict().items():
        for shard in [] if value is None else value.addressable_shards:
            begin = shard.index[0].start or 0
            for i, row in enumerate(np.asarray(shard.data)):
                # Several devices hold the same row where an axis of the mesh does not split rows.
                if begin + i < count and name not in held.setdefault(begin + i, {}):
                    kept = row.copy()
                    kept[answer_end(rows[places[begin + i]]) :] = 0
                    held[begin + i][name] = kept
    features = [Features(parts["taps"], parts.get("hidden")) for parts in held.values()]
    return [places[i] for i in held], features
