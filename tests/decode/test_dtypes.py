"""Narrow numbers: a bf16 cache, and the mode in which bf16 tokens are plain decoding's bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS, check, oracle, puppeteer

from dscout_jax.decode import Decoder
from dscout_jax.models import Drafter, Target


@pytest.fixture(scope="module")
def mixed():
    """Right slots a round: all, some or none."""
    return np.random.default_rng(5).integers(0, BLOCK_MAX, (ROWS, CAPACITY))


def test_a_bf16_cache_under_fp32_products(mixed, build, drafter, drafter_params, prompts):
    plain = build(cache_dtype=jnp.bfloat16)
    answers = [g.tokens for g in plain.generate(prompts, ANSWER)]
    decoder = build(drafter, drafter_params, draft=oracle, cache_dtype=jnp.bfloat16)
    play = puppeteer(decoder, prompts, answers)
    state, _ = play(mixed).prefill(decoder.requests(prompts, ANSWER))
    assert {x.dtype for x in jax.tree.leaves((state.target, state.context))} == {jnp.dtype(jnp.bfloat16)}
    assert decoder.target.dtype == decoder.drafter.dtype == jnp.float32
    for generation, answer in zip(play(mixed).generate(prompts, ANSWER), answers, strict=True):
        check(generation, answer, ANSWER)
        assert len(set(generation.accepted)) > 2


def test_bf16_tokens_are_those_of_plain_decoding_of_one_shape(
    mixed, target, target_params, drafter, drafter_params, prompts
):
    narrow = [jax.tree.map(lambda w: w.astype(jnp.bfloat16), p) for p in (target_params, drafter_params)]
    models = Target(target.config, jnp.bfloat16), narrow[0], Drafter(drafter.config, jnp.bfloat16), narrow[1]
    decoder = Decoder(*models, draft=oracle, bucket=16, capacity_bucket=CAPACITY)
    answers = [g.tokens for g in decoder.plain_like().generate(prompts, ANSWER)]
    play = puppeteer(decoder, prompts, answers)
    backend = jax.default_backend()
    for live_slots in (None, 1):
        generations = play(mixed).generate(prompts, ANSWER, live_slots=live_slots)
        for row, (generation, answer) in enumerate(zip(generations, answers, strict=True)):
            assert generation.tokens == answer, (
                f"bf16 kernels of {backend} depend on more than their shape ({BLOCK_MAX} rows of a "
                f"product): row {row}, live_slots {live_slots}"
            )
            assert live_slots == 1 or len(set(generation.accepted)) > 2
