"""Commands that carry drafters and targets from one format to another."""

import dataclasses
from pathlib import Path
from typing import Literal

from dscout_jax.cli.common import Dtype, Word, dtype_of


@dataclasses.dataclass
class Export:
    """Writes a run's checkpoint as a DFlash folder, which serving engines load."""

    run: Word[str]
    """Folder of a training run, or of `dscout import`; a bucket (gs://...) too."""
    out: Word[str]
    """The new folder, on a local disk; an earlier export of that name is replaced."""
    step: int | Literal["best"] | None = None
    """Of the checkpoint; "best": the one with the highest MAT on held-out rows. Default: the newest."""
    dtype: Dtype | Literal["float16"] | None = None
    """Default: bfloat16, and of an imported drafter what it came in."""

    def __call__(self) -> None:
        from train.export import export

        dtype = None if self.dtype is None else dtype_of(self.dtype)
        print(f"drafter: {export(self.run, self.out, self.step, dtype)}")


@dataclasses.dataclass
class Import:
    """Makes a run of a DFlash folder: an Orbax checkpoint to start a training from, or to decode with."""

    drafter: Word[str]
    run: Word[str]
    """The new run folder; both are on a local disk."""

    def __call__(self) -> None:
        from train.export import import_drafter

        print(f"run: {import_drafter(self.drafter, self.run)}")


@dataclasses.dataclass
class Convert:
    """Writes a target as an Orbax checkpoint, or such a checkpoint back as its Hugging Face folder."""

    source: Word[str]
    """A Hugging Face folder, the embedded smollm2-135m, or what `dscout convert` wrote; this one may lie in
    a bucket (gs://...)."""
    out: Word[str]
    """The new folder; of an Orbax checkpoint it may lie in a bucket too."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from train.convert import convert

        print(f"target: {convert(self.source, self.out, self.cache_dir)}")
