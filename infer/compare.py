"""Two benchmarks of the same prompts against one another, prompt by prompt; and a gate for one of them."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError
from infer.figures import COUNTS, FIGURES, totals

Cell = tuple[str, str, int]
"""(dataset, drafter, block size)."""

_SETTINGS = ("target_fingerprint", "dtype", "max_new_tokens", "thinking", "temperature", "concurrency")
_SETTINGS += ("plain_rows", "smaller", "min_confidence", "policy")
_DRAWS = ("seed", "top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True)
class Answer:
    """prompt: a digest of its ids. counts: COUNTS of the answer."""

    prompt: str
    counts: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Measured:
    """settings: of a row. answers: by conversation, then by turn."""

    settings: dict[str, Any]
    answers: dict[int, dict[int, Answer]]


def load_cells(result: str | Path) -> dict[Cell, Measured]:
    """What a result says of each dataset, drafter and block size: from the answers that its rows hold.

    Raises:
        UserError: no result there, rows without answers, or two of one dataset, drafter and block size.
    """
    path, document = _read(result)
    cells: dict[Cell, Measured] = {}
    for row in document["rows"]:
        try:
            cell = row["dataset"], row["drafter"], row["block_size"]
            found = row["answers"]
            columns = [found[name] for name in ("conversation", "turn", "prompt", *COUNTS)]
        except (KeyError, TypeError):
            raise UserError(
                f"{path} holds no answers: an older `dscout bench` wrote it; run it again"
            ) from None
        if cell in cells:
            name, drafter, size = cell
            raise UserError(
                f"{path} holds {drafter} B={size} on {name} twice; compare the folders that it was made of"
            )
        answers: dict[int, dict[int, Answer]] = {}
        for conversation, turn, prompt, *counts in zip(*columns, strict=True):
            answers.setdefault(conversation, {})[turn] = Answer(prompt, tuple(counts))
        names = (*_SETTINGS, *(_DRAWS if row.get("temperature") else ()))
        machine = {f"machine's {name}": value for name, value in document.get("machine", {}).items()}
        cells[cell] = Measured({name: row.get(name) for name in names} | machine, answers)
    return cells


def _read(result: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(result)
    path = path / "rows.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document["rows"], list):
            raise TypeError("its rows are no list")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no result of `dscout bench` ({error}); one that was killed needs to be run to its end"
        ) from None
    return path, document


def _renamed(cells: dict[Cell, Any], others: dict[Cell, Any]) -> dict[Cell, Any]:
    """A lone drafter competes with the lone drafter of the other side, whatever they are called."""
    mine, theirs = {name for _, name, _ in cells}, {name for _, name, _ in others}
    if len(mine) != 1 or len(theirs) != 1:
        return cells
    (name,) = theirs
    return {(dataset, name, size): found for (dataset, _, size), found in cells.items()}


def compare(first: str | Path, second: str | Path, draws: int = 2000) -> list[dict[str, Any]]:
    """MAT, tau, tokens/s and speed-up of two results, over the prompts that both measured.

    Args:
        first, second: rows.json, report.json or the folder of `dscout bench`.
    Returns:
        A row for each dataset, drafter and block size in both (drafters go by their names; one on each side
        are compared under any): n answers, and for each figure its two values, their ratio (second / first)
        and difference (second - first), each with a 95 % interval from resampling conversations, the same
        ones on both sides; `differs`: settings of the two that are not alike, each with its two values. A
        later turn counts while both sides were asked the same: it follows plain decoding's own answers, which
        another dtype or target may change. Of queues, seconds are the answers' own, in company.
    Raises:
        UserError: nothing in common, the same number is another prompt in each, or another concurrency.
    """
    a = load_cells(first)
    b = _renamed(load_cells(second), a)
    rows = []
    for cell in [cell for cell in a if cell in b]:
        sides = a[cell], b[cell]
        before, after = (side.settings for side in sides)
        names = dict.fromkeys([*before, *after])
        differs = {k: [before.get(k), after.get(k)] for k in names if before.get(k) != after.get(k)}
        if "concurrency" in differs:
            slots = " and ".join(map(str, differs["concurrency"]))
            raise UserError(f"measured at concurrency {slots}: their seconds are not of one kind")
        both = sorted(set(sides[0].answers) & set(sides[1].answers))
        turns = {i: _common_turns(*(side.answers[i] for side in sides)) for i in both}
        for i in both:
            if not turns[i]:
                raise UserError(f"prompt {i} of {cell[0]!r} is another one in {second} than in {first}")
        if not both:
            continue
        each = [
            np.array([totals([side.answers[i][turn].counts for turn in turns[i]]) for i in both])
            for side in sides
        ]
        pick = np.random.default_rng(0).integers(0, len(both), (draws, len(both)))
        row: dict[str, Any] = {"dataset": cell[0], "drafter": cell[1], "block_size": cell[2]}
        row |= {"n": sum(map(len, turns.values())), "differs": differs}
        for name, figure in FIGURES.items():
            value, later = (float(figure(side.sum(axis=0))) for side in each)
            drawn = [figure(side[pick].sum(axis=1)) for side in each]
            low, high = np.quantile(drawn[1] / np.maximum(drawn[0], 1e-12), [0.025, 0.975])
            least, most = np.quantile(drawn[1] - drawn[0], [0.025, 0.975])
            row[name] = {
                "first": value,
                "second": later,
                "ratio": later / value if value else float("nan"),
                "low": float(low),
                "high": float(high),
                "difference": later - value,
                "difference_low": float(least),
                "difference_high": float(most),
            }
        rows.append(row)
    if not rows:
        raise UserError(
            f"{first} and {second} measured no dataset at the same block size by the same drafter"
        )
    return rows


def _common_turns(mine: dict[int, Answer], theirs: dict[int, Answer]) -> list[int]:
    """The turns up to the first that both were not asked alike."""
    turns = []
    for turn in range(len(mine)):
        if turn not in mine or turn not in theirs or mine[turn].prompt != theirs[turn].prompt:
            break
        turns.append(turn)
    return turns


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line a figure, with its ratio, its difference and their intervals."""
    heads = ("dataset", "drafter", "B", "n", "figure", "first", "second", "ratio", "difference")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        for name in FIGURES:
            f = row[name]
            cells = [row["dataset"], row["drafter"], row["block_size"], row["n"], name]
            cells += [f"{f['first']:.2f}", f"{f['second']:.2f}"]
            cells.append(f"x{f['ratio']:.3f} ({f['low']:.3f} to {f['high']:.3f})")
            cells.append(
                f"{f['difference']:+.2f} ({f['difference_low']:+.2f} to {f['difference_high']:+.2f})"
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    notes = [
        "Ratio: second over first on the same prompts; difference: second less first; in brackets 95 % "
        "intervals over conversations."
    ]
    notes += dict.fromkeys(
        f"Not alike: {name} {a} -> {b}." for row in rows for name, (a, b) in row["differs"].items()
    )
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
        UserError: no result there, one without what is asked of it, or nothing is asked.
    """
    if min_speedup is None and min_mat is None and not identical:
        raise UserError("nothing to check: give --min-speedup, --min-mat or --identical")
    path, document = _read(result)
    rows = document["rows"]
    wanted = ["dataset", "drafter", "dtype", "temperature", "concurrency", "block_size", "speedup"]
    wanted += ["mat"] if min_mat is not None else []
    wanted += ["identical", "n"] if identical else []
    for number, row in enumerate(rows):
        missing = [name for name in wanted if not isinstance(row, dict) or row.get(name) is None]
        if missing:
            raise UserError(f"{path}: row {number} is no result of `dscout bench`: no {', '.join(missing)}")
    by_dataset: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        terms = row["temperature"], row["concurrency"]
        by_dataset.setdefault((row["dataset"], row["drafter"], row["dtype"], *terms), []).append(row)
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
