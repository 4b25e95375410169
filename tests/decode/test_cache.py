"""Both caches equal what a fresh forward over the emitted text gives, after any pattern of acceptance."""

import jax
import jax.numpy as jnp
import numpy as np
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, ROWS

from dscout_jax.decode import block_draft, extend_context
from dscout_jax.models import init_cache


def test_caches_and_drafts_equal_those_from_scratch(puppet, target, drafter, prompts):
    rng = np.random.default_rng(3)
    decoder = puppet(rng.integers(0, BLOCK_MAX, (ROWS, CAPACITY)))
    state, _ = decoder.prefill(decoder.requests(prompts, ANSWER))
    step, draft = jax.jit(decoder.round), jax.jit(block_draft(drafter, BLOCK_MAX))

    @jax.jit
    def from_scratch(weights, tokens):
        zeros = jnp.zeros(ROWS, jnp.int32)
        cache = init_cache(target.config, ROWS, CAPACITY)
        out = target.apply({"params": weights.target}, tokens, zeros, cache, drafter.config.target_layer_ids)
        empty = init_cache(drafter.config, ROWS, CAPACITY)
        return out.cache, extend_context(drafter, weights, empty, out.taps, zeros)

    accepted = set()
    while bool(state.live.any()):
        before = state.emitted
        state = step(decoder.weights, state)
        accepted |= set((state.emitted - before).tolist())
        cache, context = from_scratch(decoder.weights, state.tokens)
        fresh = state._replace(target=cache, context=context)
        # Positions at or past a row's length hold leftovers that nothing may see.
        held = (jnp.arange(CAPACITY) < state.lengths[:, None])[:, None, :, None]
        for a, b in zip(
            jax.tree.leaves((state.target, state.context)), jax.tree.leaves((cache, context)), strict=True
        ):
            np.testing.assert_allclose(np.where(held, a, 0), np.where(held, b, 0), atol=2e-4)
        np.testing.assert_array_equal(draft(decoder.weights, state).ids, draft(decoder.weights, fresh).ids)
    assert accepted >= set(range(1, BLOCK_MAX + 1)), "every count of accepted drafts must have occurred"
