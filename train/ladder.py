"""Recipes against one another at equal data, steps, seeds and query budget, by the MAT that decoding gets."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dscout_jax.decode import Decoder, mat, mat_interval, prefix_survival
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, load_draft_ids, load_drafter, load_target
from dscout_jax.models import Drafter, Target
from train.loop import train
from train.prompts import load_prompts
from train.settings import TrainSettings, run_file
from train.step import Features

# A recipe may change how a drafter is trained, never how much of what it is trained on.
_OWN = {"objective", "block_size", "num_layers", "target_layer_ids", "init", "seeds"}


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Which recipes are compared, and on what.

    base: settings that all share; it names the data, and its query budget is everyone's.
    recipes: name -> changes to `base`: "objective", and where it differs "block_size", "init", ...; "seeds"
        in place of the ladder's.
    seeds: a recipe is trained with each.
    datasets: name -> JSONL of prompts that are decoded (fp32, greedy).
    block_sizes: B decoded at, where a recipe's drafter has it.
    out: without an ending; the runs lie in a folder of that name, .json, .md and .png beside it.
    """

    base: TrainSettings
    recipes: Mapping[str, Mapping[str, Any]]
    datasets: Mapping[str, str]
    out: str
    seeds: tuple[int, ...] = (0,)
    block_sizes: tuple[int, ...] = (16, 8, 4)
    limit: int | None = None
    max_new_tokens: int = 128
    rows: int = 32

    def __post_init__(self) -> None:
        if not self.base.query_budget:
            raise UserError("a ladder compares at equal query_budget; name one in its base settings")
        for name, changes in self.recipes.items():
            if wrong := set(changes) - _OWN:
                raise UserError(f"recipe {name!r} changes {sorted(wrong)}, which all recipes share")

    def runs(self) -> list[tuple[str, int]]:
        """(recipe, seed) of every run, one seed of all recipes before the next."""
        wanted = [(recipe, seed) for recipe in self.recipes for seed in self.seeds_of(recipe)]
        return sorted(wanted, key=lambda run: run[1])

    def seeds_of(self, recipe: str) -> tuple[int, ...]:
        """Seeds that a recipe is trained with."""
        return self.recipes[recipe].get("seeds", self.seeds)

    def settings(self, recipe: str, seed: int) -> TrainSettings:
        """Settings of one run."""
        changes = {k: v for k, v in self.recipes[recipe].items() if k != "seeds"}
        run = f"{self.out}/{recipe.replace(' ', '-')}-{seed}"
        return dataclasses.replace(self.base, **changes, seed=seed, run=run)


def load_ladder(path: str | Path) -> Ladder:
    """Runs a file and returns its `ladder`. Raises UserError when there is none."""
    ladder = run_file(path).get("ladder")
    if not isinstance(ladder, Ladder):
        raise UserError(f"{path} defines no `ladder = Ladder(...)`")
    return ladder


def climb(ladder: Ladder, cache_dir: str | Path | None = None) -> str:
    """Trains and decodes what is missing, and returns the table; a second call goes on where one stopped."""
    target = load_target(ladder.base.target, jnp.dtype(ladder.base.dtype), cache_dir)
    exact = target
    if jnp.dtype(ladder.base.dtype) != jnp.float32:
        exact = load_target(ladder.base.target, jnp.float32, cache_dir)
    out = Path(ladder.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    kept: dict[Any, dict[int, Features]] = {}
    for recipe, seed in tqdm(ladder.runs(), desc="ladder", disable=None):
        settings = ladder.settings(recipe, seed)
        # Recipes that ask the same of the target share what it answered.
        asks = (settings.target_layer_ids, settings.num_layers, settings.objective.sees_target)
        found = Path(settings.run) / "mat.json"
        if not found.is_file():
            drafter = train(settings, target, kept=kept.setdefault(asks, {}))
            measured = decoded(ladder, exact, drafter)
            found.write_text(json.dumps(measured) + "\n")
        about = {
            "target": target.name,
            "recipe": recipe,
            "seed": seed,
            "steps": settings.steps,
            "query_budget": settings.query_budget,
        }
        rows += [about | row for row in json.loads(found.read_text())]
        Path(f"{out}.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    text = table(rows)
    Path(f"{out}.md").write_text(text + "\n")
    plot(rows, Path(f"{out}.png"))
    return text


def decoded(ladder: Ladder, target: LoadedTarget, folder: Path) -> list[dict[str, Any]]:
    """MAT with a 95 % interval over prompts, and prefix survival, by dataset and block size."""
    config, params = load_drafter(folder, jnp.float32)
    rows = []
    for size in ladder.block_sizes:
        if size > config.block_size:
            continue
        decoder = Decoder(
            Target(target.config),
            target.params,
            Drafter(config),
            params,
            stop_ids=target.tokenizer.stop_ids,
            block_size=size,
            draft_ids=load_draft_ids(folder),
        )
        for name, path in ladder.datasets.items():
            turns = [turns[0] for _, turns in islice(load_prompts(path), ladder.limit)]
            prompts = [target.tokenizer.chat([{"role": "user", "content": text}]) for text in turns]
            accepted = [
                generation.accepted
                for start in range(0, len(prompts), ladder.rows)
                for generation in decoder.generate(
                    prompts[start : start + ladder.rows], ladder.max_new_tokens, rows=ladder.rows
                )
            ]
            low, high = mat_interval(accepted) or (1.0, 1.0)
            rows.append(
                {
                    "dataset": name,
                    "block_size": size,
                    "n": len(prompts),
                    "mat": mat(accepted),
                    "mat_low": low,
                    "mat_high": high,
                    "survival": prefix_survival(accepted, size),
                }
            )
    return rows


def _cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, list[float]]]:
    """(dataset, block size) -> recipe -> MAT of each seed."""
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in rows:
        cell = cells.setdefault((row["dataset"], row["block_size"]), {})
        cell.setdefault(row["recipe"], []).append(row["mat"])
    return cells


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Mean MAT over seeds with its range, a line a recipe; beside it the ratio to the first recipe."""
    cells = _cells(rows)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    heads = [f"{dataset} B={size}" for dataset, size in cells]
    lines = ["| recipe | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for recipe in recipes:
        texts = []
        for cell in cells.values():
            values, first = cell.get(recipe), next(iter(cell.values()))
            if values is None:
                texts.append("")
                continue
            mean = float(np.mean(values))
            texts.append(f"{mean:.2f} ({min(values):.2f}-{max(values):.2f}) x{mean / np.mean(first):.2f}")
        lines.append(f"| {recipe} | " + " | ".join(texts) + " |")
    seeds = len({row["seed"] for row in rows})
    note = f"MAT of greedy fp32 decoding: mean over {seeds} seed(s), smallest and largest, over the first."
    return "\n".join([*lines, "", note])


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """MAT of every seed by recipe, a panel for each dataset and block size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = _cells(rows)
    figure, axes = plt.subplots(1, len(cells), figsize=(3.2 * len(cells) + 1, 3.6), layout="constrained")
    for axis, ((dataset, size), cell) in zip(np.atleast_1d(axes), cells.items(), strict=True):
        for place, values in enumerate(cell.values()):
            axis.plot([place] * len(values), values, "o", markersize=4)
            axis.plot([place - 0.3, place + 0.3], [np.mean(values)] * 2, color="black", linewidth=1)
        axis.set_xticks(range(len(cell)), list(cell), rotation=45, ha="right", fontsize=8)
        axis.set(title=f"{dataset}, B = {size}", ylabel="MAT")
    figure.savefig(path, dpi=120)
    plt.close(figure)
