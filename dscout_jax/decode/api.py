"""The decoder: prompts in, tokens out, over programs compiled once a shape."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decode.draft import Draft, block_draft, no_draft
from dscout_jax.decode.loop import make_loop, make_round, prefill
from dscout_jax.decode.sampling import Choose, greedy
from dscout_jax.decode.state import DecodeState, Weights
from dscout_jax.errors import UserError
from dscout_jax.models import Drafter, Target, target_head

_STOP_BUCKET = 4


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer.

    tokens: emitted ids, a stop id included.
    accepted: drafts accepted in each round; `sum(a + 1) + 1 == len(tokens)`, the first token being the
        prefill's.
    finish: "stop" or "length".
    prefill_seconds, decode_seconds: of the whole batch, compilation excluded.
    """

    tokens: list[int]
    accepted: list[int]
    finish: str
    prefill_seconds: float
    decode_seconds: float

    @property
    def rounds(self) -> int:
        """Rounds that the answer took."""
        return len(self.accepted)


class Decoder:
    """Greedy decoding of a batch, speculative with a drafter and plain without.

    Programs are compiled once for each (rows, prompt bucket, capacity bucket); `compilations` counts them.

    Args:
        target, target_params: the model whose output is produced.
        drafter, drafter_params: None decodes plainly. Parameters without a drafter are a custom draft's own.
        stop_ids: ids that end an answer; `generate` can override them per row.
        block_size: slots verified a round, the anchor included. Default: the drafter's own; 1 when plain.
            A plain decoder with block_size 2 runs every product with two rows, which some kernels prefer.
        draft: another source of proposals than the drafter (see `decode.draft.Draft`).
        draft_ids: ids that drafts are chosen from, such as those the drafter was trained on: a smaller head
            to multiply with, and never another output. Default: the whole vocabulary.
        choose: how logits become tokens; anything but greedy needs plain decoding.
        cache_dtype: of both caches; default the target's dtype.
        bucket, capacity_bucket: prompt lengths and cache capacities are rounded up to multiples of these.
    Raises:
        UserError: a block size that the drafter does not have, or a drafter of another target.
    """

    def __init__(
        self,
        target: Target,
        target_params: dict[str, Any],
        drafter: Drafter | None = None,
        drafter_params: dict[str, Any] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        block_size: int | None = None,
        draft: Draft | None = None,
        draft_ids: Sequence[int] | None = None,
        choose: Choose = greedy,
        cache_dtype: jnp.dtype | None = None,
        bucket: int = 64,
        capacity_bucket: int = 256,
    ) -> None:
        if block_size is None:
            block_size = drafter.config.block_size if drafter else 1
        if block_size < 1 or (drafter and block_size > drafter.config.block_size):
            most = drafter.config.block_size if drafter else "any"
            raise UserError(f"block size {block_size} must be from 1 to the drafter's own ({most})")
        if drafter and drafter_params is None:
            raise UserError("a drafter needs its parameters: pass drafter_params")
        if drafter:
            drafter.config.check_target(target.config)
        if block_size == 1:
            drafter = drafter_params = None  # nothing to propose: plain decoding
        self.target, self.drafter, self.block_size = target, drafter, block_size
        self.weights = Weights(target_params, drafter_params)
        if drafter and draft_ids is not None:
            ids = _checked_ids(draft_ids, target.config.vocab_size)
            self.weights = self.weights._replace(draft_head=target_head(target_params)[ids], draft_ids=ids)
        self.draft_ids = draft_ids
        self.stop_ids = tuple(stop_ids)
        self._bucket, self._capacity_bucket = bucket, capacity_bucket
        self._cache_dtype = cache_dtype or target.dtype
        if draft is None:
            draft = block_draft(drafter, block_size) if drafter else no_draft(block_size)
        if choose is not greedy and (drafter or block_size > 1):
            raise UserError("sampling is implemented for plain decoding; leave the drafter out")
        self._choose = choose
        self.round = make_round(target, drafter, draft, choose)
        self._programs: dict[tuple, Any] = {}

    def plain(self, rows: int = 1) -> "Decoder":
        """Plain decoding with the same target, every product run with `rows` rows a sequence."""
        return Decoder(
            self.target,
            self.weights.target,
            stop_ids=self.stop_ids,
            block_size=rows,
            cache_dtype=self._cache_dtype,
            bucket=self._bucket,
            capacity_bucket=self._capacity_bucket,
        )

    @property
    def compilations(self) -> int:
        """Programs compiled so far: a prefill and a loop (or a streaming round) for each shape."""
        return len(self._programs)

    @property
    def programs(self) -> dict[tuple, Any]:
        """The compiled programs by (name, rows, prompt bucket, capacity); for inspection."""
        return dict(self._programs)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        stop_ids: Sequence[Sequence[int]] | None = None,
        live_slots: int | None = None,
        rows: int | None = None,
    ) -> list[Generation]:
        """Answers a batch of prompts.

        Args:
            prompts: token ids, none empty.
            max_new_tokens: one budget, or one a prompt.
            stop_ids: one list a prompt, in place of the decoder's own.
            live_slots: slots that may be committed from, 1..block_size. 1 is plain decoding through the
                very program that speculates: drafts are computed and ignored, so that every kernel has the
                same shape; the identity check of bf16.
            rows: pads the batch to this many rows, so that a smaller last batch compiles nothing new.
        Raises:
            UserError: an empty prompt, an id outside the vocabulary, a budget below 1, or too many positions.
        """
        if not prompts:
            return []
        state, prefill_seconds = self.prefill(prompts, max_new_tokens, stop_ids, live_slots, rows)
        loop = self._program("loop", make_loop(self.round), _shape(state), self.weights, state)
        begun = time.perf_counter()
        state = jax.block_until_ready(loop(self.weights, state))
        decode_seconds = time.perf_counter() - begun
        host = _to_host(state)
        return [_generation(host, row, prefill_seconds, decode_seconds) for row in range(len(prompts))]

    def stream(
        self, prompt: Sequence[int], max_new_tokens: int, *, stop_ids: Sequence[int] | None = None
    ) -> Iterator[list[int]]:
        """Yields the tokens of each round of one prompt as they come; the first list is the prefill's."""
        state, _ = self.prefill([prompt], max_new_tokens, None if stop_ids is None else [stop_ids])
        host, at = _to_host(state), len(prompt)
        # Compiled before the first list is out, so that a caller who times the lists times rounds alone.
        step = self._program("round", self.round, _shape(state), self.weights, state)
        while True:
            end = int(host.lengths[0]) + 1
            yield host.tokens[0, at:end].tolist()
            at = end
            if not host.live[0]:
                return
            state = step(self.weights, state)
            host = _to_host(state)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[Sequence[int]] | None = None,
        live_slots: int | None = None,
        rows: int | None = None,
    ) -> tuple[DecodeState, float]:
        """The state after the prompts, for callers that drive rounds themselves; and seconds taken."""
        tokens_BxP, *per_row, capacity = self._batch(prompts, max_new_tokens, stop_ids, live_slots, rows)
        args = (self.weights, tokens_BxP, *per_row)
        run = partial(prefill, self.target, self.drafter, capacity, self._cache_dtype, self._choose)
        shape = (*tokens_BxP.shape, capacity, per_row[2].shape[1])
        program = self._program("prefill", run, shape, *args)
        begun = time.perf_counter()
        state = jax.block_until_ready(program(*args))
        return state, time.perf_counter() - begun

    def _program(self, name: str, run: Callable, shape: tuple[int, ...], *args: Any) -> Any:
        """The compiled program for this shape; compiled apart from running, so that timings exclude it."""
        key = (name, *shape)
        if key not in self._programs:
            # The state is the second argument of all but the prefill: its buffers are updated in place.
            donated = () if name == "prefill" else (1,)
            self._programs[key] = jax.jit(run, donate_argnums=donated).lower(*args).compile()
        return self._programs[key]

    def _batch(self, prompts, max_new_tokens, stop_ids, live_slots, rows) -> tuple:
        """Checked and padded arrays: tokens [B, P], prompts, budgets, stops [B, E], slots [B]; capacity."""
        n = len(prompts)
        budgets = [max_new_tokens] * n if isinstance(max_new_tokens, int) else list(max_new_tokens)
        stops = [self.stop_ids] * n if stop_ids is None else [tuple(s) for s in stop_ids]
        if len(budgets) != n or len(stops) != n:
            raise UserError(
                f"{n} prompts, {len(budgets)} budgets, {len(stops)} lists of stop ids: give as many"
            )
        for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
            self._check(row, prompt, budget)
        slots = self.block_size if live_slots is None else live_slots
        if not 1 <= slots <= self.block_size:
            raise UserError(f"live_slots {slots} must be from 1 to the block size {self.block_size}")
        B = max(n, rows or n)
        need = max(len(p) + m for p, m in zip(prompts, budgets, strict=True)) + self.block_size
        P = _round_up(max(map(len, prompts)), self._bucket)
        capacity = _round_up(max(need, P), self._capacity_bucket)
        # A row of padding is one token long and asks for one token: the prefill finishes it.
        tokens_BxP = np.zeros((B, P), np.int32)
        lengths_B, budgets_B = np.ones(B, np.int32), np.ones(B, np.int32)
        stops_BxE = np.full((B, _round_up(max(map(len, stops), default=0), _STOP_BUCKET)), -1, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BxP[row, : len(prompt)] = prompt
            lengths_B[row], budgets_B[row] = len(prompt), budgets[row]
            stops_BxE[row, : len(stops[row])] = stops[row]
        return tokens_BxP, lengths_B, budgets_B, stops_BxE, np.full(B, slots, np.int32), capacity

    def _check(self, row: int, prompt: Sequence[int], budget: int) -> None:
        if not len(prompt):
            raise UserError(f"prompt {row} is empty; a prompt needs at least one token")
        vocab = self.target.config.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise UserError(
                f"prompt {row} holds an id outside the vocabulary of {vocab}; is it another tokenizer's?"
            )
        if budget < 1:
            raise UserError(f"max_new_tokens {budget} of prompt {row} must be at least 1")
        models = (self.target, self.drafter) if self.drafter else (self.target,)
        limit = min(m.config.max_position for m in models)
        need = len(prompt) + budget + self.block_size
        if need > limit:
            raise UserError(
                f"prompt {row}: {len(prompt)} tokens + {budget} new + a block of {self.block_size} = {need} "
                f"positions, but the model has {limit}; shorten the prompt or lower max_new_tokens"
            )


def _round_up(n: int, multiple: int) -> int:
    return max(1, -(-n // multiple)) * multiple


def _shape(state: DecodeState) -> tuple[int, ...]:
    """(rows, capacity, stop ids): with the models, all that a program's shapes depend on."""
    return (*state.tokens.shape, state.stops.shape[1])


def _to_host(state: DecodeState) -> DecodeState:
    """The state without its caches, as numpy copies: the device's buffers are donated to the next round."""
    return jax.tree.map(np.array, state._replace(target=None, context=None))


def _generation(host: DecodeState, row: int, prefill_seconds: float, decode_seconds: float) -> Generation:
    begin, end = int(host.prompts[row]), int(host.lengths[row]) + 1
    return Generation(
        tokens=host.tokens[row, begin:end].tolist(),
        accepted=(host.committed[row, : int(host.rounds[row])] - 1).tolist(),
        finish="stop" if host.stopped[row] else "length",
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
    )


def _checked_ids(draft_ids: Sequence[int], vocab: int) -> jax.Array:
    ids = np.unique(np.asarray(draft_ids, np.int32))
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab:
        raise UserError(f"draft_ids must be one or more ids of the vocabulary of {vocab}")
    return jnp.asarray(ids)
