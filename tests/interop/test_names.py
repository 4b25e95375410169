"""Names are one rule in both directions, and cover what the models really hold."""

import jax
import jax.numpy as jnp
import pytest
from interop_tools import drafter_config, target_config

from dscout_jax.interop import names
from dscout_jax.models import Drafter, Target


@pytest.mark.parametrize(
    "path, name",
    [
        ("embed_tokens/weight", "model.embed_tokens.weight"),
        ("layers_12/self_attn/q_norm/weight", "model.layers.12.self_attn.q_norm.weight"),
        ("norm/weight", "model.norm.weight"),
        ("lm_head/weight", "lm_head.weight"),
    ],
)
def test_examples_both_ways(path, name):
    assert names.to_hf(path) == name
    assert names.from_hf(name) == path


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_target_shapes_are_the_models(qk_norm, tied):
    config = target_config(qk_norm=qk_norm, tie_embeddings=tied)
    tree = jax.eval_shape(Target(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    shapes = names.target_shapes(config)
    assert {path: leaf.shape for path, leaf in names.flatten(tree).items()} == shapes
    assert all(names.from_hf(names.to_hf(path)) == path for path in shapes)
    assert names.flatten(names.nest(shapes)) == shapes


def test_drafter_shapes_are_the_models_and_count_11_per_layer_plus_3():
    config = drafter_config()
    taps = jnp.zeros((1, 5, 2 * config.hidden_size))
    x = jnp.zeros((1, 1, config.block_size, config.hidden_size))
    tree = jax.eval_shape(Drafter(config).init, jax.random.key(0), taps, x, jnp.ones((1, 1), jnp.int32))
    shapes = names.drafter_shapes(config)
    assert {path: leaf.shape for path, leaf in names.flatten(tree["params"]).items()} == shapes
    assert len(shapes) == 11 * config.num_layers + 3
    assert all(names.from_hf(names.to_hf(path, ""), "") == path for path in shapes)
