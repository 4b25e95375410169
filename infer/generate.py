"""Streams the answer to a prompt, with or without a drafter, and says how fast it came."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dscout_jax.decode import Decoder, Sampling, seed_of
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from dscout_jax.ops import backend
from infer.apply import PolicyUse
from infer.load import encode_prompt, load_decoder


@dataclasses.dataclass(frozen=True)
class GenerateSettings:
    """How prompts are answered.

    drafter: a folder, or "lookup" for prompt lookup; None decodes plainly.
    policy: in place of a block size (see `infer.apply`).
    smaller, min_confidence: sizes that a round may be cut to when its drafts are too unsure (see Decoder).
    sampling: its seed is a job's: each row's own follows from it and the prompt.
    sample_drafts: see Decoder.
    """

    drafter: str | Path | None = None
    target: str | Path = "smollm2-135m"
    dtype: str = "float32"
    max_new_tokens: int = 128
    block_size: int | None = None
    smaller: tuple[int, ...] = ()
    min_confidence: float = 0.0
    policy: PolicyUse | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    sample_drafts: bool = False
    thinking: bool | None = None
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if self.min_confidence and not self.smaller:
            raise UserError(
                f"min_confidence {self.min_confidence} cuts rounds to one of --smaller: give both"
            )
        if self.smaller and not self.min_confidence:
            raise UserError(f"sizes {self.smaller} are for drafts below --min-confidence: give both")
        if self.smaller and (self.drafter is None or self.policy):
            raise UserError(
                f"smaller sizes {self.smaller} need a --drafter, and no --policy, which chooses sizes itself"
            )


@dataclasses.dataclass(frozen=True)
class Summary:
    """One answer's figures; the first token is the prefill's and belongs to no round."""

    tokens: int
    rounds: int
    seconds: float

    @property
    def mat(self) -> float:
        """Tokens committed a round, the bonus included."""
        return (self.tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Of the rounds alone: neither prefill nor compilation."""
        return (self.tokens - 1) / self.seconds if self.rounds else 0.0

    def __str__(self) -> str:
        speed = f"{self.tokens_per_s:.1f} tokens/s"
        return f"{self.tokens} tokens, {self.rounds} rounds, MAT {self.mat:.2f}, {speed}"


def answer(
    decoder: Decoder,
    prompt: list[int],
    max_new_tokens: int,
    text_of: Callable[[Iterator[list[int]]], Iterator[str]],
    write: Callable[[str], object],
    sampling: Sampling | None = None,
) -> Summary:
    """Writes the text of an answer as its tokens come.

    Args:
        text_of: turns lists of ids into text, as `Tokenizer.stream` does.
    """
    counts, begun, ended = [], 0.0, 0.0

    def counted() -> Iterator[list[int]]:
        nonlocal begun, ended
        for tokens in decoder.stream(prompt, max_new_tokens, sampling=sampling):
            ended = time.perf_counter()
            begun = begun or ended
            counts.append(len(tokens))
            yield tokens

    for piece in text_of(counted()):
        write(piece)
    return Summary(sum(counts), len(counts) - 1, ended - begun)


def load(settings: GenerateSettings, concurrency: int = 1) -> tuple[LoadedTarget, Decoder]:
    """The decoder of these settings, in its faster form where none is asked for.

    concurrency: rows decoded together, which a policy goes by.
    Raises:
        UserError: a policy without a drafter or beside a block size, or what `PolicyUse.follow` refuses.
    """
    block_size = settings.block_size
    if settings.policy:
        if settings.drafter is None or block_size is not None:
            raise UserError("a policy chooses a drafter's block size: give --drafter, and no --block-size")
        settings = dataclasses.replace(
            settings, policy=dataclasses.replace(settings.policy, sampling=settings.sampling)
        )
        settings.policy.load(concurrency)
    plain = settings.drafter is None and block_size is None
    if plain and settings.dtype == "bfloat16" and backend.single_bf16_rows_are_slow():
        block_size = 2
    options: dict[str, Any] = {}
    if settings.smaller:
        options = {"smaller": settings.smaller, "min_confidence": settings.min_confidence}
    loaded, decoder = load_decoder(
        settings.target,
        settings.drafter,
        dtype=settings.dtype,
        block_size=block_size,
        cache_dir=settings.cache_dir,
        sample_drafts=settings.sample_drafts,
        **options,
    )
    if settings.policy:
        decoder, _ = settings.policy.follow(loaded, decoder, settings.drafter, settings.dtype, concurrency)
    return loaded, decoder


def generate(prompt: str, settings: GenerateSettings) -> Summary:
    """Streams the answer to standard output and its figures to standard error."""
    settings.sampling.check()
    loaded, decoder = load(settings)

    def write(piece: str) -> None:
        print(piece, end="", flush=True)

    ids = encode_prompt(loaded, prompt, settings.thinking)
    if settings.policy:
        settings.policy.warn_of_length(
            decoder.shape(decoder.requests([ids], settings.max_new_tokens)).capacity
        )
    draws = settings.sampling._replace(seed=seed_of(settings.sampling.seed, ids))
    summary = answer(decoder, ids, settings.max_new_tokens, loaded.tokenizer.stream, write, draws)
    print()
    print(summary, file=sys.stderr)
    return summary
