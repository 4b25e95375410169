"""Two benchmarks of the same prompts against one another, prompt by prompt; and a gate for one of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import read_jsonl
from infer.figures import FIGURES, Record, totals

Cell = tuple[str, str, int]
"""(dataset, drafter, block size)."""


def load_cells(folder: str | Path) -> tuple[dict[str, Any], dict[Cell, dict[int, dict[int, Record]]]]:
    """What `dscout bench` recorded last in a folder.

    Returns:
        Its setup, and cell -> conversation -> turn -> speculative record, with the plain record of the same
        prompt added as `plain`.
    Raises:
        UserError: no records there.
    """
    folder = Path(folder)
    folder = folder.parent if folder.suffix == ".json" else folder
    path = folder / "records.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    if not rows:
        raise UserError(f"{folder} holds no records.jsonl of `dscout bench`")
    found = {tuple(row["key"]): row for row in rows if row["setup"] == rows[-1]["setup"]}
    if ("setup",) not in found:
        raise UserError(f"{folder} was written by an older `dscout bench`; run it again")
    cells: dict[Cell, dict[int, dict[int, Record]]] = {}
    for key, row in found.items():
        if len(key) < 6 or key[3] != "speculative" or key[2] == "queue":
            continue
        dataset, index, turn, _, drafter, size = key
        if plain := found.get((dataset, index, turn, "plain")):
            conversations = cells.setdefault((dataset, drafter.rpartition("@")[0], size), {})
            conversations.setdefault(index, {})[turn] = row | {"plain": plain}
    return found[("setup",)]["about"], cells


def _renamed(cells: dict[Cell, Any], others: dict[Cell, Any]) -> dict[Cell, Any]:
    """A lone drafter competes with the lone drafter of the other side, whatever they are called."""
    mine, theirs = {name for _, name, _ in cells}, {name for _, name, _ in others}
    if len(mine) != 1 or len(theirs) != 1:
        return cells
    (name,) = theirs
    return {(dataset, name, size): found for (dataset, _, size), found in cells.items()}


def compare(first: str | Path, second: str | Path, draws: int = 2000) -> list[dict[str, Any]]:
    """Ratios second / first of MAT, tokens/s and speed-up, over the prompts that both measured.

    Returns:
        A row for each dataset, drafter and block size in both (drafters go by their names; one on each side
        are compared under any): n answers, and for each figure its two values, their ratio and the ratio's
        95 % interval from resampling conversations, the same ones on both sides; `differs`: settings of the
        two that are not alike, each with its two values. A later turn counts while both sides were asked the
        same: it follows plain decoding's own answers, which another dtype or target may change. Of queues,
        seconds are the answers' own, in company.
    Raises:
        UserError: nothing in common, the same number is another prompt in each, or another concurrency.
    """
    (before, a), (after, b) = load_cells(first), load_cells(second)
    differs = {name: [before[name], after.get(name)] for name in before if before[name] != after.get(name)}
    if "concurrency" in differs:
        slots = " and ".join(map(str, differs["concurrency"]))
        raise UserError(f"measured at concurrency {slots}: their seconds are not of one kind")
    b = _renamed(b, a)
    rows = []
    for cell in [cell for cell in a if cell in b]:
        both = sorted(set(a[cell]) & set(b[cell]))
        turns = {i: _common_turns(a[cell][i], b[cell][i]) for i in both}
        for i in both:
            if not turns[i]:
                raise UserError(f"prompt {i} of {cell[0]!r} is another one in {second} than in {first}")
        if not both:
            continue
        sides = []
        for side in (a, b):
            answers = [[side[cell][i][turn] for turn in turns[i]] for i in both]
            sides.append(np.array([totals([r["plain"] for r in said], said) for said in answers]))
        pick = np.random.default_rng(0).integers(0, len(both), (draws, len(both)))
        row: dict[str, Any] = {"dataset": cell[0], "drafter": cell[1], "block_size": cell[2]}
        row |= {"n": sum(map(len, turns.values())), "differs": differs}
        for name, figure in FIGURES.items():
            value, later = (float(figure(side.sum(axis=0))) for side in sides)
            drawn = [figure(side[pick].sum(axis=1)) for side in sides]
            low, high = np.quantile(drawn[1] / np.maximum(drawn[0], 1e-12), [0.025, 0.975])
            row[name] = {
                "first": value,
                "second": later,
                "ratio": later / value if value else float("nan"),
                "low": float(low),
                "high": float(high),
            }
        rows.append(row)
    if not rows:
        raise UserError(
            f"{first} and {second} measured no dataset at the same block size by the same drafter"
        )
    return rows


def _common_turns(mine: dict[int, Record], theirs: dict[int, Record]) -> list[int]:
    """The turns up to the first that both were not asked alike."""
    turns = []
    for turn in range(len(mine)):
        if turn not in mine or turn not in theirs or mine[turn]["prompt"] != theirs[turn]["prompt"]:
            break
        turns.append(turn)
    return turns


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: first -> second, their ratio and its interval."""
    names = list(FIGURES)
    lines = ["| dataset | drafter | B | n | " + " | ".join(names) + " |", "|---" * (4 + len(names)) + "|"]
    for row in rows:
        cells = [
            f"{f['first']:.2f} -> {f['second']:.2f} (x{f['ratio']:.3f}, {f['low']:.3f} to {f['high']:.3f})"
            for f in (row[name] for name in names)
        ]
        head = [row["dataset"], row["drafter"], str(row["block_size"]), str(row["n"])]
        lines.append("| " + " | ".join([*head, *cells]) + " |")
    notes = ["Ratio: second over first on the same prompts; in brackets a 95 % interval over conversations."]
    notes += [f"Not alike: {name} {a} -> {b}." for name, (a, b) in rows[0]["differs"].items()]
    return "\n".join([*lines, "", *notes])


