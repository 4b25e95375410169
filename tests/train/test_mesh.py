"""Replicated, FSDP and tensor runs on 8 devices give the losses and gradients of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.models import Drafter, StackedTarget, Target, stack_layers, target_head
from dscout_jax.objective import Objective
from dscout_jax.objective.inclusion import mixed
from dscout_jax.objective.prediction import ce, mixture, soft_ce
from dscout_jax.objective.weighting import awl
from dscout_jax.sharding import BATCH, make_mesh, named, shardings
from train.settings import TrainSettings
from train.step import Frozen, first_state, frozen_specs, make_features, make_optimizer, make_step

CONFIG = TargetConfig(48, 32, 64, 5, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, True, False, (1,))
SHAPE = DrafterConfig.for_target(
    CONFIG, num_layers=2, block_size=4, mask_token_id=47, target_layer_ids=(2, 0)
)
S = 24
# A loss with every part: weights, the target's distribution, unequal counts of included slots.
SETTINGS = TrainSettings(
    objective=Objective(
        "all", mixed((2, 4)), weighting=awl(), prediction=mixture([(0.5, ce), (0.5, soft_ce)])
    ),
    data="",
    run="",
    block_size=4,
    seq_len=S,
    batch=16,
    num_anchors=4,
    steps=10,
    init="fresh",
    chunk=16,
)


def batch():
    rng = np.random.default_rng(0)
    answer = np.arange(S) >= rng.integers(2, S - 2, 16)[:, None]
    answer[2:4] = False  # all that one of eight devices has
    return rng.integers(2, 46, (16, S)).astype(np.int32), answer, np.arange(16, dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    found = Target(CONFIG).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    return jax.tree.map(lambda w: w * 5 if w.ndim == 2 else w, found)


def one_step(params, mesh=None, settings=SETTINGS, seen=False):
    """(features, metrics, gradients) of a first step; Adam's first moment is a tenth of the gradient."""
    optimizer = make_optimizer(settings)
    drafter = Drafter(SHAPE, remat=settings.remat, scan=settings.scan_layers)
    state = first_state(settings, SHAPE, params, optimizer)
    frozen = Frozen(params["embed_tokens"], target_head(params))
    if seen:
        ids = jnp.arange(2, 47)
        frozen = Frozen(params["embed_tokens"], frozen.head[ids], ids, jnp.maximum(jnp.arange(48) - 2, 0))
    target = Target(CONFIG)
    if settings.scan_layers:
        target, params = StackedTarget(CONFIG, CONFIG.num_layers), stack_layers(params, CONFIG.num_layers)
    arrays = batch()
    if mesh is not None:
        state = jax.device_put(state, shardings(state, mesh))
        frozen = jax.device_put(frozen, named(frozen_specs(frozen, mesh), mesh))
        params = jax.device_put(params, shardings(params, mesh))
        arrays = jax.device_put(arrays, NamedSharding(mesh, BATCH))
    features = make_features(target, drafter, True, mesh)(params, arrays[0])
    step = make_step(drafter, settings, optimizer, mesh)
    state, metrics = step(state, frozen, settings.seed, 0.5, features, *arrays)
    return features, metrics, jax.tree.map(lambda m: 10 * m, state.opt_state[1].mu), state


@pytest.fixture(scope="module")
def alone(params):
    return one_step(params)


def check(found, alone):
    for one, other in zip(found[:3], alone[:3], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, other)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((8, 1, 1), {}),
        ((1, 8, 1), {"remat": "all", "attention_chunk": 2}),
        ((2, 2, 2), {"remat": "layer", "attention_chunk": 2, "scan_layers": True, "accumulation": 2}),
    ],
)
def test_meshes_give_one_devices_losses_and_gradients(params, alone, sizes, options):
    mesh = make_mesh(*sizes)
    found = one_step(params, mesh, dataclasses.replace(SETTINGS, **options))
    assert float(alone[1]["grad_norm"]) > 0.1
    check(found, alone)
    for leaf, like in zip(jax.tree.leaves(found[3]), jax.tree.leaves(shardings(found[3], mesh)), strict=True):
        assert leaf.sharding.is_equivalent_to(like, leaf.ndim)


def test_a_reduced_vocabulary_on_a_mesh(params):
    check(one_step(params, make_mesh(1, 4, 2), seen=True), one_step(params, seen=True))
