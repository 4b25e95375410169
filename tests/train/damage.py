"""Damage to a checkpoint, as a failing disk does it."""

from pathlib import Path


def flip(folder: Path) -> None:
    """Changes one bit in the middle of the largest data file, which Orbax loads as if nothing were.

    Every one of that size: of two copies only one is read.
    """
    files = {path: path.stat().st_size for path in folder.rglob("d/*") if path.is_file()}
    for path in (p for p, size in files.items() if size == max(files.values())):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(bytes(data))
