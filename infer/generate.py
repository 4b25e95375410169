"""Streams the answer to a prompt, with or without a drafter, and says how fast it came."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from dscout_jax.decode import Decoder
from infer.load import encode_prompt, load_decoder


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
) -> Summary:
    """Writes the text of an answer as its tokens come.

    Args:
        text_of: turns lists of ids into text, as `Tokenizer.stream` does.
    """
    counts, begun, ended = [], 0.0, 0.0

    def counted() -> Iterator[list[int]]:
        nonlocal begun, ended
        for tokens in decoder.stream(prompt, max_new_tokens):
            ended = time.perf_counter()
            begun = begun or ended
            counts.append(len(tokens))
            yield tokens

    for piece in text_of(counted()):
        write(piece)
    return Summary(sum(counts), len(counts) - 1, ended - begun)


def generate(
    prompt: str,
    *,
    drafter: str | Path | None = None,
    target: str | Path = "smollm2-135m",
    dtype: str = "bfloat16",
    max_new_tokens: int = 256,
    block_size: int | None = None,
    thinking: bool | None = None,
    cache_dir: str | Path | None = None,
) -> Summary:
    """Streams the answer to standard output and its figures to standard error."""
    if drafter is None and block_size is None and dtype == "bfloat16" and jax.default_backend() == "cpu":
        block_size = 2  # XLA:CPU's bf16 product of one row is the slower one
    loaded, decoder = load_decoder(target, drafter, dtype=dtype, block_size=block_size, cache_dir=cache_dir)

    def write(piece: str) -> None:
        print(piece, end="", flush=True)

    ids = encode_prompt(loaded, prompt, thinking)
    summary = answer(decoder, ids, max_new_tokens, loaded.tokenizer.stream, write)
    print()
    print(summary, file=sys.stderr)
    return summary
