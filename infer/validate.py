"""What a policy predicts against what decoding does: its cells, its choices, and learning beside an oracle.

A cell decodes a workload's prompts over C slots (`serve`), each refilled as its answer ends. Predicted is the
time of just that: the rounds of answer i at block size B are its tokens over its own MAT(B), both from the
one logged run; each goes to the slot that is free first; the last slot to end tells the rounds of all, and

    tokens/s = sum_i tokens_i / (rounds * t(B; C)).

Prefills are left out on both sides, and so is each answer's first token, which is the prefill's.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.decode import Decoder, DecodeState, Request, Sampling, mat, serve
from infer.apply import adaptive, at_size, several
from infer.policy import Policy, gain_over_fixed
from infer.tune import MIXTURE, Ground, digest, logged

PAPER_GAIN = 0.0975
"""The DScout paper's gain of its policy over one fixed setting, at the most (its Table 4)."""

_NOISE = 0.03


def validate(
    ground: Ground, policy: Policy, explore: float = 0.01, log: Callable[[str], object] = print
) -> dict[str, Any]:
    """Runs the cells that are not measured yet and writes `out/validation.json`.

    In every cell of workload and concurrency: the chosen block size, its neighbours, the size that is
    predicted to be the best single one, and plain decoding. On the mixture, and where least is accepted at
    the largest concurrency, also the policy that learns and the oracle: that program, told whose each row is.

    Returns:
        {"about", "rows", "online", "summary"}; see `rows_of`, `online_of`, `summary`.
    """
    cells = _Cells(ground, policy, explore, log)
    rows = rows_of(cells)
    online = online_of(cells, rows)
    document = {"about": dict(policy.about), "rows": rows, "online": online, "summary": summary(rows)}
    path = ground.settings.out / "validation.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


class _Cells:
    """Measured cells by (workload, concurrency, block size, "adaptive" or "oracle")."""

    def __init__(self, ground: Ground, policy: Policy, explore: float, log: Callable[[str], object]) -> None:
        self.ground, self.policy, self.explore, self.log = ground, policy, explore, log
        self._decoders: dict[tuple[int, int | str], Decoder] = {}

    def measured(self, workload: str, concurrency: int, how: int | str) -> dict[str, Any]:
        """{"tokens", "seconds", "mat"} of one pass over the workload's prompts."""
        key = ("cell", workload, concurrency, how, digest(self.ground.prompts[workload]))
        if isinstance(how, str):
            key = (*key, *self.policy.few_sizes(concurrency), self.explore)
        if key not in self.ground.records:
            decoder = self._decoder(concurrency, how)
            stretches: list[float] = []
            requests = self._requests(workload)
            done = dict(serve(decoder, requests, concurrency, clock=stretches.append))
            found = {
                "tokens": sum(len(g.tokens) - 1 for g in done.values()),
                "seconds": sum(stretches),
                "mat": mat([done[i].accepted for i in range(len(requests))]),
            }
            self.ground.records.add(key, found)
            self.log(
                f"{workload}, concurrency {concurrency}, {_said(how)}: MAT {found['mat']:.3f}, "
                f"{found['tokens'] / found['seconds']:.1f} tokens/s"
            )
        return self.ground.records[key]

    def _requests(self, workload: str) -> list[Request]:
        settings, decoder = self.ground.settings, self.ground.decoder
        names = list(self.policy.workloads)
        # A greedy row draws nothing, so its seed is free to tell the oracle whose row it is.
        return [
            Request(prompt, settings.max_new_tokens, decoder.stop_ids, Sampling(seed=names.index(source)))
            for prompt, source in zip(
                self.ground.prompts[workload], self.ground.source[workload], strict=True
            )
        ]

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
                rule = knowing(policy, sizes, concurrency)
                self._decoders[at] = several(policy, full, sizes, rule, concurrency)
            # A program's first run is a slow one; one request more than slots takes a slot over.
            [prompt, *_] = next(iter(self.ground.prompts.values()))
            short = self._decoders[at].requests([prompt] * (concurrency + 1), 2)
            list(serve(self._decoders[at], short, concurrency))
        return self._decoders[at]


def knowing(policy: Policy, sizes: Sequence[int], concurrency: int) -> Callable[[DecodeState], jax.Array]:
    """An in-loop policy that knows each live row's workload, by the row's seed: the oracle."""
    costs = np.array([policy.latency.ms(concurrency, size) for size in sizes])
    models = policy.workloads.values()
    gain_MxK = np.array([[model.mat(size) for size in sizes] for model in models]) / costs

    def rule(state: DecodeState) -> jax.Array:
        gain_BxK = jnp.asarray(gain_MxK)[state.sampling.seed.astype(jnp.int32)]
        return jnp.argmax((gain_BxK * state.live[:, None]).sum(axis=0)).astype(jnp.int32)

    return rule


