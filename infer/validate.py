"""What a policy predicts against what decoding does: its cells, its choices, and learning beside an oracle.

A cell decodes a workload's prompts over C slots (`serve`), each refilled as its answer ends. Predicted is the
time of just that: the rounds of answer i at block size B are its tokens over its own MAT(B), both from the
one logged run; each goes to the slot that is free first; the last slot to end tells the rounds of all, and

    tokens/s = sum_i tokens_i / (rounds * t(B; C)).

Prefills are left out on both sides, and so is each answer's first token, which is the prefill's.

All ways of decoding a cell take turns, several passes each: a slow spell of the machine is no way's own.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dscout_jax.decode import mat
from dscout_jax.errors import UserError
from infer.cells import ONLINE, Cells
from infer.policy import Policy, gain_over_fixed
from infer.tune import MIXTURE, Ground, logged

PAPER_GAIN = 0.0975
"""The DScout paper's gain of its policy over one fixed setting, at the most (its Table 4)."""

_NOISE = 0.03


def validate(
    ground: Ground,
    policy: Policy,
    explore: float = 0.01,
    passes: int = 3,
    all_sizes: bool = False,
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Runs the cells that are not measured yet and writes `out/validation.json`.

    In every cell of workload and concurrency: the chosen block size, its neighbours, the size that is
    predicted to be the best single one, and plain decoding; or `all_sizes`. On the mixture, and where
    speculation was measured to lose, also the policy that learns and the oracle: that program, told whose
    each row is.

    Returns:
        {"about", "rows", "online", "losing", "summary"}; see `rows_of`, `online_of`, `losing`, `summary`.
    Raises:
        UserError: no pass.
    """
    if passes < 1:
        raise UserError(f"passes {passes} must be at least 1")
    cells = Cells(ground, policy, explore, passes, log)
    rows = rows_of(cells, all_sizes)
    loses = losing(rows)
    document = {
        "about": dict(policy.about),
        "rows": rows,
        "online": online_of(cells, rows, loses),
        "losing": loses,
        "summary": summary(rows),
    }
    path = ground.settings.out / "validation.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def rows_of(cells: Cells, all_sizes: bool) -> list[dict[str, Any]]:
    """A row for each cell and block size: MAT and tokens/s, predicted and measured; whether it is chosen.

    Measured tokens/s are the median of the passes, `_low` and `_high` the least and the most.
    """
    ground, policy = cells.ground, cells.policy
    single, _ = gain_over_fixed(policy.table())
    rows = []
    for workload in policy.workloads:
        accepted = logged(ground, workload)
        for concurrency in ground.settings.concurrencies:
            sizes, best = policy.sizes(workload), policy.best(workload, concurrency)
            at = sizes.index(best)
            some = sizes if all_sizes else sorted({1, single, *sizes[max(at - 1, 0) : at + 2]})
            hows = [*some, *ONLINE] if workload == MIXTURE else some
            found = cells.measured(workload, concurrency, hows)
            for size in some:
                rows.append(
                    {
                        "workload": workload,
                        "concurrency": concurrency,
                        "block_size": size,
                        "mat_predicted": policy.model(workload).mat(size),
                        "mat_measured": found[size].mat,
                        "tokens_per_s_predicted": queue_tokens_per_s(
                            accepted, size, concurrency, policy.latency.ms(concurrency, size)
                        ),
                        "tokens_per_s_measured": found[size].speed,
                        "tokens_per_s_low": min(found[size].speeds),
                        "tokens_per_s_high": max(found[size].speeds),
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


def losing(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Where speculation was measured to lose most: {"workload", "concurrency", "best_over_plain"}.

    `best_over_plain`: of the fastest size above 1. None where in every cell some size is faster than plain.
    """
    worst = None
    for (workload, concurrency), speeds in _speeds(rows).items():
        ratio = max(speed for size, speed in speeds.items() if size > 1) / speeds[1]
        if ratio < (worst["best_over_plain"] if worst else 1):
            worst = {"workload": workload, "concurrency": concurrency, "best_over_plain": ratio}
    return worst


def online_of(
    cells: Cells, rows: Sequence[dict[str, Any]], loses: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Tokens/s of the policy that learns and of the oracle, beside the fixed sizes of `rows`.

    On the mixture, and where speculation loses; there the sizes run once more, in turns with these two.
    Ratios are of the two sides of a pass, in medians, with the least and the most.
    """
    policy, speeds = cells.policy, _speeds(rows)
    wanted = [(w, c) for w, c in speeds if w == MIXTURE]
    if loses:
        wanted.append((loses["workload"], loses["concurrency"]))
    online = []
    for workload, concurrency in dict.fromkeys(wanted):
        sizes = list(speeds[workload, concurrency])
        found = cells.measured(workload, concurrency, [*sizes, *ONLINE])
        best = max(sizes, key=lambda size: found[size].speed)
        row = {
            "workload": workload,
            "concurrency": concurrency,
            "sizes": " ".join(map(str, policy.few_sizes(concurrency))),
            "adaptive_tokens_per_s": found["adaptive"].speed,
            "oracle_tokens_per_s": found["oracle"].speed,
        }
        for name, other in (("oracle", "oracle"), ("best_fixed", best), ("plain", 1)):
            pairs = zip(found["adaptive"].speeds, found[other].speeds, strict=True)
            ratios = [mine / theirs for mine, theirs in pairs]
            row[f"adaptive_over_{name}"] = statistics.median(ratios)
            row |= {f"adaptive_over_{name}_low": min(ratios), f"adaptive_over_{name}_high": max(ratios)}
        online.append(row)
    return online


def _speeds(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[int, float]]:
    """Measured tokens/s of each cell by block size."""
    cells: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        cell = cells.setdefault((row["workload"], row["concurrency"]), {})
        cell[row["block_size"]] = row["tokens_per_s_measured"]
    return cells


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often predictions held, and what the choices gained.

    `chosen_is_best`: share of cells where the chosen size is the fastest measured, or within 3 % of it.
    """

    def within(name: str, share: float) -> float:
        errors = [abs(r[f"{name}_predicted"] / r[f"{name}_measured"] - 1) for r in rows]
        return float(np.mean(np.array(errors) <= share))

    tops = {at: max(speeds.values()) for at, speeds in _speeds(rows).items()}
    ratios = [
        row["tokens_per_s_measured"] / tops[row["workload"], row["concurrency"]]
        for row in rows
        if row["chosen"]
    ]
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
    if loses := document["losing"]:
        lines.append(
            f"speculation loses most on {loses['workload']}, concurrency {loses['concurrency']}: its best "
            f"size is {loses['best_over_plain']:.3f} x plain"
        )
    else:
        lines.append("speculation loses nowhere: no cell was measured where plain decoding is the fastest")
    return "\n".join(lines)
