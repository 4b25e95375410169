"""Searches that train drafters and measure them: how deep, and how much of the target they are shown."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dscout_jax.config import default_target_layers
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from infer.load import dtype_of
from infer.pictures import save_search
from infer.records import Records
from infer.search import peak
from infer.tune import TuneSettings, digest, prepare, tune
from infer.workload import first_turns
from train.convert import open_target
from train.loop import train
from train.settings import TrainSettings, load_settings

Log = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Search:
    """How candidates are trained and measured.

    config: of the training, from which each candidate differs in what is searched and in its run folder.
    prompts: JSONL files that are decoded. steps, minutes: budget of each training; None: the config's.
    concurrency, dtype, block_sizes, max_new_tokens, limit, repeats: see TuneSettings.
    out: folder of the runs, of search.jsonl, which a second call goes on from, and of what comes of it.
    """

    config: Path
    prompts: tuple[Path, ...]
    steps: int | None = None
    minutes: float | None = None
    concurrency: int = 1
    dtype: str = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    max_new_tokens: int = 128
    limit: int = 32
    repeats: int = 3
    out: Path = Path("runs/search")
    cache_dir: Path | None = None

    def base(self) -> TrainSettings:
        """The settings that all candidates share. Raises UserError for a config that is none."""
        settings = load_settings(self.config)
        return settings if self.steps is None else dataclasses.replace(settings, steps=self.steps)


class Trials:
    """Candidates, trained and measured once each."""

    def __init__(self, search: Search, log: Log) -> None:
        self.search, self.log, self.base = search, log, search.base()
        if not search.prompts:
            raise UserError("give --prompts, the files that throughput is measured on")
        for path in search.prompts:
            first_turns(path)
        if not all(2 <= size <= self.base.block_size for size in search.block_sizes):
            sizes, own = search.block_sizes, self.base.block_size
            raise UserError(f"block sizes {sizes} are not from 2 to the config's {own}")
        budget = {"minutes": search.minutes, "concurrency": search.concurrency, "dtype": search.dtype}
        measured = {"new": search.max_new_tokens, "limit": search.limit, "sizes": search.block_sizes}
        setup = [self.base.contract(), self.base.data, budget, measured, list(map(str, search.prompts))]
        self._digest = digest(setup)
        self.records = Records(search.out / "search.jsonl", self._digest)
        self._targets: dict[str, LoadedTarget] = {}
        self._kept: dict[Any, dict] = {}
        self.rows: list[dict[str, Any]] = []

    def target(self, dtype: str) -> LoadedTarget:
        """Of the settings, read once a dtype."""
        if dtype not in self._targets:
            self._targets[dtype] = open_target(self.base.target, dtype_of(dtype), self.search.cache_dir)
        return self._targets[dtype]

    def measure(self, what: str, name: Any, order: int, changes: dict[str, Any]) -> float:
        """Trains the candidate and returns its throughput over plain decoding's, at its best block size.

        Plain decoding is timed beside it: candidates are hours apart, and the machine may have changed.
        B = 1 is no choice: drafters that lose to plain decoding would all look alike, and a search go astray.

        Args:
            changes: of the settings; they name the tapped layers.
        """
        search, key = self.search, (what, name, digest(changes))
        if key not in self.records:
            own = digest([self._digest, changes])[:6]
            run = search.out / f"{what}-{str(name).replace(' ', '-')}-{own}"
            settings = dataclasses.replace(self.base, **changes, run=str(run))
            # Candidates that ask the same of the target share what it answered.
            kept = self._kept.setdefault(settings.target_layer_ids, {}) if settings.cache_features else None
            self.log(f"{what} {name}: training")
            drafter = train(settings, self.target(settings.dtype), search.minutes, kept)
            tuning = TuneSettings(
                prompts=search.prompts,
                drafter=drafter,
                target=settings.target,
                dtype=search.dtype,
                block_sizes=search.block_sizes,
                concurrencies=(search.concurrency,),
                max_new_tokens=search.max_new_tokens,
                limit=search.limit,
                repeats=search.repeats,
                out=run / "tune",
                cache_dir=search.cache_dir,
            )
            policy = tune(prepare(tuning, self.target(search.dtype)), self.log)
            speeds = {
                b: policy.tokens_per_s(None, search.concurrency, b) for b in policy.sizes(None) if b > 1
            }
            size = max(sorted(speeds), key=speeds.get)
            plain = policy.tokens_per_s(None, search.concurrency, 1)
            found = {
                "mat": policy.model(None).mat(size),
                "round_ms": policy.latency.ms(search.concurrency, size),
                "block_size": size,
                "tokens_per_s": speeds[size],
                "plain_tokens_per_s": plain,
                "over_plain": speeds[size] / plain,
            }
            self.records.add(key, found)
        found = {k: v for k, v in self.records[key].items() if k not in ("setup", "key")}
        self.log(f"{what} {name}: {found['over_plain']:.3f} x plain decoding at B={found['block_size']}")
        self.rows.append({what: name, "order": order, **found})
        return found["over_plain"]

    def save(self, what: str, best: Any, reason: str) -> dict[str, Any]:
        """Writes search.json, .md, .png and .svg."""
        rows = sorted(self.rows, key=lambda row: row["order"])
        document = {"what": what, "best": best, "reason": reason, "rows": rows}
        save_search(document, self.search.out)
        return document


def tune_depth(search: Search, depths: tuple[int, ...], within: int = 1, log: Log = print) -> dict[str, Any]:
    """The number of drafter layers with the highest throughput, few of them trained: see `infer.search.peak`.

    All are shown the same layers of the target: the config's, or the default ones of the config's own depth.

    Raises:
        UserError: depths that do not ascend, or what training and tuning refuse.
    """
    if not depths or depths[0] < 1 or list(depths) != sorted(set(depths)):
        raise UserError(f"depths {depths} must be one or more, from 1 up, and ascend")
    if within < 0:
        raise UserError(f"within {within} must be 0 or more steps beside the best depth")
    trials = Trials(search, log)
    taps = trials.base.target_layer_ids
    if taps is None:
        layers = trials.target(search.dtype).config.num_layers
        taps = default_target_layers(layers, trials.base.num_layers)

    def measure(depth: int) -> float:
        return trials.measure("depth", depth, depth, {"num_layers": depth, "target_layer_ids": taps})

    found = peak(measure, depths, within)
    return trials.save("depth", found.best, found.reason)


def tune_taps(
    search: Search, counts: tuple[int | Literal["all"], ...], fusions: tuple[str, ...], log: Log = print
) -> dict[str, Any]:
    """Throughput, MAT and latency of drafters that are shown so many layers of the target, by each fusion.

    "all": every layer that can be tapped.

    Raises:
        UserError: more layers than the target has, or what training and tuning refuse.
    """
    numbers = sorted({count for count in counts if count != "all"})
    if not counts or min(numbers, default=1) < 1 or not fusions:
        raise UserError(
            f"counts of tapped layers {counts} and fusions {fusions} must be one or more, from 1 up"
        )
    trials = Trials(search, log)
    layers = trials.target(search.dtype).config.num_layers
    taps = {str(count): default_target_layers(layers, count) for count in numbers}
    if "all" in counts:
        taps["all"] = tuple(range(layers - 1))  # the last layer's output is seen after the final norm only
    candidates = {
        f"{count} {fusion}": {"target_layer_ids": ids, "fusion": fusion}
        for fusion in fusions
        for count, ids in taps.items()
    }
    scores = {
        name: trials.measure("taps", name, order, changes)
        for order, (name, changes) in enumerate(candidates.items())
    }
    best = max(scores, key=scores.get)
    return trials.save("taps", best, f"{best} is the fastest of {len(scores)}, all measured")


def say(document: dict[str, Any]) -> None:
    """The outcome, on standard output; a warning where plain decoding is faster, on standard error."""
    print(document["reason"])
    best = next(row for row in document["rows"] if row[document["what"]] == document["best"])
    if best["tokens_per_s"] <= best["plain_tokens_per_s"]:
        print("plain decoding is faster than every drafter measured; train longer first", file=sys.stderr)
