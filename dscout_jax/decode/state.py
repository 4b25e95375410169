"""What a decoding loop carries from round to round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dscout_jax.decode.sampling import Sampling
from dscout_jax.models import KVCache


class Weights(NamedTuple):
    """Parameters of both models; arguments of every program, so that no program holds a copy.

    target: the target's parameters.
    drafter: the drafter's, or whatever the draft function reads; None in plain decoding.
    draft_head: [R, D], the rows of the output head that drafts are chosen from, and draft_ids: [R] int32,
        their token ids; None: all of the target's head.
    """

    target: dict[str, Any]
    drafter: dict[str, Any] | None = None
    draft_head: jax.Array | None = None
    draft_ids: jax.Array | None = None


class Batch(NamedTuple):
    """What a prefill reads.

    tokens: [B, P] int32, prompts padded on the right.
    prompts, budgets, stops, slots, sampling: as in DecodeState, the budget in tokens.
    """

    tokens: jax.Array
    prompts: jax.Array
    budgets: jax.Array
    stops: jax.Array
    slots: jax.Array
    sampling: Sampling


class Acceptance(NamedTuple):
    """What a policy chooses block sizes by: fading counts of each row's slots 1..W-1.

    tried: [B, W-1] fp32, rounds that sent a draft in the slot and accepted all drafts before it.
    hits: [B, W-1] fp32, those of them that accepted it too.
    """

    tried: jax.Array
    hits: jax.Array


class Learnt(NamedTuple):
    """What an `Adaptive` policy goes by, of all rows together; it stays when a row is replaced.

    tried: [W-1] fp32, fading count of the rows and rounds that sent a draft in the slot and accepted all
        drafts before it.
    hits: [W-1] fp32, those of them that accepted it too.
    allowance: [] fp32, time that probes of a larger size may cost by now.
    """

    tried: jax.Array
    hits: jax.Array
    allowance: jax.Array


class DecodeState(NamedTuple):
    """B rows, each at its own place. Positions are absolute; S is the capacity of a row.

    The anchor is the last emitted token. Its id is known, its keys and values are not yet cached: it stands
    at position `lengths`, and both caches hold exactly the positions before it. What lies at later positions
    is left over from rejected drafts or padding, is invisible, and is overwritten before it becomes visible.

    tokens: [B, S] int32, the id at each position: the prompt, then everything emitted up to the anchor.
    lengths: [B] int32, positions that both caches hold = position of the anchor.
    prompts: [B] int32, tokens of the prompt.
    limits: [B] int32, the first position that the budget forbids: prompt + max_new_tokens.
    stops: [B, E] int32, ids that end the row, padded with -1.
    slots: [B] int32, block slots that may be committed from, the anchor's included; 1 = plain decoding
        through the very same program.
    sampling: fields [B], how each row draws.
    stopped: [B] bool, the anchor is one of the row's stop ids.
    rounds: [B] int32, rounds in which the row was live.
    committed: [B, S] int32, tokens that each of those rounds committed.
    target: the target's cache.
    context: the drafter's cache, context entries only; None in plain decoding.
    acceptance: running counts for a policy; None where nothing reads them.
    learnt: what an `Adaptive` policy goes by; None without one.
    """

    tokens: jax.Array
    lengths: jax.Array
    prompts: jax.Array
    limits: jax.Array
    stops: jax.Array
    slots: jax.Array
    sampling: Sampling
    stopped: jax.Array
    rounds: jax.Array
    committed: jax.Array
    target: KVCache
    context: KVCache | None
    acceptance: Acceptance | None
    learnt: Learnt | None = None

    @property
    def anchors(self) -> jax.Array:
        """[B] ids of the last emitted tokens."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None], axis=1)[:, 0]

    @property
    def emitted(self) -> jax.Array:
        """[B] tokens emitted, the one from the prefill included."""
        return self.lengths - self.prompts + 1

    @property
    def room(self) -> jax.Array:
        """[B] tokens that the budget still allows."""
        return self.limits - self.lengths - 1

    @property
    def live(self) -> jax.Array:
        """[B] bool, rows that go on: neither stopped nor out of budget."""
        return ~self.stopped & (self.room > 0)
