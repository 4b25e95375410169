"""Workloads: JSONL files of conversations, folders of them, datasets of Hugging Face; and samples of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import read_jsonl

HUB = "hf:"
"""Stands before a dataset's name: hf:NAME[:SPLIT[:COLUMN]]."""

Turns = tuple[str, ...]
"""What a user says, turn by turn; the model's answers stand between them."""


def load_workloads(sources: Sequence[str | Path]) -> dict[str, list[Turns]]:
    """Conversations of each workload by its name: a file's stem, a dataset's last word.

    Args:
        sources: JSONL files of {"turns": [...]}; folders: every *.jsonl in them, a workload each;
            "hf:NAME[:SPLIT[:COLUMN]]", NAME being OWNER/DATASET or OWNER/DATASET/CONFIGURATION; default the
            split `test` and the column `turns`.
    Raises:
        UserError: what cannot be read, has no conversation, or two workloads of one name.
    """
    found: dict[str, list[Turns]] = {}
    for name, read in _named(sources):
        if name in found:
            raise UserError(f"two workloads are called {name!r}; rename a file, or measure them apart")
        found[name] = read()
        if not found[name]:
            raise UserError(f"{name}: no conversation in it")
    if not found:
        raise UserError("name one or more workloads: a JSONL file, a folder of such, or hf:NAME")
    return found


def _named(sources: Sequence[str | Path]) -> Iterable[tuple[str, Any]]:
    for source in map(str, sources):
        if source.startswith(HUB):
            name, split, column = _parse(source)
            yield name.split("/")[1 if "/" in name else 0], lambda a=(name, split, column): _hub(*a)
        elif Path(source).is_dir():
            files = sorted(Path(source).glob("*.jsonl"))
            if not files:
                raise UserError(f"{source} holds no *.jsonl")
            yield from ((file.stem, lambda f=file: read_turns(f)) for file in files)
        else:
            yield Path(source).stem, lambda s=source: read_turns(s)


def read_turns(path: str | Path) -> list[Turns]:
    """The conversations of a JSONL of {"turns": [...]}. Raises UserError for a row without turns."""
    return [_turns(row.get("turns"), f"{path}: row {number}") for number, row in enumerate(read_jsonl(path))]


def first_turns(path: str | Path) -> list[str]:
    """What each row of such a JSONL asks first. Raises UserError as `read_turns`."""
    return [turns[0] for turns in read_turns(path)]


def _turns(value: Any, where: str) -> Turns:
    if not (isinstance(value, list | tuple) and value and all(isinstance(turn, str) for turn in value)):
        raise UserError(f'{where} lacks "turns": ["text", ...]')
    return tuple(value)


def order(count: int, seed: int | None) -> list[int]:
    """Row numbers as they are asked: as they stand, or shuffled by a seed; a sample is the first of them."""
    return list(range(count)) if seed is None else np.random.default_rng(seed).permutation(count).tolist()


def _parse(source: str) -> tuple[str, str, str]:
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise UserError(f"{source!r} is not hf:NAME[:SPLIT[:COLUMN]]")
    return name, *(
        given or default for given, default in zip((*rest, "", "")[:2], ("test", "turns"), strict=True)
    )


def _hub(name: str, split: str, column: str) -> list[Turns]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{HUB}{name} needs the extra `datasets`: pip install 'dscout-jax[datasets]'"
        ) from None
    owner, *more = name.split("/")
    repository = "/".join([owner, *more[:1]])
    try:
        rows = datasets.load_dataset(repository, *more[1:], split=split)
    except Exception as error:  # the hub's client has errors of its own, and its HTTP library's
        raise UserError(
            f"{HUB}{name}: no split {split!r} could be read ({type(error).__name__}: {error}); "
            "without a network, name a JSONL file instead"
        ) from error
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise UserError(f"{HUB}{name} has the columns {columns}; name one: {HUB}{name}:{split}:COLUMN")
    values = ([value] if isinstance(value, str) else value for value in rows[column])
    return [_turns(value, f"{HUB}{name}: {column} of row {number}") for number, value in enumerate(values)]
