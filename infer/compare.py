"""Two benchmarks of the same prompts against one another, prompt by prompt; and a gate for one of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import read_jsonl

Cell = tuple[str, int]
"""(dataset, block size)."""


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
        if len(key) == 4 and key[2] == "speculative":
            dataset, index, _, size = key
            plain = found[dataset, index, "plain", 0]
            cells.setdefault((dataset, size), {})[index] = row | {"plain": plain}
    return cells


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
        A row for each dataset and block size in both: n, and for each figure its two values, their ratio
        and the ratio's 95 % interval from resampling prompts, the same ones on both sides.
    Raises:
        UserError: nothing in common, or the same index is another prompt in each.
    """
    a, b = load_cells(first), load_cells(second)
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
        row: dict[str, Any] = {"dataset": cell[0], "block_size": cell[1], "n": len(both)}
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
        raise UserError(f"{first} and {second} measured no dataset at the same block size")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: first -> second, their ratio and its interval."""
    names = list(FIGURES)
    lines = ["| dataset | B | n | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for row in rows:
        cells = [
            f"{f['first']:.2f} -> {f['second']:.2f} (x{f['ratio']:.3f}, {f['low']:.3f} to {f['high']:.3f})"
            for f in (row[name] for name in names)
        ]
        lines.append(f"| {row['dataset']} | {row['block_size']} | {row['n']} | " + " | ".join(cells) + " |")
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
        min_speedup, min_mat: asked of every dataset, at the block size where it is fastest.
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
            by_dataset.setdefault((row["dataset"], row["dtype"]), []).append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of `dscout bench` ({error})") from None
    reasons = [] if rows else ["it holds no rows"]
    for (dataset, dtype), sizes in by_dataset.items():
        best = max(sizes, key=lambda row: row["speedup"])
        where = f"{dataset} in {dtype} at B={best['block_size']}"
        for name, least in (("speedup", min_speedup), ("mat", min_mat)):
            if least is not None and best[name] < least:
                reasons.append(f"{where}: {name} {best[name]:.3f} is below {least:g}")
        for row in sizes if identical else []:
            same = row.get("identical_same_program", row["identical"])
            if same < row["n"]:
                reasons.append(
                    f"{dataset} in {dtype} at B={row['block_size']}: {same} of {row['n']} answers identical"
                )
    return reasons
