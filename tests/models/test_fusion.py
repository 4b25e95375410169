"""Softmax fusion: its formula, what it may see, that it learns, and that its folder is told from DFlash's."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.initialise import init_drafter
from dscout_jax.interop import load_drafter, names, save_drafter
from dscout_jax.models import Drafter
from dscout_jax.sharding import make_mesh, shardings

TARGET = TargetConfig(32, 16, 24, 6, 2, 1, 8, 1e-6, RopeConfig(1e4), 64, True, True, (1,))
CONFIG = DrafterConfig.for_target(
    TARGET, num_layers=2, block_size=3, mask_token_id=31, target_layer_ids=(0, 2, 4), fusion="softmax"
)
C, D, S, W = 3, 16, 7, 3
ANCHORS = jnp.array([[2, 5]])


@pytest.fixture(scope="module")
def params():
    made = init_drafter(CONFIG, jax.random.key(0))
    for i in range(CONFIG.num_layers):
        made[f"layers_{i}"]["fusion"]["weight"] = jnp.array([0.5, -1.0, 2.0]) * (i + 1)
    return jax.tree.map(lambda w: w * 10 if w.ndim == 2 else w, made)


@pytest.fixture(scope="module")
def inputs():
    taps, x = jax.random.split(jax.random.key(1))
    # Streams of very unlike size, as real ones are.
    scale = jnp.repeat(jnp.array([1.0, 30.0, 1000.0]), D)
    return jax.random.normal(taps, (1, S, C * D)) * scale, jax.random.normal(x, (1, 2, W, D))


def test_the_context_is_the_weighted_mean_of_even_features(params, inputs):
    got = np.asarray(Drafter(CONFIG).apply({"params": params}, inputs[0], method="context"))
    taps = np.asarray(inputs[0][0]).reshape(S, C, D)
    for s in range(S):
        for i in range(CONFIG.num_layers):
            logits = np.asarray(params[f"layers_{i}"]["fusion"]["weight"])
            share = np.exp(logits) / np.exp(logits).sum()
            mean = sum(p * x / np.sqrt((x * x).mean() + 1e-6) for p, x in zip(share, taps[s], strict=True))
            np.testing.assert_allclose(got[0, s, i], mean / np.sqrt((mean * mean).mean() + 1e-6), atol=1e-5)


def test_it_sees_before_the_anchor_only_and_every_weight_learns(params, inputs):
    def blocks(params, taps):
        hidden = Drafter(CONFIG).apply({"params": params}, taps, inputs[1], ANCHORS)
        return jnp.square(hidden).sum((0, 2, 3)) + hidden[..., 0].sum((0, 2))

    by_params, by_taps = jax.jit(jax.jacrev(blocks, (0, 1)))(params, inputs[0])
    felt = np.abs(np.asarray(by_taps)).sum((1, 3))
    np.testing.assert_array_equal(felt > 0, np.arange(S) < np.asarray(ANCHORS)[0][:, None])
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(by_params))


def test_context_computed_ahead_equals_context_computed_along(params, inputs):
    drafter = Drafter(CONFIG)

    @jax.jit
    def both_ways(params, taps, x):
        variables = {"params": params}
        ctx = drafter.apply(variables, taps, method="context")
        # In two pieces, as decoding extends it.
        pieces = [
            drafter.apply(variables, ctx[:, a:b], jnp.arange(a, b)[None], method="context_kv")
            for a, b in ((0, 3), (3, S))
        ]
        cache = jax.tree.map(lambda *p: jnp.concatenate(p, axis=2), *pieces)
        ahead = drafter.apply(variables, x, ANCHORS, cache, method="block")
        return ahead, drafter.apply(variables, taps, x, ANCHORS)

    np.testing.assert_allclose(*both_ways(params, *inputs), atol=1e-5)


def test_the_targets_last_tapped_layer_comes_first():
    target = {"layers_5": {}, "norm": {}}
    made = init_drafter(dataclasses.replace(CONFIG, num_layers=1), jax.random.key(0), target, "target")
    share = jax.nn.softmax(made["layers_0"]["fusion"]["weight"])
    np.testing.assert_allclose(share, [0.05, 0.05, 0.9], atol=1e-6)


def test_its_folder_is_told_from_dflashs(tmp_path, params):
    shapes = names.drafter_shapes(CONFIG)
    assert len(shapes) == 12 * CONFIG.num_layers + 2
    assert jax.tree.map(jnp.shape, params) == names.nest(shapes)
    assert len(jax.tree.leaves(shardings(params, make_mesh()))) == len(shapes)
    folder = save_drafter(tmp_path / "soft", CONFIG, params, dtype=np.float32)
    assert load_file(folder / "model.safetensors")["layers.1.fusion.weight"].tolist() == [1.0, -2.0, 4.0]
    config, loaded = load_drafter(folder)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    raw = json.loads((folder / "config.json").read_text())
    # No engine that serves DFlash takes it for one.
    assert raw["architectures"] == ["DScoutDraftModel"] and "auto_map" not in raw
    text = (folder / "README.md").read_text()
    assert "do not serve it" in text and "vllm serve" not in text and "launch_server" not in text

    def refused(reason, **changes):
        (folder / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(UserError, match=reason):
            load_drafter(folder)

    refused("is not DScoutDraftModel", architectures=["DFlashDraftModel"])
    nested = raw["dflash_config"]
    dense = {k: v for k, v in nested.items() if k != "fusion"}
    refused("is not DFlashDraftModel", dflash_config=dense)
    refused("missing tensors: fc.weight", dflash_config=dense, architectures=["DFlashDraftModel"])
    refused("'gated' is not implemented", dflash_config=nested | {"fusion": "gated"})
    with pytest.raises(UserError, match="'gated' is not implemented"):
        dataclasses.replace(CONFIG, fusion="gated")
