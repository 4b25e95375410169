"""Requests as they come, and the padded arrays that programs read."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dscout_jax.decode.sampling import Sampling
from dscout_jax.decode.state import Batch
from dscout_jax.errors import UserError

_STOP_BUCKET = 4


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is answered.

    prompt: ids, at least one.
    max_new_tokens: the budget.
    stop_ids: ids that end the answer.
    sampling: greedy by default.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: Sequence[int] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that a program is compiled for, besides its rows and prompt lengths.

    capacity: positions of a row. stops: stop ids of a row.
    """

    capacity: int
    stops: int


def round_up(n: int, multiple: int) -> int:
    """The least multiple, at least one, that holds n."""
    return max(1, -(-n // multiple)) * multiple


def check(requests: Sequence[Request], vocab: int, max_position: int, block_size: int) -> None:
    """Raises UserError for the first request that cannot be answered, with its number."""
    for row, request in enumerate(requests):
        prompt, budget = request.prompt, request.max_new_tokens
        if not len(prompt):
            raise UserError(f"prompt {row} is empty; a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise UserError(
                f"prompt {row} holds an id outside the vocabulary of {vocab}; is it another tokenizer's?"
            )
        if budget < 1:
            raise UserError(f"max_new_tokens {budget} of prompt {row} must be at least 1")
        need = len(prompt) + budget + block_size
        if need > max_position:
            raise UserError(
                f"prompt {row}: {len(prompt)} tokens + {budget} new + a block of {block_size} = {need} "
                f"positions, but the model has {max_position}; shorten the prompt or lower max_new_tokens"
            )
        request.sampling.check()


def shape_of(requests: Sequence[Request], block_size: int, prompt_slots: int, capacity_bucket: int) -> Shape:
    """Sizes that hold every request, its last block included; `prompt_slots`: of the padded prompts."""
    need = max(len(r.prompt) + r.max_new_tokens for r in requests) + block_size
    stops = max(len(r.stop_ids) for r in requests)
    return Shape(round_up(max(need, prompt_slots), capacity_bucket), round_up(stops, _STOP_BUCKET))


def pad(requests: Sequence[Request], rows: int, prompt_slots: int, shape: Shape, slots: int) -> Batch:
    """The arrays of `rows` rows; one that no request fills asks for one token, and its prefill ends it."""
    tokens_BxP = np.zeros((rows, prompt_slots), np.int32)
    prompts_B, budgets_B = np.ones(rows, np.int32), np.ones(rows, np.int32)
    stops_BxE = np.full((rows, shape.stops), -1, np.int32)
    draws = [r.sampling for r in requests] + [Sampling()] * (rows - len(requests))
    kinds = Sampling(np.float32, np.int32, np.float32, np.float32, np.uint32)
    for row, request in enumerate(requests):
        tokens_BxP[row, : len(request.prompt)] = request.prompt
        prompts_B[row], budgets_B[row] = len(request.prompt), request.max_new_tokens
        stops_BxE[row, : len(request.stop_ids)] = request.stop_ids
    sampling = Sampling(*(np.array(x, kind) for x, kind in zip(zip(*draws, strict=True), kinds, strict=True)))
    return Batch(tokens_BxP, prompts_B, budgets_B, stops_BxE, np.full(rows, slots, np.int32), sampling)
