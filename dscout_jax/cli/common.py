"""What the commands share."""

from pathlib import Path
from typing import Any, Literal

import tyro

from dscout_jax.errors import UserError

Dtype = Literal["float32", "bfloat16"]
Word = tyro.conf.Positional


def decodable(drafter: str | None) -> str | None:
    """A run's newest checkpoint as a folder; anything else as it stands.

    Raises:
        UserError: a bucket; or as `train.export.decodable`.
    """
    if drafter is None:
        return None
    folder = drafter.removesuffix("+lookup")
    # The name is train.export's; a plain folder must not wait for Orbax to be imported.
    if "://" not in folder and not (Path(folder).expanduser() / "drafter.json").is_file():
        return drafter
    from train import export

    return f"{export.decodable(folder)}{drafter.removeprefix(folder)}"


def policy_use(options: dict[str, Any]) -> Any:
    """Takes the fields of a policy from a command's and makes a PolicyUse of them; None without a file.

    Fields of sampling are left there.

    Raises:
        UserError: a field that needs a policy, without one.
    """
    from dscout_jax.decode import Sampling
    from infer.apply import PolicyUse

    file, workload, adapt, explore = (options.pop(k) for k in ("policy", "workload", "adapt", "explore"))
    if file is None:
        if workload is not None or adapt:
            raise UserError("--workload and --adapt say how to use a policy; give --policy FILE")
        return None
    draws = {k: options[k] for k in ("temperature", "top_k", "top_p", "min_p")}
    return PolicyUse(file, workload, adapt, explore, Sampling(**draws))


def dtype_of(name: str) -> Any:
    """A dtype by its name."""
    import jax.numpy as jnp

    return jnp.dtype(name)
