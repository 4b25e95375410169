"""Local folders and buckets (gs://...) through one type."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from dscout_jax.errors import UserError


def is_remote(path: str | Path | epath.Path) -> bool:
    """Whether a path names a bucket."""
    return "://" in str(path)


def place(path: str | Path | epath.Path) -> epath.Path:
    """An absolute etils path.

    Raises:
        UserError: a bucket for which etils lacks its package.
    """
    found = epath.Path(path).expanduser()
    if not is_remote(found):
        return epath.Path(Path(found).absolute())
    try:
        found.exists()
    except ImportError as error:
        raise UserError(f"{path}: {error}; or mount the bucket and name the local path") from None
    return found


@contextlib.contextmanager
def local_folder(path: epath.Path) -> Iterator[Path]:
    """Yields the path itself, or a temporary folder whose files are put into the bucket at the end."""
    if not is_remote(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / path.name
        yield folder
        path.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
