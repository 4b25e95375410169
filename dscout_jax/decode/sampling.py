"""How the target's logits become tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dscout_jax import ops

Choose = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(logits [B, W, V], tokens [B, S], prompts [B], positions [B, W]) -> ids [B, W] for those positions."""


def greedy(logits_BxWxV, tokens_BxS, prompts_B, positions_BxW) -> jax.Array:
    """The argmax."""
    return ops.argmax(logits_BxWxV)


def sample(temperature: float, seed: int = 0) -> Choose:
    """Draws from softmax(logits / temperature), for plain decoding.

    A draw depends on the seed, the prompt's tokens and the position alone, so that a row's text is the same
    in any company and after any interruption.
    """

    def choose(logits_BxWxV, tokens_BxS, prompts_B, positions_BxW):
        places = jnp.arange(tokens_BxS.shape[1], dtype=jnp.uint32)
        shown = jnp.where(
            places < prompts_B[:, None].astype(jnp.uint32), tokens_BxS.astype(jnp.uint32) + 1, 0
        )
        mixed = (shown + places * jnp.uint32(0x9E3779B1)) * jnp.uint32(0x85EBCA6B) * (shown > 0)
        digest_B = (mixed ^ (mixed >> 15)).sum(axis=1, dtype=jnp.uint32)

        def one(digest, positions, logits):
            row = jax.random.fold_in(jax.random.key(seed), digest)
            keys = jax.vmap(lambda p: jax.random.fold_in(row, p))(positions)
            return jax.vmap(jax.random.categorical)(keys, logits / temperature)

        return jax.vmap(one)(digest_B, positions_BxW, logits_BxWxV).astype(jnp.int32)

    return choose
