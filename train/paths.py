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


def local_path(path: str | Path | epath.Path, what: str) -> Path:
    """An absolute path on a local disk.

    Args:
        what: can happen there alone, for the error: "answers are written".
    Raises:
        UserError: a bucket.
    """
    if is_remote(path):
        raise UserError(f"{path}: {what} on a local disk only; name a folder there and copy between the two")
    return Path(path).expanduser().absolute()


def write_whole(path: epath.Path, text: str) -> None:
    """Writes a file that is there whole or as it was: a bucket's objects are so by themselves."""
    part = path if is_remote(path) else path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    if part != path:
        part.replace(path)


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
