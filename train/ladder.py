"""Recipes against one another at equal data, steps, seeds and query budget, by the MAT that decoding gets."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from dscout_jax.decode import Decoder, mat, mat_interval, prefix_survival
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, load_draft_ids, load_drafter, load_target
from dscout_jax.models import Drafter, Target
from train.dataset import load_rows
from train.ladder_page import page, publish
from train.loop import train
from train.prepare import run_contract
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
    datasets: name -> JSONL of prompts that are decoded (greedy, in the dtype of `base`).
    block_sizes: B decoded at, where a recipe's drafter has it.
    limit: first prompts of each file, None: all. rows: decoded together.
    out: without an ending; the runs lie in a folder of that name, .json, .md and .png beside it.
    target_name: what the rows call the target; None: as its folder is called.
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
    target_name: str | None = None

    def __post_init__(self) -> None:
        if not self.base.query_budget:
            raise UserError("a ladder compares at equal query_budget; name one in its base settings")
        for name, changes in self.recipes.items():
            if wrong := set(changes) - _OWN:
                raise UserError(f"recipe {name!r} changes {sorted(wrong)}, which all recipes share")
        blocks = [changes.get("block_size", self.base.block_size) for changes in self.recipes.values()]
        if not any(size <= block for size in self.block_sizes for block in blocks):
            raise UserError(f"no recipe's drafter has blocks of any of the sizes {self.block_sizes}")

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


def climb(
    ladder: Ladder, cache_dir: str | Path | None = None, shard: tuple[int, int] = (0, 1)
) -> list[dict[str, Any]]:
    """Trains and decodes what is missing, publishes it and returns the rows.

    A second call goes on where one stopped. What a run measured is taken from its mat.json where run and
    measurement are still the same; where not, a finished run is decoded again.

    shard: (i, n) does every n-th run from the i-th on, counted from 0, so that n processes may climb one
        ladder. Only a call for all runs publishes, and it trains what the others have not.

    Raises:
        UserError: a run was made under another contract; what differs and its folder are named. Or a shard
            that is not one of n.
    """
    i, n = shard
    if not 0 <= i < n:
        raise UserError(f"shard {i}/{n}: shards of {n} count from 0 to {n - 1}")
    target = load_target(ladder.base.target, jnp.dtype(ladder.base.dtype), cache_dir)
    prompts = {name: _prompts(path, target, ladder.limit) for name, path in ladder.datasets.items()}
    measurement = {
        "prompts": {
            name: hashlib.sha256(json.dumps(ids).encode()).hexdigest() for name, ids in prompts.items()
        },
        "block_sizes": list(ladder.block_sizes),
        "max_new_tokens": ladder.max_new_tokens,
    }
    digest = load_rows(ladder.base.data, ladder.base.seq_len, ladder.base.heldout).digest
    rows: list[dict[str, Any]] = []
    kept: dict[Any, dict[int, Features]] = {}
    for recipe, seed in tqdm(ladder.runs()[i::n], desc="ladder", disable=None):
        settings = ladder.settings(recipe, seed)
        of = {"contract": run_contract(settings, target.fingerprint, digest), "measurement": measurement}
        path = Path(settings.run) / "mat.json"
        measured = _measured(path, of)
        new = measured is None
        if new:
            # Recipes that ask the same of the target share what it answered.
            asks = (settings.target_layer_ids, settings.num_layers, settings.objective.sees_target)
            # A finished run is not trained again: its contract is compared, and that is all.
            drafter = train(settings, target, kept=kept.setdefault(asks, {}))
            measured = decoded(ladder, target, drafter, prompts)
            whole = path.with_suffix(".part")
            whole.write_text(json.dumps(of | {"rows": measured}) + "\n")
            whole.replace(path)
        about = {
            "target": ladder.target_name or target.name,
            "recipe": recipe,
            "seed": seed,
            "steps": settings.steps,
            "query_budget": settings.query_budget,
        }
        rows += [about | row for row in measured]
        if new and rows and n == 1:
            publish(rows, ladder.out)
    if n == 1:
        publish(rows, ladder.out)
    return rows


def climb_all(
    files: Sequence[str | Path],
    out: str | Path | None = None,
    cache_dir: str | Path | None = None,
    shard: tuple[int, int] = (0, 1),
) -> str:
    """Climbs the ladders of several files and returns a page of all; writes it as `out`.json, .md and .png.

    Raises:
        UserError: no file, or an `out` for a shard; or as `load_ladder`, `climb` and `publish`.
    """
    if not files:
        raise UserError("name at least one file that defines a ladder; see configs/ladder/lab.py")
    if out is not None and shard[1] > 1:
        raise UserError(f"{out} is to hold all runs, not those of one shard: leave out one of the two")
    ladders = [load_ladder(path) for path in files]
    rows = [row for ladder in ladders for row in climb(ladder, cache_dir, shard)]
    return page(rows) if out is None else publish(rows, out)


def _measured(path: Path, of: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of a mat.json that are of this run and this measurement; None where there are none."""
    if not path.is_file():
        return None
    found = json.loads(path.read_text())
    # Files of before were the rows alone and do not say what they are of.
    if not isinstance(found, dict) or {name: found[name] for name in of} != of:
        return None
    return found["rows"]


def _prompts(path: str, target: LoadedTarget, limit: int | None) -> list[list[int]]:
    asked = [turns[0] for _, turns in islice(load_prompts(path), limit)]
    return [target.tokenizer.chat([{"role": "user", "content": text}]) for text in asked]


def decoded(
    ladder: Ladder, target: LoadedTarget, folder: Path, prompts: Mapping[str, Sequence[list[int]]]
) -> list[dict[str, Any]]:
    """MAT with a 95 % interval over prompts, and prefix survival, by dataset and block size."""
    config, params = load_drafter(folder, jnp.dtype(ladder.base.dtype))
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
        for name, asked in prompts.items():
            accepted = [
                generation.accepted
                for start in range(0, len(asked), ladder.rows)
                for generation in decoder.generate(
                    asked[start : start + ladder.rows], ladder.max_new_tokens, rows=ladder.rows
                )
            ]
            low, high = mat_interval(accepted) or (1.0, 1.0)
            rows.append(
                {
                    "dataset": name,
                    "block_size": size,
                    "n": len(asked),
                    "mat": mat(accepted),
                    "mat_low": low,
                    "mat_high": high,
                    "survival": prefix_survival(accepted, size),
                }
            )
    return rows
