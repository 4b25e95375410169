"""Folders that appear whole or not at all."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_folder(folder: str | Path, replace: bool = True) -> Iterator[Path]:
    """Yields an empty folder beside `folder`; it takes that name when the block ends without an error.

    Args:
        folder: the final name. Whether an older one may go is the caller's to check.
        replace: False keeps a `folder` that another process finished meanwhile and drops this one.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:12]
    part, old = (folder.with_name(f".{folder.name}.{mark}.{kind}") for kind in ("part", "old"))
    part.mkdir()
    try:
        yield part
        if not folder.exists():
            part.rename(folder)
        elif replace:
            folder.rename(old)
            try:
                part.rename(folder)
            except OSError:
                old.rename(folder)
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
