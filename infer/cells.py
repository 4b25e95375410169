"""Cells of a validation: a workload decoded at a concurrency, in several ways that take turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decode import Decoder, DecodeState, Request, mat, serve
from infer.apply import adaptive, at_size, several
from infer.policy import Policy
from infer.tune import Ground, digest

ONLINE = ("adaptive", "oracle")
"""Ways that choose round by round: by what is learnt, and by who knows whose each row is."""


class Cell(NamedTuple):
    """One way of decoding a workload at a concurrency: MAT, and tokens/s of each pass over its prompts."""

    mat: float
    speeds: tuple[float, ...]

    @property
    def speed(self) -> float:
        """The median."""
        return statistics.median(self.speeds)


class Cells:
    """Measured cells by workload, concurrency and how: a block size, "adaptive" or "oracle"."""

    def __init__(
        self, ground: Ground, policy: Policy, explore: float, passes: int, log: Callable[[str], object]
    ) -> None:
        self.ground, self.policy, self.explore, self.passes, self.log = ground, policy, explore, passes, log
        self._decoders: dict[tuple[int, int | str], Decoder] = {}
        self._owners = owners(ground, list(policy.workloads))

    def measured(self, workload: str, concurrency: int, hows: Sequence[int | str]) -> dict[int | str, Cell]:
        """Each way, all of them taking turns; what was measured beside others does not count."""
        beside = " ".join(map(str, hows))
        if any(how in ONLINE for how in hows):
            beside += f" of {self.policy.few_sizes(concurrency)} explore {self.explore}"
        prompts, records = digest(self.ground.prompts[workload]), self.ground.records
        keys = {
            how: [("cell", workload, concurrency, how, beside, prompts, i) for i in range(self.passes)]
            for how in hows
        }
        for how, own in keys.items():
            if any(key not in records for key in own):
                self._decoder(concurrency, how)  # compiled before the first pass
        for i in range(self.passes):
            # Every other pass runs in the other order, so that drift of the machine favours no way.
            for how in hows if i % 2 == 0 else hows[::-1]:
                if keys[how][i] not in records:
                    records.add(keys[how][i], self._run(workload, concurrency, how))
        found = {}
        for how, own in keys.items():
            rows = [records[key] for key in own]
            found[how] = Cell(rows[0]["mat"], tuple(row["tokens"] / row["seconds"] for row in rows))
        return found

    def _run(self, workload: str, concurrency: int, how: int | str) -> dict[str, Any]:
        """{"tokens", "seconds", "mat"} of one pass over the workload's prompts."""
        ground, decoder = self.ground, self._decoder(concurrency, how)
        stretches: list[float] = []
        budget, stops = ground.settings.max_new_tokens, decoder.stop_ids
        requests = [Request(p, budget, stops, ground.draws(p)) for p in ground.prompts[workload]]
        done = dict(serve(decoder, requests, concurrency, clock=stretches.append))
        found = {
            "tokens": sum(len(g.tokens) - 1 for g in done.values()),
            "seconds": sum(stretches),
            "mat": mat([done[i].accepted for i in range(len(requests))]),
        }
        self.log(
            f"{workload}, concurrency {concurrency}, {_said(how)}: MAT {found['mat']:.3f}, "
            f"{found['tokens'] / found['seconds']:.1f} tokens/s"
        )
        return found

    def _decoder(self, concurrency: int, how: int | str) -> Decoder:
        at = concurrency, how
        if at not in self._decoders:
            policy, full = self.policy, self.ground.decoder
            if isinstance(how, int):
                self._decoders[at] = at_size(policy, full, how, concurrency)
            elif how == "adaptive":
                self._decoders[at], _ = adaptive(policy, full, None, concurrency, self.explore)
            else:
                sizes = policy.few_sizes(concurrency)
                rule = knowing(policy, sizes, concurrency, self._owners)
                self._decoders[at] = several(policy, full, sizes, rule, concurrency)
            # A program's first run is a slow one; one request more than slots takes a slot over.
            [prompt, *_] = next(iter(self.ground.prompts.values()))
            short = self._decoders[at].requests([prompt] * (concurrency + 1), 2)
            list(serve(self._decoders[at], short, concurrency))
        return self._decoders[at]


def owners(ground: Ground, workloads: Sequence[str]) -> dict[int, int]:
    """The seed that a prompt's answer is drawn by -> index of the workload that it comes from.

    A prompt that two files hold belongs to the first.
    """
    found: dict[int, int] = {}
    for name, prompts in ground.prompts.items():
        for prompt, source in zip(prompts, ground.source[name], strict=True):
            found.setdefault(ground.draws(prompt).seed, workloads.index(source))
    return found


def knowing(
    policy: Policy, sizes: Sequence[int], concurrency: int, whose: Mapping[int, int]
) -> Callable[[DecodeState], jax.Array]:
    """An in-loop policy that knows each live row's workload, by the row's seed: the oracle."""
    seeds = np.array(sorted(whose), np.uint32)
    workloads = np.array([whose[seed] for seed in seeds.tolist()])
    costs = np.array([policy.latency.ms(concurrency, size) for size in sizes])
    models = policy.workloads.values()
    gain_MxK = np.array([[model.mat(size) for size in sizes] for model in models]) / costs

    def rule(state: DecodeState) -> jax.Array:
        at_B = jnp.searchsorted(jnp.asarray(seeds), state.sampling.seed)
        gain_BxK = jnp.asarray(gain_MxK)[jnp.asarray(workloads)[at_B]]
        return jnp.argmax((gain_BxK * state.live[:, None]).sum(axis=0)).astype(jnp.int32)

    return rule


def _said(how: int | str) -> str:
    return how if isinstance(how, str) else f"B={how}"
