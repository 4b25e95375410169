"""Commands that carry drafters and targets from one format to another."""

import dataclasses
from pathlib import Path

from dscout_jax.cli.common import Dtype, Word, dtype_of


@dataclasses.dataclass
class Export:
    """Writes a run's checkpoint as a DFlash folder, which serving engines load."""

    run: Word[Path]
    """Folder of a training run, or of `dscout import`."""
    out: Word[Path]
    """The new folder; an earlier export of that name is replaced."""
    step: int | None = None
    """Default: the newest checkpoint."""
    dtype: Dtype = "bfloat16"

    def __call__(self) -> None:
        from train.export import export

        print(f"drafter: {export(self.run, self.out, self.step, dtype_of(self.dtype))}")


@dataclasses.dataclass
class Import:
    """Makes a run of a DFlash folder: an Orbax checkpoint to start a training from, or to decode with."""

    drafter: Word[Path]
    run: Word[Path]
    """The new run folder."""

    def __call__(self) -> None:
        from train.export import import_drafter

        print(f"run: {import_drafter(self.drafter, self.run)}")


@dataclasses.dataclass
class Convert:
    """Writes a target as an Orbax checkpoint, or such a checkpoint back as its Hugging Face folder."""

    source: Word[str]
    """A Hugging Face folder, the embedded smollm2-135m, or what `dscout convert` wrote."""
    out: Word[str]
    """The new folder."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from train.convert import convert

        print(f"target: {convert(self.source, self.out, self.cache_dir)}")
