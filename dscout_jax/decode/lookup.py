"""Drafts without a drafter: what followed the last few tokens when they stood in the text before."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dscout_jax.decode.draft import NO_TOKEN, Draft
from dscout_jax.decode.sampling import Proposals
from dscout_jax.decode.state import DecodeState, Weights


def lookup_draft(block_size: int, longest: int = 3, shortest: int = 1) -> Draft:
    """Prompt lookup: continues the earlier place whose ending agrees best with the text's.

    Among earlier positions e of prompt and answer, the one is taken where most tokens up to e (at most
    `longest`, at least `shortest`) equal those up to the anchor; of equals the latest. Proposals go on after
    e, and round again from there when they reach the anchor: a text in a loop is taken to stay in it. Where
    there is no such place, nothing is proposed.
    """

    def draft(weights: Weights, state: DecodeState) -> Proposals:
        tokens_BxS, anchors_Bx1 = state.tokens, state.lengths[:, None]
        B, S = tokens_BxS.shape
        places = jnp.arange(S)
        agree_BxS = jnp.ones((B, S), bool)
        length_BxS = jnp.zeros((B, S), jnp.int32)
        for back in range(longest):
            # tokens[e - back] against tokens[anchor - back]; before the text's start nothing agrees.
            shifted = jnp.pad(tokens_BxS, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, :S]
            last = jnp.take_along_axis(tokens_BxS, jnp.maximum(anchors_Bx1 - back, 0), axis=1)
            agree_BxS &= shifted == last
            length_BxS += agree_BxS
        rank_BxS = jnp.where(places < anchors_Bx1, length_BxS * S + places, -1)
        best_Bx1 = rank_BxS.argmax(axis=1, keepdims=True)
        found_Bx1 = jnp.take_along_axis(length_BxS, best_Bx1, axis=1) >= shortest
        ahead_BxW1 = best_Bx1 + 1 + jnp.arange(block_size - 1) % (anchors_Bx1 - best_Bx1)
        guess_BxW1 = jnp.take_along_axis(tokens_BxS, ahead_BxW1, axis=1)
        confidence = jnp.broadcast_to(found_Bx1, guess_BxW1.shape).astype(jnp.float32)
        return Proposals(jnp.where(found_Bx1, guess_BxW1, NO_TOKEN), confidence)

    return draft


def lookup_or(draft: Callable[[int], Draft], shortest: int = 4, longest: int = 8) -> Callable[[int], Draft]:
    """Copies where at least `shortest` tokens agree with an earlier place, and drafts elsewhere.

    A drafter of a few layers is slow to learn what a text that repeats itself gives away for nothing. A round
    in which every live row copies does not run the drafter at all.

    Args:
        draft: makes the other source of proposals, of a block size; its ids are taken as certain.
    """

    def make(block_size: int) -> Draft:
        copy, other = lookup_draft(block_size, longest, shortest), draft(block_size)

        def both(weights: Weights, state: DecodeState) -> Proposals:
            copied = copy(weights, state)
            copies_Bx1 = copied.ids[:, :1] != NO_TOKEN
            drafted = jax.lax.cond(
                (copies_Bx1[:, 0] | ~state.live).all(),
                lambda: copied,
                lambda: other(weights, state)._replace(probs=None),
            )
            return jax.tree.map(lambda a, b: jnp.where(copies_Bx1, a, b), copied, drafted)

        return both

    return make
