"""One JSON object a line, appended as measured, so that a killed run goes on where it was."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dscout_jax.errors import UserError


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, split at newlines only: texts may hold other line separators.

    Raises:
        UserError: no such file, or a line that is no JSON object.
    """
    if not path.is_file():
        raise UserError(f"{path} is no file; name a JSONL of prompts")
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is no JSON object")
        yield row


class Records:
    """Measured rows of a file; those of another setup are kept there but not seen."""

    def __init__(self, path: Path, setup: str) -> None:
        self.path, self.setup = path, setup
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            whole = path.read_bytes()
            # A kill can leave half a line; it is measured again.
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
            rows = [row for row in read_jsonl(path) if row["setup"] == setup]
        else:
            rows = []
        self._rows = {tuple(row["key"]): row for row in rows}

    def __contains__(self, key: tuple) -> bool:
        return key in self._rows

    def __getitem__(self, key: tuple) -> dict[str, Any]:
        return self._rows[key]

    def add(self, key: tuple, row: dict[str, Any]) -> None:
        """Appends a row and writes it through."""
        row = {"setup": self.setup, "key": list(key), **row}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._rows[key] = row
