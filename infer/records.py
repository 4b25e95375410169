"""One JSON object a line, appended as measured, so that a killed run goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

from dscout_jax.interop.jsonl import read_jsonl


class Records:
    """Measured rows of a file; those of another setup are kept there but not seen."""

    def __init__(self, path: Path, setup: str) -> None:
        self.path, self.setup = path, setup
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            whole = path.read_bytes()
            # A kill can leave half a line; it is measured again. What is whole is never written anew.
            if (end := whole.rfind(b"\n") + 1) < len(whole):
                os.truncate(path, end)
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
