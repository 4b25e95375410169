"""The decoder: prompts in, tokens out, over programs compiled once a shape."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dscout_jax.decode.adapt import Adaptive
from dscout_jax.decode.batch import Request, Shape, check, pad, round_up, shape_of
from dscout_jax.decode.draft import Draft, block_draft, no_draft
from dscout_jax.decode.generation import Generation, to_host
from dscout_jax.decode.loop import make_loop, make_round, prefill
from dscout_jax.decode.placement import state_shardings
from dscout_jax.decode.policy import Policy
from dscout_jax.decode.sampling import Sampling
from dscout_jax.decode.state import DecodeState, Learnt, Weights
from dscout_jax.errors import UserError
from dscout_jax.models import Drafter, Target, target_head
from dscout_jax.sharding import shardings


class Decoder:
    """Decoding of a batch, greedy or sampled row by row, speculative with a drafter and plain without.

    Programs are compiled once for each (rows, prompt bucket, capacity bucket); `compilations` counts them.

    Args:
        target, target_params: the model whose output is produced.
        drafter, drafter_params: None decodes plainly. Parameters without a drafter are a custom draft's own.
        stop_ids: ids that end an answer; `generate` can override them per row.
        block_size: slots verified a round, the anchor included. Default: the drafter's own; 1 when plain.
            A plain decoder with block_size 2 runs every product with two rows, which some kernels prefer.
        smaller: further block sizes below `block_size` that a round may take.
        policy: chooses a round's size among (*smaller, block_size) (see `decode.policy`, `decode.adapt`). An
            `Adaptive` one begins each call with what it learnt in the last.
        plain_rows: slots that a round computes at the least. With 1 among the sizes, 2 lets a round without
            drafts run every product with two rows, as plain decoding with block_size 2 does.
        min_confidence: drafts whose running product of confidence falls below this are not sent; the round
            verifies at the smallest of its sizes that holds the rest. 0 sends all.
        draft: another source of proposals than the drafter: makes a Draft of a block size.
        draft_ids: ids that drafts are chosen from, such as those the drafter was trained on: a smaller head
            to multiply with, and never another output. Default: the whole vocabulary.
        sample_drafts: rows with a temperature draw their drafts and verify by full rejection sampling,
            instead of proposing the drafter's argmax. The text has the same distribution, but is no longer
            that of plain decoding with the same seed.
        detokenize: ids -> text.
        cache_dtype: of both caches; default the target's dtype.
        bucket, capacity_bucket: prompt lengths and cache capacities are rounded up to multiples of these.
        prefill_chunk: positions of a prompt read in one forward.
        mesh: both models are sharded over it by `sharding.RULES`, rows and cache heads with them.
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
        smaller: Sequence[int] = (),
        policy: Policy | None = None,
        plain_rows: int = 1,
        min_confidence: float = 0.0,
        draft: Callable[[int], Draft] | None = None,
        draft_ids: Sequence[int] | None = None,
        sample_drafts: bool = False,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        cache_dtype: jnp.dtype | None = None,
        bucket: int = 64,
        capacity_bucket: int = 256,
        prefill_chunk: int = 1024,
        mesh: Mesh | None = None,
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
        if not all(1 <= size < block_size for size in smaller):
            raise UserError(f"smaller block sizes {tuple(smaller)} must be from 1 to {block_size - 1}")
        if not 1 <= plain_rows <= block_size:
            raise UserError(f"plain_rows {plain_rows} must be from 1 to the block size {block_size}")
        if isinstance(policy, Adaptive) and policy.sizes != (*sorted(set(smaller)), block_size):
            sizes = (*sorted(set(smaller)), block_size)
            raise UserError(f"the policy chooses among block sizes {policy.sizes}, the decoder has {sizes}")
        if not 0 <= min_confidence <= 1:
            raise UserError(f"min_confidence {min_confidence} must be from 0 (send all) to 1")
        if sample_drafts and (drafter is None or draft is not None):
            raise UserError("sample_drafts needs a drafter that drafts by itself: nothing else has a q")
        if prefill_chunk < 1:
            raise UserError(f"prefill_chunk {prefill_chunk} must be at least 1")
        self._options = dict(
            stop_ids=tuple(stop_ids),
            smaller=tuple(smaller),
            plain_rows=plain_rows,
            min_confidence=min_confidence,
            draft=draft,
            draft_ids=draft_ids,
            sample_drafts=sample_drafts,
            detokenize=detokenize,
            cache_dtype=cache_dtype or target.dtype,
            bucket=bucket,
            capacity_bucket=capacity_bucket,
            prefill_chunk=prefill_chunk,
            mesh=mesh,
        )
        # A block of one slot proposes nothing and needs no drafter, but `resize` does.
        self._models = (drafter, drafter_params) if block_size == 1 else None
        if block_size == 1:
            drafter = drafter_params = draft = None
        self.target, self.drafter, self.block_size = target, drafter, block_size
        if mesh is not None:
            target_params = jax.device_put(target_params, shardings(target_params, mesh))
            if drafter:
                drafter_params = jax.device_put(drafter_params, shardings(drafter_params, mesh))
        self.weights = Weights(target_params, drafter_params)
        if drafter and draft_ids is not None:
            ids = _checked_ids(draft_ids, target.config.vocab_size)
            self.weights = self.weights._replace(draft_head=target_head(target_params)[ids], draft_ids=ids)
        self.draft_ids, self.stop_ids = draft_ids, self._options["stop_ids"]
        if draft is None:
            draft = partial(block_draft, drafter, sampled=sample_drafts) if drafter else no_draft
        # A block of one slot has no drafts, and no drafter need run for it.
        self.draft_of = lambda size: draft(size) if size > 1 else no_draft(1)
        self.sizes = (*sorted(set(smaller)), block_size)
        self._chooses = policy is not None
        adaptive = isinstance(policy, Adaptive)
        self._tracked = block_size - 1 if policy and not adaptive else 0
        self._learnt = policy.start() if adaptive else None
        if adaptive and mesh is not None:
            self._learnt = jax.device_put(self._learnt, NamedSharding(mesh, PartitionSpec()))
        drafts = [(size, self.draft_of(size)) for size in self.sizes]
        self.round = make_round(target, drafter, drafts, policy, min_confidence, plain_rows)
        self._programs: dict[tuple, Any] = {}
        self._sized: dict[int, tuple[Weights, Decoder]] = {}

    def plain(self, rows: int = 1) -> "Decoder":
        """Plain decoding with the same target, every product run with `rows` rows a sequence."""
        alone = dict(smaller=(), plain_rows=1, min_confidence=0.0, draft=None, draft_ids=None)
        options = self._options | alone | {"sample_drafts": False}
        return Decoder(self.target, self.weights.target, block_size=rows, **options)

    def plain_like(self) -> "Decoder":
        """Plain decoding in the shape of this decoder's verification: bf16 tokens equal speculation's.

        A bf16 product of one row rounds otherwise than one of W; here both decodings run the products of W
        rows, and in them a row does not depend on its company. The price over `plain` is that of the idle
        rows. It rests on the backend's kernels: `generate(..., live_slots=1)` runs the very same program.

        Raises:
            UserError: rounds of several block sizes have no one shape.
        """
        if len(self.sizes) > 1:
            raise UserError(f"rounds of sizes {self.sizes} have no one shape that plain decoding could take")
        return self.plain(self.block_size)

    def resize(self, block_size: int, **options: Any) -> "Decoder":
        """The same models and options at another block size, of the smaller ones those below, no policy.

        options: of the Decoder, in place of its own.
        """
        models = (self.target, self.weights.target, *(self._models or (self.drafter, self.weights.drafter)))
        smaller = [size for size in self._options["smaller"] if size < block_size]
        own = {"smaller": smaller, "plain_rows": min(self._options["plain_rows"], block_size)}
        return Decoder(*models, block_size=block_size, **self._options | own | options)

    def sized(self, block_size: int | None) -> "Decoder":
        """`resize`, made once a size so that its programs stay compiled; None: itself."""
        if block_size is None or (block_size == self.block_size and not self._chooses):
            return self
        weights, decoder = self._sized.get(block_size, (None, None))
        if weights is not self.weights:
            decoder = self.resize(block_size)
            self._sized[block_size] = self.weights, decoder
        return decoder

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
        sampling: Sampling | Sequence[Sampling] | None = None,
        block_size: int | None = None,
        live_slots: int | None = None,
        rows: int | None = None,
    ) -> list[Generation]:
        """Answers a batch of prompts; `decode.serve` answers more than fit in one.

        Args:
            prompts: token ids, none empty.
            max_new_tokens: one budget, or one a prompt.
            stop_ids: one list a prompt, in place of the decoder's own.
            sampling: one for all, or one a prompt; None: greedy.
            block_size: of this call, without a policy (see `resize`); None: the decoder's own.
            live_slots: slots that may be committed from, 1..block_size. 1 is plain decoding through the
                very program that speculates: drafts are computed and ignored, so that every kernel has the
                same shape; the identity check of bf16.
            rows: pads the batch to this many rows, so that a smaller last batch compiles nothing new.
        Raises:
            UserError: an empty prompt, an id outside the vocabulary, a budget below 1, a sampling setting
                that means nothing, too many positions, or a block size that the drafter does not have.
        """
        if (sized := self.sized(block_size)) is not self:
            draws = dict(stop_ids=stop_ids, sampling=sampling)
            return sized.generate(prompts, max_new_tokens, **draws, live_slots=live_slots, rows=rows)
        if not prompts:
            return []
        requests = self.requests(prompts, max_new_tokens, stop_ids, sampling)
        state, prefill_seconds = self.prefill(requests, live_slots=live_slots, rows=rows)
        loop = self.compiled("loop", make_loop(self.round), self.weights, state)
        begun = time.perf_counter()
        state = jax.block_until_ready(loop(self.weights, state))
        decode_seconds = time.perf_counter() - begun
        if live_slots is None:  # fewer would teach that drafts are wrong
            self.keep(state.learnt)
        host = to_host(state)
        return [self.generation(host, row, prefill_seconds, decode_seconds) for row in range(len(prompts))]

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        stop_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        block_size: int | None = None,
    ) -> Iterator[list[int]]:
        """Yields the tokens of each round of one prompt as they come; the first list is the prefill's."""
        if (sized := self.sized(block_size)) is not self:
            yield from sized.stream(prompt, max_new_tokens, stop_ids=stop_ids, sampling=sampling)
            return
        stops = None if stop_ids is None else [stop_ids]
        state, _ = self.prefill(self.requests([prompt], max_new_tokens, stops, sampling))
        host, at = to_host(state), len(prompt)
        # Compiled before the first list is out, so that a caller who times the lists times rounds alone.
        step = self.compiled("round", self.round, self.weights, state)
        while True:
            end = int(host.lengths[0]) + 1
            yield host.tokens[0, at:end].tolist()
            at = end
            if not host.live[0]:
                self.keep(state.learnt)
                return
            state = step(self.weights, state)
            host = to_host(state)

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[Sequence[int]] | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Request]:
        """One request a prompt, of columns as `generate` takes them. Raises UserError for unlike lengths."""
        n = len(prompts)
        budgets = [max_new_tokens] * n if isinstance(max_new_tokens, int) else list(max_new_tokens)
        stops = [self.stop_ids] * n if stop_ids is None else [tuple(s) for s in stop_ids]
        one = sampling is None or isinstance(sampling, Sampling)
        draws = [sampling or Sampling()] * n if one else list(sampling)
        if not len(budgets) == len(stops) == len(draws) == n:
            raise UserError(
                f"{n} prompts, {len(budgets)} budgets, {len(stops)} lists of stop ids, {len(draws)} settings "
                "of sampling: give as many"
            )
        return [Request(*columns) for columns in zip(prompts, budgets, stops, draws, strict=True)]

    def shape(self, requests: Sequence[Request]) -> Shape:
        """Sizes that hold these requests, together or one by one. Raises UserError for one that cannot be."""
        models = (self.target, self.drafter) if self.drafter else (self.target,)
        limit = min(m.config.max_position for m in models)
        check(requests, self.target.config.vocab_size, limit, self.block_size)
        slots = self.prompt_slots(requests)
        return shape_of(requests, self.block_size, slots, self._options["capacity_bucket"])

    def prefill(
        self,
        requests: Sequence[Request],
        *,
        live_slots: int | None = None,
        rows: int | None = None,
        shape: Shape | None = None,
    ) -> tuple[DecodeState, float]:
        """The state after the prompts, for callers that drive rounds themselves; and seconds taken.

        `shape`: of a greater set of requests, checked before; by default of these.
        """
        shape = shape or self.shape(requests)
        slots = self.block_size if live_slots is None else live_slots
        if not 1 <= slots <= self.block_size:
            raise UserError(f"live_slots {slots} must be from 1 to the block size {self.block_size}")
        batch = pad(requests, max(len(requests), rows or 0), self.prompt_slots(requests), shape, slots)
        models = (self.target, self.drafter, shape.capacity, self._options["cache_dtype"])
        run = partial(prefill, *models, self._options["prefill_chunk"], self._tracked)
        key = ("prefill", *batch.tokens.shape, shape.capacity, shape.stops)
        program = self._program(key, run, (), self.weights, batch, self._learnt)
        begun = time.perf_counter()
        state = jax.block_until_ready(program(self.weights, batch, self._learnt))
        return state, time.perf_counter() - begun

    def keep(self, learnt: Learnt | None) -> None:
        """What an `Adaptive` policy begins the next call with: a workload goes on where it was left."""
        self._learnt = learnt

    def compiled(self, name: str, run: Callable, first: Any, state: DecodeState, *args: Any) -> Any:
        """The compiled program of `run(first, state, ...)` for this state's shape; consumes the state.

        Compiled apart from running, so that timings exclude it.
        """
        key = (name, *state.tokens.shape, state.stops.shape[1])
        return self._program(key, run, (1,), first, state, *args)

    def _program(self, key: tuple, run: Callable, donated: tuple[int, ...], *args: Any) -> Any:
        if key not in self._programs:
            # Buffers of a donated state are updated in place; every program gives a state as it takes one.
            mesh = self._options["mesh"]
            placed = (
                {} if mesh is None else {"out_shardings": state_shardings(jax.eval_shape(run, *args), mesh)}
            )
            self._programs[key] = jax.jit(run, donate_argnums=donated, **placed).lower(*args).compile()
        return self._programs[key]

    def generation(
        self,
        host: DecodeState,
        row: int,
        prefill_seconds: float,
        decode_seconds: float,
        done_seconds: float | None = None,
    ) -> Generation:
        """A row of `to_host(state)` as an answer; by default it is done when its batch is."""
        begin, end = int(host.prompts[row]), int(host.lengths[row]) + 1
        tokens = host.tokens[row, begin:end].tolist()
        detokenize = self._options["detokenize"]
        return Generation(
            tokens=tokens,
            text=detokenize(tokens) if detokenize else None,
            accepted=(host.committed[row, : int(host.rounds[row])] - 1).tolist(),
            block_size=self.block_size,
            finish="stop" if host.stopped[row] else "length",
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            done_seconds=prefill_seconds + decode_seconds if done_seconds is None else done_seconds,
        )

    def prompt_slots(self, requests: Sequence[Request]) -> int:
        """Positions of the padded prompts: a multiple of the bucket, and of the chunk if longer than that."""
        slots = round_up(max(len(r.prompt) for r in requests), self._options["bucket"])
        chunk = self._options["prefill_chunk"]
        return slots if slots <= chunk else round_up(slots, chunk)


def _checked_ids(draft_ids: Sequence[int], vocab: int) -> jax.Array:
    ids = np.unique(np.asarray(draft_ids, np.int32))
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab:
        raise UserError(f"draft_ids must be one or more ids of the vocabulary of {vocab}")
    return jnp.asarray(ids)
