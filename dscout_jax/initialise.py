"""Fresh drafter parameters: random, or started from the target's own last layers."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.models import Drafter

Init = Literal["target", "fresh"]


def init_drafter(
    config: DrafterConfig, key: jax.Array, target_params: dict[str, Any] | None = None, init: Init = "fresh"
) -> dict[str, Any]:
    """fp32 parameters of a drafter.

    `target` copies the last layers and the final norm of the target, and lets the fusion pass the last tapped
    layer through: the drafter then begins as a rough continuation of the target, not as noise.

    Raises:
        UserError: `target` without the target's parameters, or with layers of other shapes.
    """
    if init not in ("target", "fresh"):
        raise UserError(f"init {init!r} must be 'target' or 'fresh'")
    C, D, W = len(config.target_layer_ids), config.hidden_size, config.block_size
    shapes = (jnp.zeros((1, 2, C * D)), jnp.zeros((1, 1, W, D)), jnp.zeros((1, 1), jnp.int32))
    params = jax.jit(Drafter(config).init)(key, *shapes)["params"]
    if init == "fresh":
        return params
    if target_params is None:
        raise UserError("init 'target' needs the target's parameters")
    first = config.num_target_layers - config.num_layers
    if first < 0:
        raise UserError(
            f"init 'target' needs {config.num_layers} target layers, there are {config.num_target_layers}"
        )

    def copied(fresh, source):
        # The target may lack q_norm / k_norm (Llama): those keep their fresh ones.
        if isinstance(fresh, dict):
            return {k: copied(v, source[k]) if k in source else v for k, v in fresh.items()}
        if fresh.shape != source.shape:
            raise UserError(f"init 'target' copies {source.shape} into {fresh.shape}; use init 'fresh'")
        # A copy even in fp32: the train state is donated, and must not take the target's buffers with it.
        return jnp.array(source, jnp.float32, copy=True)

    for i in range(config.num_layers):
        params[f"layers_{i}"] = copied(params[f"layers_{i}"], target_params[f"layers_{first + i}"])
    params["norm"] = copied(params["norm"], target_params["norm"])
    if config.fusion == "fc":
        passing = jnp.zeros((D, C * D)).at[:, (C - 1) * D :].set(jnp.eye(D))
        params["fc"]["weight"] = passing + 0.1 * params["fc"]["weight"]
        return params
    # Nine tenths for the last tapped layer, the rest shared.
    favour = jnp.log(9.0 * max(C - 1, 1))
    for i in range(config.num_layers):
        params[f"layers_{i}"]["fusion"]["weight"] = jnp.zeros(C).at[-1].set(favour)
    return params