def rows_of(cells: _Cells) -> list[dict[str, Any]]:
    """A row for each cell and block size: MAT and tokens/s, predicted and measured; whether it is chosen."""
    ground, policy = cells.ground, cells.policy
    single, _ = gain_over_fixed(policy.table())
    rows = []
    for workload in policy.workloads:
        accepted = logged(ground, workload)
        for concurrency in ground.settings.concurrencies:
            sizes, best = policy.sizes(workload), policy.best(workload, concurrency)
            at = sizes.index(best)
            for size in sorted({1, single, *sizes[max(at - 1, 0) : at + 2]}):
                found = cells.measured(workload, concurrency, size)
                rows.append(
                    {
                        "workload": workload,
                        "concurrency": concurrency,
                        "block_size": size,
                        "mat_predicted": policy.model(workload).mat(size),
                        "mat_measured": found["mat"],
                        "tokens_per_s_predicted": queue_tokens_per_s(
                            accepted, size, concurrency, policy.latency.ms(concurrency, size)
                        ),
                        "tokens_per_s_measured": found["tokens"] / found["seconds"],
                        "chosen": size == best,
                    }
                )
    return rows


def queue_tokens_per_s(
    accepted: Sequence[Sequence[int]], block_size: int, slots: int, round_ms: float
) -> float:
    """Tokens/s of answers, logged at a larger size, over so many slots; by the formula above."""
    tokens = [sum(a + 1 for a in answer) for answer in accepted]
    rounds = [
        n / mat([[min(a, block_size - 1) for a in answer]])
        for n, answer in zip(tokens, accepted, strict=True)
    ]
    return 1e3 * sum(tokens) / (longest_slot(rounds, slots) * round_ms)


def longest_slot(rounds: Sequence[float], slots: int) -> float:
    """Rounds until the last answer ends, each in turn taking the slot that is free first."""
    ends = [0.0] * slots
    for count in rounds:
        ends[ends.index(min(ends))] += count
    return max(ends)


def online_of(cells: _Cells, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens/s of the policy that learns and of the oracle, beside the fixed sizes of `rows`."""
    policy = cells.policy
    largest = max(cells.ground.settings.concurrencies)
    hardest = min(policy.workloads, key=lambda name: policy.model(name).mat(policy.sizes(name)[-1]))
    wanted = [(hardest, largest)]
    if MIXTURE in policy.workloads:
        wanted += [(MIXTURE, c) for c in cells.ground.settings.concurrencies]
    online = []
    for workload, concurrency in dict.fromkeys(wanted):
        learns, knows = (
            found["tokens"] / found["seconds"]
            for found in (cells.measured(workload, concurrency, how) for how in ("adaptive", "oracle"))
        )
        fixed = {
            row["block_size"]: row["tokens_per_s_measured"]
            for row in rows
            if (row["workload"], row["concurrency"]) == (workload, concurrency)
        }
        online.append(
            {
                "workload": workload,
                "concurrency": concurrency,
                "sizes": " ".join(map(str, policy.few_sizes(concurrency))),
                "adaptive_tokens_per_s": learns,
                "oracle_tokens_per_s": knows,
                "adaptive_over_oracle": learns / knows,
                "adaptive_over_best_fixed": learns / max(fixed.values()),
                "adaptive_over_plain": learns / fixed[1],
            }
        )
    return online


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often predictions held, and what the choices gained.

    `chosen_is_best`: share of cells where the chosen size is the fastest measured, or within 3 % of it.
    """

    def within(name: str, share: float) -> float:
        errors = [abs(r[f"{name}_predicted"] / r[f"{name}_measured"] - 1) for r in rows]
        return float(np.mean(np.array(errors) <= share))

    cells: dict[tuple[str, int], dict[int, float]] = {}
    chosen: dict[tuple[str, int], float] = {}
    for row in rows:
        at = row["workload"], row["concurrency"]
        cells.setdefault(at, {})[row["block_size"]] = row["tokens_per_s_measured"]
        if row["chosen"]:
            chosen[at] = row["tokens_per_s_measured"]
    ratios = [chosen[at] / max(cell.values()) for at, cell in cells.items()]
    single, gain = gain_over_fixed(rows, "tokens_per_s_measured")
    return {
        "cells": len(rows),
        "mat_within_3_percent": within("mat", 0.03),
        "tokens_per_s_within_10_percent": within("tokens_per_s", 0.1),
        "chosen_is_best": float(np.mean(np.array(ratios) >= 1 - _NOISE)),
        "chosen_over_best_least": float(min(ratios)),
        "best_single_block_size": single,
        "gain_over_best_single": gain,
        "paper_gain_at_most": PAPER_GAIN,
    }


def say(document: dict[str, Any]) -> str:
    """The outcome in a few lines."""
    found = document["summary"]
    lines = [
        f"{found['cells']} cells: MAT within 3 % in {found['mat_within_3_percent']:.0%}, tokens/s within "
        f"10 % in {found['tokens_per_s_within_10_percent']:.0%}",
        f"the chosen size is the fastest, or within 3 % of it, in {found['chosen_is_best']:.0%} of workloads "
        f"x concurrencies; at least {found['chosen_over_best_least']:.2f} times the fastest",
        f"measured gain over the best single block size, {found['best_single_block_size']}: "
        f"{found['gain_over_best_single']:+.2%} (the paper: up to {found['paper_gain_at_most']:+.2%})",
    ]
    for row in document["online"]:
        lines.append(
            f"choosing round by round, {row['workload']}, concurrency {row['concurrency']}: "
            f"{row['adaptive_over_oracle']:.3f} x the oracle, {row['adaptive_over_best_fixed']:.3f} x the "
            f"best fixed, {row['adaptive_over_plain']:.3f} x plain"
        )
    return "\n".join(lines)


def _said(how: int | str) -> str:
    return how if isinstance(how, str) else f"B={how}"
