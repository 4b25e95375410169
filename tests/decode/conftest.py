"""Tiny random models, fp32: a target whose argmax wanders, and drafters that are right when told to be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, MASK, VOCAB, bigger, oracle, puppeteer

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.decode import Decoder
from dscout_jax.models import Drafter, Target


@pytest.fixture(scope="session")
def target():
    return Target(
        TargetConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=10_000.0),
            max_position=64,
            qk_norm=True,
            tie_embeddings=False,
        )
    )


@pytest.fixture(scope="session")
def drafter(target):
    shapes = dict(num_layers=2, block_size=BLOCK_MAX, mask_token_id=MASK, target_layer_ids=(0, 1))
    return Drafter(DrafterConfig.for_target(target.config, **shapes))


@pytest.fixture(scope="session")
def target_params(target):
    return bigger(target.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"])


@pytest.fixture(scope="session")
def drafter_params(drafter):
    c = drafter.config
    taps = jnp.zeros((1, 4, len(c.target_layer_ids) * c.hidden_size))
    block = jnp.zeros((1, 1, c.block_size, c.hidden_size))
    return bigger(drafter.init(jax.random.key(1), taps, block, jnp.ones((1, 1), jnp.int32))["params"])


@pytest.fixture(scope="session")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB - 1, n).tolist() for n in (5, 1, 9, 14)]


@pytest.fixture(scope="session")
def build(target, target_params):
    """build(drafter, params, **options) -> Decoder with one prompt bucket and one capacity."""

    def run(drafter=None, params=None, **options):
        buckets = dict(bucket=16, capacity_bucket=CAPACITY)
        return Decoder(target, target_params, drafter, params, **buckets | options)

    return run


@pytest.fixture(scope="session")
def plain(build):
    return build()


@pytest.fixture(scope="session")
def answers(plain, prompts):
    """Plain greedy answers, ANSWER tokens each; shorter budgets and stops are prefixes of them."""
    return [g.tokens for g in plain.generate(prompts, ANSWER)]


@pytest.fixture(scope="session")
def puppet(build, drafter, drafter_params, prompts, answers):
    """play(right) -> a speculative decoder whose proposals are as right as it says."""
    return puppeteer(build(drafter, drafter_params, draft=oracle), prompts, answers)
