"""What the decoding tests share: sizes, an oracle that drafts on command, and the losslessness check."""

import jax
import jax.numpy as jnp

VOCAB, MASK, BLOCK_MAX, ROWS, CAPACITY, ANSWER = 64, 63, 6, 4, 64, 24


def bigger(params):
    """Weights ten times the usual size: the argmax then depends on the text, not only on the last id."""
    return jax.tree.map(lambda w: w * 10 if w.ndim == 2 else w, params)


def oracle(weights, state):
    """Proposals from a table: the true answer for `right[row, position]` slots, then something wrong.

    The table is an argument, so one compiled program plays every adversary.
    """
    table = weights.drafter["oracle"]
    slots = jnp.arange(1, BLOCK_MAX)
    at = state.lengths[:, None] + slots
    B = at.shape[0]
    true = jnp.take_along_axis(table["answers"][:B], jnp.minimum(at, CAPACITY - 1), axis=1)
    right = jnp.take_along_axis(table["right"][:B], state.lengths[:, None], axis=1)
    return jnp.where(slots <= right, true, (true + 1) % VOCAB)


def cut(answer, budget, stops=()):
    """What plain decoding emits of `answer` under a budget and stop ids, and why it ends."""
    for i, token in enumerate(answer[:budget]):
        if token in stops:
            return answer[: i + 1], "stop"
    return answer[:budget], "length"


def check(generation, answer, budget, stops=()):
    """Token for token the plain answer, and every token accounted for by a round."""
    assert (generation.tokens, generation.finish) == cut(answer, budget, stops)
    assert sum(a + 1 for a in generation.accepted) + 1 == len(generation.tokens)
