"""Inclusion: which slots of which blocks are supervised.

    m[b, k] = 1[1 <= k < H_b] 1[k not revealed] 1[a + k inside the row] 1[a + 1 .. a + k all in the answer]

The last factor asks for an unbroken answer: past a gap (another turn, another document) no decoding round
ever drafts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax.errors import UserError


class Blocks(NamedTuple):
    """What training needs of N blocks a row; every shape is static.

    anchors: [B, N] int32 positions. keep: [B, N] bool, a real block. horizons: [B, N] int32.
    revealed: [B, N, W] bool, a slot after the anchor that shows its true token.
    inputs: [B, N, W] ids shown to the drafter. labels: [B, N, W], the token at anchor + slot, 0 outside.
    mask: [B, N, W] bool, the inclusion m.
    """

    anchors: jax.Array
    keep: jax.Array
    horizons: jax.Array
    revealed: jax.Array
    inputs: jax.Array
    labels: jax.Array
    mask: jax.Array


@dataclasses.dataclass(frozen=True)
class HorizonLaw:
    """How far each block is supervised: `H` in `choices` with probabilities ~ `weights`.

    With `nested`, every anchor carries one block of each choice in place of a draw.
    """

    choices: tuple[int, ...]
    weights: tuple[float, ...]
    nested: bool = False

    def __post_init__(self) -> None:
        if not self.choices or min(self.choices) < 2:
            raise UserError(f"horizons {self.choices} must be at least 2: slot 0 is the anchor")
        if len(self.weights) != len(self.choices) or min(self.weights) <= 0:
            raise UserError(f"weights {self.weights} must be positive, one for each of {self.choices}")

    @property
    def mean(self) -> float:
        """Expected horizon: query slots a block costs."""
        return sum(h * w for h, w in zip(self.choices, self.weights, strict=True)) / sum(self.weights)

    def draw(self, key: jax.Array, count: int) -> jax.Array:
        """Horizons [count]."""
        choices = jnp.array(self.choices, jnp.int32)
        if self.nested:
            return choices[jnp.arange(count) % len(self.choices)]
        weights = jnp.array(self.weights, jnp.float32)
        return jax.random.choice(key, choices, (count,), p=weights / weights.sum())


def fixed(horizon: int) -> HorizonLaw:
    """Every block supervises all of `horizon` slots (DFlash)."""
    return HorizonLaw((horizon,), (1.0,))


def mixed(horizons: Sequence[int], weights: Sequence[float] | None = None) -> HorizonLaw:
    """Each block draws its horizon from a set, uniformly unless weighted (DScout)."""
    return HorizonLaw(tuple(horizons), tuple(weights or [1.0] * len(horizons)))


def inverse(horizons: Sequence[int]) -> HorizonLaw:
    """Horizons drawn in proportion to 1 / h: every horizon costs the same number of query slots."""
    return mixed(horizons, [1.0 / h for h in horizons])


def every(block_size: int) -> HorizonLaw:
    """Every horizon from 2 to the block size, uniformly."""
    return mixed(range(2, block_size + 1))


def nested(horizons: Sequence[int]) -> HorizonLaw:
    """One anchor carries a block of each horizon."""
    return dataclasses.replace(mixed(horizons), nested=True)


Unmask = Callable[[jax.Array, jax.Array, int], jax.Array]
"""(key, horizons [N], W) -> revealed [N, W] bool; never slot 0, never all of 1..H-1.

