"""Results as JSON that people can read too."""

import json
import re
from pathlib import Path
from typing import Any

# A line ends inside brackets only where JSON's own text does, and never in a string.
_FLAT_LIST = re.compile(r"\[\n([^\[\]{}]*)\n\s*\]")


def write_document(path: str | Path, document: Any) -> None:
    """Writes indented JSON, a list of plain values on one line."""
    text = _FLAT_LIST.sub(_on_one_line, json.dumps(document, indent=1))
    Path(path).write_text(text + "\n", encoding="utf-8")


def _on_one_line(found: re.Match) -> str:
    return f"[{' '.join(line.strip() for line in found[1].splitlines())}]"