def failures(
    result: str | Path,
    *,
    min_speedup: float | None = None,
    min_mat: float | None = None,
    identical: bool = False,
) -> list[str]:
    """Why a result (rows.json, report.json or a folder of `dscout bench`) does not pass; empty: it does.

    Args:
        min_speedup, min_mat: asked of every drafter on every dataset, at the block size where it is fastest;
            apart for each dtype, temperature and concurrency.
        identical: every answer equal to plain decoding's through the same program, where that was measured,
            and to the plain baseline's otherwise.
    Raises:
        UserError: no result there, or nothing is asked of it.
    """
    path = Path(result)
    path = path / "rows.json" if path.is_dir() else path
    if min_speedup is None and min_mat is None and not identical:
        raise UserError("nothing to check: give --min-speedup, --min-mat or --identical")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        by_dataset: dict[tuple, list[dict[str, Any]]] = {}
        for row in rows:
            terms = row["temperature"], row["concurrency"]
            by_dataset.setdefault((row["dataset"], row["drafter"], row["dtype"], *terms), []).append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of `dscout bench` ({error})") from None
    reasons = [] if rows else ["it holds no rows"]
    for (dataset, drafter, dtype, temperature, concurrency), sizes in by_dataset.items():
        best = max(sizes, key=lambda row: row["speedup"])
        who = f"{drafter} on {dataset} in {dtype}"
        who += f", temperature {temperature:g}" if temperature else ""
        who += f", concurrency {concurrency}" if concurrency > 1 else ""
        where = f"{who} at B={best['block_size']}"
        for name, least in (("speedup", min_speedup), ("mat", min_mat)):
            if least is not None and best[name] < least:
                reasons.append(f"{where}: {name} {best[name]:.3f} is below {least:g}")
        for row in sizes if identical else []:
            same = row.get("identical_same_program", row["identical"])
            if same < row["n"]:
                reasons.append(f"{who} at B={row['block_size']}: {same} of {row['n']} answers identical")
    return reasons
