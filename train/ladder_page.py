"""What ladders found, as JSON, a page of tables and a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError

Row = Mapping[str, Any]
"""One measurement: target, recipe, seed, dataset, block_size, mat, mat_low, mat_high, survival, ..."""
Cell = dict[str, dict[int, Row]]
"""Recipe -> seed -> row, of one target, dataset and block size."""

READING = "\n## Reading\n"
"""From here on a page is somebody's, and a ladder climbed again leaves it as it is."""


def publish(rows: Sequence[Row], out: str | Path) -> str:
    """Writes `out`.json, .md and .png, and returns the page; keeps what is under `READING` in `out`.md.

    Raises:
        UserError: two rows measure the same.
    """
    cells, text, out = _cells(rows), page(rows), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n")
    written = Path(f"{out}.md")
    _, mark, reading = (written.read_text() if written.is_file() else "").partition(READING)
    written.write_text(f"{text}\n{mark}{reading}")
    _plot(cells, _targets(rows), Path(f"{out}.png"))
    return text


def page(rows: Sequence[Row]) -> str:
    """The tables of every target."""
    targets = _targets(rows)
    parts = [table([row for row in rows if row["target"] == target]) for target in targets]
    if len(targets) > 1:
        parts = [f"## {target}\n\n{part}" for target, part in zip(targets, parts, strict=True)]
    return "\n\n".join(parts)


def _targets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["target"] for row in rows))


def table(rows: Sequence[Row]) -> str:
    """MAT and per-slot acceptance of a target's rows, a line a recipe; ratios are to the first recipe."""
    cells = _cells(rows)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    heads = ["recipe", "seeds", *(f"{dataset} B={size}" for _, dataset, size in cells)]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for recipe in recipes:
        seeds = {row["seed"] for row in rows if row["recipe"] == recipe}
        lines.append(
            _line([recipe, len(seeds), *(_mat(cell, recipe, recipes[0]) for cell in cells.values())])
        )
    note = (
        "MAT of greedy decoding: mean over the recipe's seeds (smallest-largest seed) [95 % interval "
        "over prompts: the mean of each seed's ends]; x: over the first recipe's, on seeds that both have "
        "(smallest-largest ratio of a seed)."
    )
    return "\n".join([*lines, "", note, "", *_survival(cells, recipes)])


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cells(rows: Sequence[Row]) -> dict[tuple[str, str, int], Cell]:
    """(target, dataset, block size) -> its cell."""
    cells: dict[tuple[str, str, int], Cell] = {}
    for row in rows:
        where = (row["target"], row["dataset"], row["block_size"])
        seeds = cells.setdefault(where, {}).setdefault(row["recipe"], {})
        if row["seed"] in seeds:
            raise UserError(
                f"recipe {row['recipe']!r}, seed {row['seed']}, occurs twice for {where}: the ladders of two "
                "targets need a `target_name` each"
            )
        seeds[row["seed"]] = row
    return cells


def _mean(cell: Cell, recipe: str, what: str, seeds: Sequence[int] | None = None) -> float:
    return float(np.mean([cell[recipe][seed][what] for seed in seeds or cell[recipe]]))


def _mat(cell: Cell, recipe: str, first: str) -> str:
    if recipe not in cell:
        return ""
    mats = [row["mat"] for row in cell[recipe].values()]
    low, high = (_mean(cell, recipe, end) for end in ("mat_low", "mat_high"))
    text = f"{np.mean(mats):.2f} ({min(mats):.2f}-{max(mats):.2f}) [{low:.2f}, {high:.2f}]"
    shared = [seed for seed in cell[recipe] if seed in cell.get(first, {})]
    if not shared:
        return text
    text += f" x{_mean(cell, recipe, 'mat', shared) / _mean(cell, first, 'mat', shared):.2f}"
    if recipe == first or len(shared) == 1:
        return text
    ratios = [cell[recipe][seed]["mat"] / cell[first][seed]["mat"] for seed in shared]
    return f"{text} ({min(ratios):.2f}-{max(ratios):.2f})"


def _survival(cells: Mapping[tuple[str, str, int], Cell], recipes: Sequence[str]) -> list[str]:
    """Lines of S_1, S_2, ... of each recipe at the largest block that was decoded with its drafter."""
    largest: dict[tuple[str, str], tuple[int, Cell]] = {}
    for (_, dataset, size), cell in cells.items():
        for recipe in cell:
            if size > largest.get((recipe, dataset), (0, {}))[0]:
                largest[recipe, dataset] = size, cell
    slots = range(1, max(size for size, _ in largest.values()))
    heads = ["first k drafts accepted, k =", "dataset", "B", *slots]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for recipe, dataset in sorted(largest, key=lambda key: recipes.index(key[0])):
        size, cell = largest[recipe, dataset]
        means = np.mean([row["survival"] for row in cell[recipe].values()], axis=0)
        texts = [f"{mean:.2f}".removeprefix("0") for mean in means]
        lines.append(_line([recipe, dataset, size, *texts, *[""] * (len(slots) - len(texts))]))
    return lines


def _plot(cells: Mapping[tuple[str, str, int], Cell], targets: Sequence[str], path: Path) -> None:
    """MAT of every seed by recipe: a row of panels for each target, one for each dataset and block size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {target: [where for where in cells if where[0] == target] for target in targets}
    shape = (len(targets), max(map(len, panels.values())))
    size = (3.2 * shape[1] + 1, 3.8 * shape[0])
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
    for target, row in zip(targets, axes, strict=True):
        for axis in row[len(panels[target]) :]:
            axis.set_axis_off()
        for axis, where in zip(row, panels[target], strict=False):
            for place, seeds in enumerate(cells[where].values()):
                mats = [found["mat"] for found in seeds.values()]
                axis.plot([place] * len(mats), mats, "o", markersize=4)
                axis.plot([place - 0.3, place + 0.3], [np.mean(mats)] * 2, color="black", linewidth=1)
            axis.set_xticks(range(len(cells[where])), list(cells[where]), rotation=45, ha="right", fontsize=8)
            axis.set(title=f"{target}: {where[1]}, B = {where[2]}", ylabel="MAT")
    figure.savefig(path, dpi=120)
    plt.close(figure)
