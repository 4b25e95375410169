"""A decoder that follows a policy file: at one block size, or choosing among a few as it learns."""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dscout_jax.decode import Adaptive, Decoder, Sampling
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from infer.fingerprint import fingerprint, fingerprint_ids
from infer.load import LOOKUP
from infer.machine import describe
from infer.policy import Policy, load_policy

_LONGER = 2
"""Caches so many times as long as those that rounds were timed with make their times doubtful."""


@dataclasses.dataclass(frozen=True)
class PolicyUse:
    """A policy file and what it is asked.

    workload: whose acceptance to go by; None: all of the file's, in equal shares.
    adapt: begins there and learns from the rounds themselves. explore: the share of the time that probes of
        larger sizes may lose then.
    sampling: how answers will be drawn; its seed does not matter.
    """

    file: Path
    workload: str | None = None
    adapt: bool = False
    explore: float = 0.01
    sampling: Sampling = dataclasses.field(default_factory=Sampling)

    def load(self, concurrency: int) -> Policy:
        """The policy, known to hold an answer. Raises UserError for an unknown workload or concurrency."""
        policy = load_policy(self.file)
        policy.best(self.workload, concurrency)
        return policy

    def said(self, decoder: Decoder, size: int) -> dict[str, Any]:
        """What a result of `follow` is known by: the file's contents, what was asked of it, its answer."""
        return {
            "digest": hashlib.sha256(self.file.read_bytes()).hexdigest()[:16],
            "workload": self.workload,
            "adapt": self.adapt,
            "explore": self.explore if self.adapt else None,
            "sizes": list(decoder.sizes) if size > 1 else [1],
        }

    def follow(
        self, loaded: LoadedTarget, full: Decoder, drafter: str | Path, dtype: str, concurrency: int = 1
    ) -> tuple[Decoder, int]:
        """A decoder by the policy, and its block size; 1: plain decoding, in whichever form is the faster.

        Standard error gets a line for each way in which the policy's machine or sampling was another.

        Args:
            full: the drafter's decoder at its own block size.
        Raises:
            UserError: the policy is another drafter's, target's or dtype's, or has no such answer.
        """
        policy = self.load(concurrency)
        for doubt in check_policy(policy, loaded, full, drafter, dtype, self.sampling):
            _say(doubt)
        if self.adapt:
            return adaptive(policy, full, self.workload, concurrency, self.explore)
        return at_best(policy, full, self.workload, concurrency)

    def warn_of_length(self, capacity: int) -> None:
        """A line on standard error where caches are much longer than those that rounds were timed with."""
        measured = load_policy(self.file).about.get("capacity", capacity)
        if capacity > _LONGER * measured:
            _say(f"caches of {measured} positions then, {capacity} now")


def at_best(policy: Policy, full: Decoder, workload: str | None, concurrency: int) -> tuple[Decoder, int]:
    """`full` at the policy's block size, and that size; plain decoding where it is 1.

    Raises:
        UserError: the policy is another drafter's or dtype's, or has no such answer.
    """
    _refuse(policy, of_decoder(full))
    size = policy.best(workload, concurrency)
    return at_size(policy, full, size, concurrency), size


def at_size(policy: Policy, full: Decoder, size: int, concurrency: int) -> Decoder:
    """`full` at a block size; at 1 the form of plain decoding that was the faster when measured."""
    return full.plain(policy.plain_rows_at(concurrency)) if size == 1 else full.resize(size)


def adaptive(
    policy: Policy, full: Decoder, workload: str | None, concurrency: int, explore: float = 0.01
) -> tuple[Decoder, int]:
    """A decoder that chooses each round's size by what it learns, and its largest size.

    It begins with the workload's S_k and chooses among `policy.few_sizes`.

    Raises:
        UserError: the policy is another drafter's or dtype's, or has no such answer.
    """
    _refuse(policy, of_decoder(full))
    sizes = policy.few_sizes(concurrency)
    survival = policy.model(workload).survival[: sizes[-1] - 1]
    costs = tuple(policy.latency.ms(concurrency, size) for size in sizes)
    learner = Adaptive(sizes, costs, survival, explore)
    return several(policy, full, sizes, learner, concurrency), sizes[-1]


def several(policy: Policy, full: Decoder, sizes: tuple[int, ...], rule: Any, concurrency: int) -> Decoder:
    """`full` with several block sizes and an in-loop policy."""
    if sizes == (1,):
        return at_size(policy, full, 1, concurrency)
    rows = policy.plain_rows_at(concurrency) if 1 in sizes else 1
    return full.resize(sizes[-1], smaller=sizes[:-1], policy=rule, plain_rows=rows)


def identity(loaded: LoadedTarget, full: Decoder, drafter: str | Path, dtype: str) -> dict[str, Any]:
    """What a policy holds for: with any of these another, acceptance and latencies are others."""
    copying = str(drafter).endswith(LOOKUP)
    return {**of_decoder(full), "target": loaded.fingerprint, "copying": copying, "dtype": dtype}


def of_decoder(full: Decoder) -> dict[str, Any]:
    """As much of it as a decoder shows by itself."""
    return {
        "drafter": fingerprint(full.weights.drafter),
        "draft ids": fingerprint_ids(full.draft_ids),
        "dtype": jnp.dtype(full.target.dtype).name,
    }


def said(sampling: Sampling) -> str:
    """How answers are drawn, in words; without a temperature nothing else counts."""
    if not sampling.temperature:
        return "greedy"
    names = ("temperature", "top_k", "top_p", "min_p")
    return ", ".join(f"{name} {getattr(sampling, name):g}" for name in names)


def check_policy(
    policy: Policy,
    loaded: LoadedTarget,
    full: Decoder,
    drafter: str | Path,
    dtype: str,
    sampling: Sampling,
) -> list[str]:
    """What makes the policy doubtful here: another machine, other sampling. Empty: nothing.

    Raises:
        UserError: the policy is another drafter's, another target's or another dtype's.
    """
    _refuse(policy, identity(loaded, full, drafter, dtype))
    here, there = describe(), policy.about.get("machine", {})
    doubts = [f"{k}: {there.get(k)!r} then, {here[k]!r} now" for k in here if here[k] != there.get(k)]
    if (then := policy.about.get("sampling")) != said(sampling):
        doubts.append(f"sampling: {then} then, {said(sampling)} now")
    return doubts


def _refuse(policy: Policy, mine: dict[str, Any]) -> None:
    if odd := [name for name, value in mine.items() if policy.about.get(name) != value]:
        raise UserError(f"the policy was measured with another {' and '.join(odd)}; run `dscout tune` again")


def _say(doubt: str) -> None:
    print(f"dscout: the policy was measured otherwise ({doubt})", file=sys.stderr)
