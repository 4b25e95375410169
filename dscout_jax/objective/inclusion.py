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
import numpy as np

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
    """How far each block is supervised: `H` in `choices` with frequencies ~ `weights`.

    A row's blocks share the choices out in fixed numbers, and which anchor gets which is drawn: so equal
    query budgets are equal work, and a block is computed no wider than it must. With `nested`, every anchor
    carries one block of each choice.
    """

    choices: tuple[int, ...]
    weights: tuple[float, ...]
    nested: bool = False

    def __post_init__(self) -> None:
        if not self.choices or min(self.choices) < 2:
            raise UserError(f"horizons {self.choices} must be at least 2: slot 0 is the anchor")
        if len(self.weights) != len(self.choices) or min(self.weights) <= 0:
            raise UserError(f"weights {self.weights} must be positive, one for each of {self.choices}")

    def shares(self, count: int) -> list[int]:
        """How many of `count` blocks take each choice: as near to the weights as whole numbers come."""
        wanted = np.array(self.weights) / sum(self.weights) * count
        shares = np.floor(wanted).astype(int)
        # Of equal remainders the shorter horizon's, which costs less.
        order = np.lexsort((self.choices, -np.round(wanted - shares, 9)))
        shares[order[: count - shares.sum()]] += 1
        return shares.tolist()

    def spread(self, count: int) -> np.ndarray:
        """Horizons [count] of a row's blocks, ascending. Raises UserError where a choice gets no block."""
        shares = self.shares(count)
        if not all(shares):
            raise UserError(f"{count} blocks a row are too few for each of the horizons {self.choices}")
        return np.sort(np.repeat(self.choices, shares))

    def most(self, query_budget: int) -> int:
        """The most blocks a row whose horizons sum to no more than a budget of query slots."""
        count = query_budget // min(self.choices)
        while count and np.dot(self.shares(count), self.choices) > query_budget:
            count -= 1
        return count

    def groups(self, count: int, most: int = 4) -> list[tuple[int, slice]]:
        """(width, blocks) of a row's blocks of like horizons, to be computed at the longest's width."""
        horizons = self.spread(count)
        choices = np.unique(horizons)
        parts = np.array_split(choices, min(most, len(choices)))
        ends = [0, *np.searchsorted(horizons, [part[-1] for part in parts], side="right").tolist()]
        return [(int(part[-1]), slice(*ends[i : i + 2])) for i, part in enumerate(parts)]


def fixed(horizon: int) -> HorizonLaw:
    """Every block supervises all of `horizon` slots (DFlash)."""
    return HorizonLaw((horizon,), (1.0,))


def mixed(horizons: Sequence[int], weights: Sequence[float] | None = None) -> HorizonLaw:
    """Each anchor gets a horizon of a set, equally often unless weighted (DScout)."""
    return HorizonLaw(tuple(horizons), tuple(weights or [1.0] * len(horizons)))


def inverse(horizons: Sequence[int]) -> HorizonLaw:
    """Horizons in proportion to 1 / h: every horizon costs the same number of query slots."""
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
) -> Blocks:
    """Draws the blocks of a batch.

    A position t can be an anchor when t and t + 1 lie in the answer; anchors are drawn uniformly without
    replacement. The key is folded with each row's global id, so the draw depends on (seed, step, row) and
    not on how rows are spread over devices.

    Args:
        key: of this step.
        row_ids_B: global ids of the rows.
        num_anchors: N, static; rows with fewer legal positions leave the rest unkept. Blocks lie in the order
            of `horizon.spread(N)`.
    """
    if max(horizon.choices) > block_size:
        raise UserError(f"horizons {horizon.choices} exceed the block size {block_size}")
    S, W = tokens_BxS.shape[1], block_size
    horizons_N = horizon.spread(num_anchors)
    # Which of the row's distinct anchors each block stands at.
    place_N = np.arange(num_anchors)
    if horizon.nested:
        place_N -= np.searchsorted(horizons_N, horizons_N)
    distinct = int(place_N.max()) + 1
    if distinct > S:
        raise UserError(f"{num_anchors} anchors do not fit rows of {S} tokens; lower num_anchors")

    def one(row_id, tokens_S, answer_S):
        order, places, reveal = jax.random.split(jax.random.fold_in(key, row_id), 3)
        legal = answer_S & jnp.append(answer_S[1:], False)
        rank = jnp.where(legal, jax.random.uniform(order, (S,)), -1.0)
        best, anchors = jax.lax.top_k(rank, distinct)
        # Where legal positions are few, no horizon goes short more than another.
        shuffled = jax.random.permutation(places, distinct)[place_N]
        keep, anchors = best[shuffled] >= 0, anchors[shuffled].astype(jnp.int32)
        horizons = jnp.asarray(horizons_N, jnp.int32)
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