The horizons it is given end where the answer does, so that a block always keeps a slot to learn from.
"""


def no_unmasking(key: jax.Array, horizons_N: jax.Array, W: int) -> jax.Array:
    """Every slot after the anchor is hidden, as when decoding."""
    return jnp.zeros((horizons_N.shape[0], W), bool)


def prefix_unmasking(rho: float = 0.5, beta: float = 0.9) -> Unmask:
    """With probability rho, slots 1..l show their tokens; Pr(l) ~ beta^l for 1 <= l <= H - 2."""
    if not 0 <= rho <= 1 or not 0 < beta <= 1:
        raise UserError(f"prefix unmasking needs 0 <= rho <= 1 and 0 < beta <= 1; got {rho} and {beta}")

    def unmask(key: jax.Array, horizons_N: jax.Array, W: int) -> jax.Array:
        coin, length = jax.random.split(key)
        N = horizons_N.shape[0]
        lengths = jnp.arange(1, W)
        legal = lengths <= horizons_N[:, None] - 2
        logits = jnp.where(legal, lengths * jnp.log(beta), -jnp.inf)
        logits = jnp.where(legal.any(1, keepdims=True), logits, 0.0)
        drawn = 1 + jax.random.categorical(length, logits, axis=1)
        chosen = (jax.random.uniform(coin, (N,)) < rho) & legal.any(1)
        slots = jnp.arange(W)
        return chosen[:, None] & (slots >= 1) & (slots <= drawn[:, None])

    return unmask


def random_unmasking(rho: float = 0.5, share: float = 0.3) -> Unmask:
    """With probability rho, each slot shows its token with probability `share`; the last of H never does."""
    if not 0 <= rho <= 1 or not 0 <= share <= 1:
        raise UserError(f"random unmasking needs probabilities; got rho {rho} and share {share}")

    def unmask(key: jax.Array, horizons_N: jax.Array, W: int) -> jax.Array:
        coin, which = jax.random.split(key)
        N = horizons_N.shape[0]
        slots = jnp.arange(W)
        shown = jax.random.uniform(which, (N, W)) < share
        chosen = jax.random.uniform(coin, (N,)) < rho
        return chosen[:, None] & shown & (slots >= 1) & (slots < horizons_N[:, None] - 1)

    return unmask


def sample_blocks(
    key: jax.Array,
    tokens_BxS: jax.Array,
    answer_mask_BxS: jax.Array,
    row_ids_B: jax.Array,
    *,
    num_anchors: int,
    block_size: int,
    mask_token_id: int,
    horizon: HorizonLaw,
    unmask: Unmask = no_unmasking,
    query_budget: int | None = None,
) -> Blocks:
    """Draws the blocks of a batch.

    A position t can be an anchor when t and t + 1 lie in the answer; anchors are drawn uniformly without
    replacement. The key is folded with each row's global id, so the draw depends on (seed, step, row) and
    not on how rows are spread over devices.

    Args:
        key: of this step.
        row_ids_B: global ids of the rows.
        num_anchors: N, static; rows with fewer legal positions leave the rest unkept.
        query_budget: keeps blocks, in random order, while the sum of their horizons stays within it, so
            that recipes with unlike horizons are compared at equal cost.
    """
    if max(horizon.choices) > block_size:
        raise UserError(f"horizons {horizon.choices} exceed the block size {block_size}")
    S, W = tokens_BxS.shape[1], block_size
    repeat = len(horizon.choices) if horizon.nested else 1
    distinct = -(-num_anchors // repeat)
    if distinct > S:
        raise UserError(f"{num_anchors} anchors do not fit rows of {S} tokens; lower num_anchors")

    def one(row_id, tokens_S, answer_S):
        order, horizons_key, reveal = jax.random.split(jax.random.fold_in(key, row_id), 3)
        legal = answer_S & jnp.append(answer_S[1:], False)
        rank = jnp.where(legal, jax.random.uniform(order, (S,)), -1.0)
        best, anchors = jax.lax.top_k(rank, distinct)
        anchors = jnp.repeat(anchors, repeat)[:num_anchors].astype(jnp.int32)
        keep = jnp.repeat(best >= 0, repeat)[:num_anchors]
        horizons = horizon.draw(horizons_key, num_anchors)
        if query_budget is not None:
            keep &= jnp.cumsum(horizons) <= query_budget
        slots = jnp.arange(W)
        at = anchors[:, None] + slots
        inside = at < S
        labels = jnp.where(inside, tokens_S[jnp.minimum(at, S - 1)], 0)
        answered = jnp.where(inside, answer_S[jnp.minimum(at, S - 1)], False)
        unbroken = jnp.cumprod(answered, axis=1).astype(bool)
        revealed = unmask(reveal, jnp.minimum(horizons, unbroken.sum(axis=1)), W)
        mask = keep[:, None] & (slots >= 1) & (slots < horizons[:, None]) & ~revealed & unbroken
        inputs = jnp.where((slots == 0) | revealed, labels, mask_token_id)
        return Blocks(anchors, keep, horizons, revealed, inputs, labels, mask)

    return jax.vmap(one)(row_ids_B, tokens_BxS, answer_mask_BxS.astype(bool))
