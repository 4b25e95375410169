"""Two benchmarks of the same prompts against one another, prompt by prompt; and a gate for one of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import read_jsonl

Cell = tuple[str, str, int]
"""(dataset, drafter, block size)."""


def load_cells(folder: str | Path) -> dict[Cell, dict[int, dict[str, Any]]]:
    """What `dscout bench` recorded last in a folder: cell -> prompt index -> its speculative record.

    A record gets `plain`, the plain record of its prompt.

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
    cells: dict[Cell, dict[int, dict[str, Any]]] = {}
    for key, row in found.items():
        if key[2:3] == ("speculative",):
            dataset, index, _, drafter, size = key
            cell = (dataset, drafter.rpartition("@")[0], size)
            cells.setdefault(cell, {})[index] = row | {"plain": found[dataset, index, "plain"]}
    return cells


def _renamed(cells: dict[Cell, Any], others: dict[Cell, Any]) -> dict[Cell, Any]:
    """A lone drafter competes with the lone drafter of the other side, whatever they are called."""
    mine, theirs = {name for _, name, _ in cells}, {name for _, name, _ in others}
    if len(mine) != 1 or len(theirs) != 1:
        return cells
    (name,) = theirs
    return {(dataset, name, size): found for (dataset, _, size), found in cells.items()}


def _totals(records: Sequence[dict[str, Any]]) -> np.ndarray:
    """[n, 5]: committed tokens, rounds, seconds; tokens and seconds of plain decoding."""
    return np.array(
        [
            [
                sum(r["accepted"]) + len(r["accepted"]),
                len(r["accepted"]),
                r["decode_seconds"],
                len(r["plain"]["tokens"]) - 1,
                r["plain"]["decode_seconds"],
            ]
            for r in records
        ],
        float,
    )


# Of summed totals [..., 5]; what never ran counts as nothing.
FIGURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mat": lambda t: t[..., 0] / np.maximum(t[..., 1], 1),
    "tokens_per_s": lambda t: t[..., 0] / np.maximum(t[..., 2], 1e-12),
    "speedup": lambda t: t[..., 0] / np.maximum(t[..., 2], 1e-12) * t[..., 4] / np.maximum(t[..., 3], 1),
}


def compare(first: str | Path, second: str | Path, draws: int = 2000) -> list[dict[str, Any]]:
    """Ratios second / first of MAT, tokens/s and speed-up, over the prompts that both measured.

    Returns:
        A row for each dataset, drafter and block size in both (drafters go by their names; one on each side
        are compared under any): n, and for each figure its two values, their ratio
        and the ratio's 95 % interval from resampling prompts, the same ones on both sides.
    Raises:
        UserError: nothing in common, or the same index is another prompt in each.
    """
    a, b = load_cells(first), load_cells(second)
    b = _renamed(b, a)
    rows = []
    for cell in [cell for cell in a if cell in b]:
        both = sorted(set(a[cell]) & set(b[cell]))
        for i in both:
            if a[cell][i]["prompt_tokens"] != b[cell][i]["prompt_tokens"]:
                raise UserError(f"prompt {i} of {cell[0]!r} is another one in {second} than in {first}")
        if not both:
            continue
        sides = [_totals([side[cell][i] for i in both]) for side in (a, b)]
        pick = np.random.default_rng(0).integers(0, len(both), (draws, len(both)))
        row: dict[str, Any] = {"dataset": cell[0], "drafter": cell[1], "block_size": cell[2], "n": len(both)}
        for name, figure in FIGURES.items():
            before, after = (float(figure(side.sum(axis=0))) for side in sides)
            drawn = [figure(side[pick].sum(axis=1)) for side in sides]
            low, high = np.quantile(drawn[1] / np.maximum(drawn[0], 1e-12), [0.025, 0.975])
            row[name] = {
                "first": before,
                "second": after,
                "ratio": after / before if before else float("nan"),
                "low": float(low),
                "high": float(high),
            }
        rows.append(row)
    if not rows:
        raise UserError(
            f"{first} and {second} measured no dataset at the same block size by the same drafter"
        )
    return rows


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
    note = "Ratio: second over first on the same prompts; in brackets a 95 % interval over prompts."
    return "\n".join([*lines, "", note])


def failures(
    result: str | Path,
    *,
    min_speedup: float | None = None,
    min_mat: float | None = None,
    identical: bool = False,
) -> list[str]:
    """Why a result (rows.json, report.json or a folder of `dscout bench`) does not pass; empty: it does.

    Args:
        min_speedup, min_mat: asked of every drafter on every dataset, at the block size where it is fastest.
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
            by_dataset.setdefault((row["dataset"], row["drafter"], row["dtype"]), []).append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of `dscout bench` ({error})") from None
    reasons = [] if rows else ["it holds no rows"]
    for (dataset, drafter, dtype), sizes in by_dataset.items():
        best = max(sizes, key=lambda row: row["speedup"])
        who = f"{drafter} on {dataset} in {dtype}"
        where = f"{who} at B={best['block_size']}"
        for name, least in (("speedup", min_speedup), ("mat", min_mat)):
            if least is not None and best[name] < least:
                reasons.append(f"{where}: {name} {best[name]:.3f} is below {least:g}")
        for row in sizes if identical else []:
            same = row.get("identical_same_program", row["identical"])
            if same < row["n"]:
                reasons.append(f"{who} at B={row['block_size']}: {same} of {row['n']} answers identical")
    return reasons
