"""Prompt files: one JSON object a line, `{"turns": [...]}`."""

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any

from dscout_jax.errors import UserError

BUILTIN = {"quickstart": "prompts.jsonl", "heldout": "heldout.jsonl"}


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All rows; lines end at "\\n" only, since texts may hold other separators.

    Raises:
        UserError: no such file, or a line that is no JSON object, with its number.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} is no file")
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is no JSON object")
        rows.append(row)
    return rows


def builtin_path(name: str) -> Path:
    """The file of a shipped set of prompts."""
    return Path(str(resources.files("train") / "data" / BUILTIN[name]))


def load_prompts(source: str | Path) -> list[tuple[str, list[str]]]:
    """(id, user turns) of every prompt of a file, or of the shipped "quickstart" and "heldout" sets.

    Rows without an id get one made from their text. Rows whose id occurred before are refused.
    """
    if str(source) in BUILTIN:
        source = builtin_path(str(source))
    prompts: dict[str, list[str]] = {}
    for number, row in enumerate(read_jsonl(source), 1):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
            raise UserError(f'{source}: row {number} needs "turns": a list of one or more texts')
        text = "\n".join(turns)
        name = str(row.get("id") or hashlib.sha256(text.encode()).hexdigest()[:16])
        if name in prompts:
            raise UserError(f"{source}: id {name!r} occurs twice (row {number})")
        prompts[name] = turns
    if not prompts:
        raise UserError(f"{source} holds no prompts")
    return list(prompts.items())
