"""A block size chosen by what the batch itself accepts, probing at a price that is bounded."""

import dataclasses
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decode.state import DecodeState, Learnt
from dscout_jax.errors import UserError

_SAVED = 1000
"""Rounds whose allowance may be saved up: a probe that waits for longer is no answer to a change of text."""


class _Choice(NamedTuple):
    """best: index of the size with the most tokens for its cost. taken: that or the next, which costs `extra`
    more. worth: the cost that a token of each row is worth, at the best size."""

    best: jax.Array
    taken: jax.Array
    extra: jax.Array
    worth: jax.Array


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A policy that learns from all rows of a batch together.

        B = argmax_B (1 + sum_{k<B} S_k) / cost(B),    S_k = prod_{j<=k} hits_j / tried_j

    Counts of a slot fade with each row that sends it, so they span the last `memory` of them, and stand still
    while it is not sent. So that a small size is not kept for want of news, a round takes the next larger one
    whenever that is paid for: every round adds `explore` times its cost to an allowance, and a probe takes
    from it what it costs more than the best size, less what the tokens are worth that it alone commits. As a
    longer block of the same text never commits less, probes lose at most the share `explore` of the time.

    sizes: the decoder's, ascending. costs: time of a round at each, in any one unit.
    survival: S_k to begin with, k = 1..sizes[-1]-1. weight: rounds that this counts for.

    Raises:
        UserError: not one cost above zero for each size, not one S_k for each slot, one that is no share or
            above the one before it, or `explore` no share.
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    survival: tuple[float, ...]
    explore: float = 0.01
    memory: float = 32.0
    weight: float = 8.0

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.sizes) or min(self.costs, default=0) <= 0:
            raise UserError(f"block sizes {self.sizes} need as many costs above 0, not {self.costs}")
        if len(self.survival) != self.sizes[-1] - 1 or not _falls(self.survival):
            raise UserError(
                f"survival {self.survival} must be {self.sizes[-1] - 1} shares of rounds, none above the last"
            )
        if not 0 <= self.explore < 1 or self.memory < 1 or self.weight <= 0:
            raise UserError(
                f"explore {self.explore} must be a share below 1, memory {self.memory} at least 1 and weight "
                f"{self.weight} above 0"
            )

    def start(self) -> Learnt:
        """What is known before the first round: the prior, and no allowance."""
        before = np.array([1.0, *self.survival], np.float32) * self.weight
        return Learnt(jnp.asarray(before[:-1]), jnp.asarray(before[1:]), jnp.float32(0))

    def __call__(self, state: DecodeState) -> jax.Array:
        """Index [] int32 of the next round's size."""
        return self._choose(state.learnt).taken

    def _choose(self, learnt: Learnt) -> _Choice:
        sizes, costs = np.array(self.sizes), jnp.asarray(self.costs, jnp.float32)
        inside = np.arange(1, self.sizes[-1]) < sizes[:, None]  # slots that each size has
        # A round's worth of the prior remains: a slot that hardly any round reaches has hardly any counts.
        first = np.array([1.0, *self.survival])
        likely = np.divide(first[1:], first[:-1], out=np.zeros(len(first) - 1), where=first[:-1] > 0)
        survival_W1 = jnp.cumprod((learnt.hits + likely) / (learnt.tried + 1))
        tokens = 1 + (survival_W1 * inside).sum(axis=-1)
        best = jnp.argmax(tokens / costs).astype(jnp.int32)
        larger = jnp.minimum(best + 1, len(sizes) - 1)
        extra = jnp.maximum(costs[larger] - costs[best], 0)
        taken = jnp.where(extra <= learnt.allowance, larger, best)
        worth = costs[best] / tokens[best]
        return _Choice(best, taken, jnp.where(taken == best, 0, extra), worth)

    def learn(self, learnt: Learnt, sent_B: jax.Array, accepted_B: jax.Array, live_B: jax.Array) -> Learnt:
        """After the round that `learnt` chose, which sent and accepted so many drafts of each row."""
        choice = self._choose(learnt)
        slots = jnp.arange(1, self.sizes[-1])
        sent = live_B[:, None] & (slots <= sent_B[:, None])
        tried = (sent & (slots <= accepted_B[:, None] + 1)).sum(axis=0)
        hits = (sent & (slots <= accepted_B[:, None])).sum(axis=0)
        keep = (1 - 1 / self.memory) ** sent.sum(axis=0)
        costs, drafts = jnp.asarray(self.costs, jnp.float32), jnp.asarray(self.sizes) - 1
        gained_B = jnp.maximum(accepted_B - drafts[choice.best], 0) * live_B
        gained = gained_B.sum() / jnp.maximum(live_B.sum(), 1)
        lost = jnp.maximum(choice.extra - gained * choice.worth, 0)
        allowance = learnt.allowance + self.explore * costs[choice.taken] - lost
        most = _SAVED * self.explore * max(self.costs)
        return Learnt(learnt.tried * keep + tried, learnt.hits * keep + hits, jnp.clip(allowance, 0, most))


def _falls(survival: tuple[float, ...]) -> bool:
    values = [1.0, *survival, 0.0]
    return all(a >= b for a, b in pairwise(values))
