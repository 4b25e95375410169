"""What the decoding tests share: sizes, an oracle that drafts on command, and the losslessness check."""

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decode import Proposals

VOCAB, MASK, BLOCK_MAX, ROWS, CAPACITY, ANSWER = 64, 63, 6, 4, 64, 24


def bigger(params):
    """Weights ten times the usual size: the argmax then depends on the text, not only on the last id."""
    return jax.tree.map(lambda w: w * 10 if w.ndim == 2 else w, params)


def oracle(block_size):
    """Drafts from a table: the true answer for `right[row, position]` slots, then something wrong.

    The table is an argument, so one compiled program plays every adversary.
    """

    def draft(weights, state):
        table = weights.drafter["oracle"]
        slots = jnp.arange(1, block_size)
        at = state.lengths[:, None] + slots
        B = at.shape[0]
        true = jnp.take_along_axis(table["answers"][:B], jnp.minimum(at, CAPACITY - 1), axis=1)
        right = jnp.take_along_axis(table["right"][:B], state.lengths[:, None], axis=1)
        ids = jnp.where(slots <= right, true, (true + 1) % VOCAB)
        sure = jnp.take_along_axis(table["sure"][:B], jnp.minimum(at, CAPACITY - 1), axis=1)
        return Proposals(ids, sure)

    return draft


def puppeteer(decoder, prompts, answers):
    """play(right, sure, order) for a decoder that drafts by `oracle`.

    right: right slots a round, broadcast to [ROWS, CAPACITY] by position of the anchor. sure: confidence in
    the draft for each position, likewise. order: which prompt each row of the batch is.
    """
    table = np.zeros((ROWS, CAPACITY), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        table[row, : len(prompt) + ANSWER] = prompt + answer
    params = decoder.weights.drafter

    def play(right, sure=1.0, order=range(ROWS)):
        rows = [*order] + [0] * (ROWS - len(order))
        right = np.broadcast_to(right, table.shape).astype(np.int32)
        sure = np.broadcast_to(sure, table.shape).astype(np.float32)
        puppet = params | {"oracle": {"answers": table[rows], "right": right, "sure": sure}}
        decoder.weights = decoder.weights._replace(drafter=puppet)
        return decoder

    return play


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
