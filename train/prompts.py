"""Prompt files: one JSON object a line, `{"turns": [...]}`."""

import hashlib
from importlib import resources
from pathlib import Path

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import parse_jsonl
from train.paths import place

BUILTIN = {"quickstart": "prompts.jsonl", "heldout": "heldout.jsonl"}


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
    file = place(source)
    if not file.is_file():
        raise UserError(f"{source} is no file")
    for number, row in enumerate(parse_jsonl(file.read_text(encoding="utf-8"), str(source)), 1):
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
