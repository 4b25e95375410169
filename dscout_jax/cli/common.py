"""What the commands share."""

from pathlib import Path
from typing import Any, Literal

import tyro

Dtype = Literal["float32", "bfloat16"]
Word = tyro.conf.Positional


def decodable(drafter: Path | None) -> Path | None:
    """A run's newest checkpoint as a folder; anything else as it stands."""
    if drafter is None:
        return None
    folder = Path(str(drafter).removesuffix("+lookup"))
    # The name is train.export's; a plain folder must not wait for Orbax to be imported.
    if not (folder / "drafter.json").is_file():
        return drafter
    from train import export

    return Path(str(drafter).replace(str(folder), str(export.decodable(folder)), 1))


def dtype_of(name: str) -> Any:
    """A dtype by its name."""
    import jax.numpy as jnp

    return jnp.dtype(name)
