"""What an objective will ask of each slot, before any training: its inclusion and its weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax.objective.inclusion import sample_blocks
from dscout_jax.objective.presets import Objective
from dscout_jax.objective.weighting import Scores, detached


class Expected(NamedTuple):
    """Per slot [W], the anchor's first.

    included: supervised slots an answer, E[sum_b m]. weight: mean weight of a supervised slot,
    E[sum m w] / E[sum m]. share: of the loss's denominator, E[sum m w] / sum_k E[sum m w].
    """

    included: jax.Array
    weight: jax.Array
    share: jax.Array


def expected_slots(
    objective: Objective,
    *,
    block_size: int,
    num_anchors: int,
    answer_tokens: int = 256,
    acceptance: float = 0.7,
    draws: int = 256,
    seed: int = 0,
) -> Expected:
    """Expectations over sampled blocks of answers of one length.

    Args:
        answer_tokens: where they leave room for fewer anchors than `num_anchors`, the rest is unkept.
        acceptance: what the drafter is taken to reach: every slot's probability of the true token (and
            overlap with the target, and the target's own confidence), and the chance of a greedy hit.
    """
    S = max(answer_tokens, num_anchors)  # a row has room for its anchors, whatever is answered
    answer_S = jnp.arange(S) < answer_tokens

    @jax.jit
    def expected(key: jax.Array) -> Expected:
        blocks_key, hits_key = jax.random.split(key)
        blocks = sample_blocks(
            blocks_key,
            jnp.zeros((draws, S), jnp.int32),
            jnp.broadcast_to(answer_S, (draws, S)),
            jnp.arange(draws),
            num_anchors=num_anchors,
            block_size=block_size,
            mask_token_id=0,
            horizon=objective.horizon,
            unmask=objective.unmask,
        )
        a = jnp.full(blocks.mask.shape, acceptance)
        hits = jax.random.uniform(hits_key, a.shape) < acceptance
        scores = Scores(jnp.log(a), hits, blocks.mask, blocks.revealed, a, jnp.log(a))
        weights = jnp.where(blocks.mask, detached(objective.weighting, scores), 0.0)
        included, weight = blocks.mask.sum((0, 1)), weights.sum((0, 1))
        return Expected(included / draws, weight / jnp.maximum(included, 1), weight / weight.sum())

    return expected(jax.random.key(seed))
