"""Files of one JSON object a line."""

import json
from pathlib import Path
from typing import Any

from dscout_jax.errors import UserError


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All rows; lines end at "\\n" only, since texts may hold other separators.

    Raises:
        UserError: no such file, or a line that is no JSON object, with its number.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} is no file")
    return parse_jsonl(Path(path).read_text(encoding="utf-8"), str(path))


def parse_jsonl(text: str, name: str) -> list[dict[str, Any]]:
    """All rows of a text; `name` says in errors where it came from. Raises UserError as `read_jsonl`."""
    lines = enumerate(text.split("\n"), 1)
    return [parse_line(line, f"{name}:{number}") for number, line in lines if line.strip()]


def parse_line(line: str, where: str) -> dict[str, Any]:
    """One row; `where` says in errors which. Raises UserError for a line that is no JSON object."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object")
    return row
