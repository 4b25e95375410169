"""The block size to decode with: measured acceptance over measured latency, by workload and concurrency.

    throughput(B; workload, C) = C * MAT(B) / t(B; C),    MAT(B) = 1 + sum_{k<B} S_k

One logged run at the drafter's largest size gives S_k, hence MAT at every size; only latency needs a sweep.
B = 1 is plain decoding and always a choice, so that a policy never decodes slower than that.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.decode import prefix_survival
from dscout_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class MatModel:
    """MAT of a workload at every block size.

    survival: S_k for k = 1..B_max-1. low, high: of each, a 95 % interval over answers. mat_low, mat_high: of
        MAT at block sizes 2..B_max, likewise: not the sums of `low` and `high`, which are wider, as slots do
        not all fall low together. rounds: counted.
    """

    survival: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    mat_low: tuple[float, ...]
    mat_high: tuple[float, ...]
    rounds: int

    @classmethod
    def fit(cls, accepted: Sequence[Sequence[int]], block_size: int, draws: int = 500) -> "MatModel":
        """From the accepted drafts of every round of every answer, decoded with `block_size` slots.

        Raises:
            UserError: not one round.
        """
        rounds = np.array([len(answer) for answer in accepted])
        if not rounds.sum():
            raise UserError("no rounds to learn acceptance from; decode longer answers")
        slots = np.arange(1, block_size)
        reached = np.array(
            [(np.array(a)[:, None] >= slots).sum(0) if len(a) else 0 * slots for a in accepted]
        )
        pick = np.random.default_rng(0).integers(0, len(rounds), (draws, len(rounds)))
        drawn = reached[pick].sum(axis=1) / np.maximum(rounds[pick].sum(axis=1), 1)[:, None]
        bounds = [
            tuple(bound.tolist())
            for values in (drawn, 1 + drawn.cumsum(axis=1))
            for bound in np.quantile(values, [0.025, 0.975], axis=0)
        ]
        return cls(tuple(prefix_survival(accepted, block_size)), *bounds, int(rounds.sum()))

    @classmethod
    def mean(cls, models: Sequence["MatModel"]) -> "MatModel":
        """Of workloads in equal shares of the rounds, as far as all of them go; intervals by their ends."""
        names = ("survival", "low", "high", "mat_low", "mat_high")
        columns = (zip(*(getattr(m, name) for m in models), strict=False) for name in names)
        means = (tuple(float(np.mean(values)) for values in column) for column in columns)
        return cls(*means, sum(m.rounds for m in models))

    @property
    def block_size(self) -> int:
        """The largest size that it speaks of."""
        return len(self.survival) + 1

    def mat(self, block_size: int) -> float:
        """Predicted MAT. Raises UserError beyond the size that was logged."""
        if not 1 <= block_size <= self.block_size:
            raise UserError(f"block size {block_size} was not logged; sizes 1 to {self.block_size} were")
        return 1.0 + sum(self.survival[: block_size - 1])


@dataclasses.dataclass(frozen=True)
class LatencyModel:
    """Milliseconds of a round; block size 1 is a step of plain decoding.

    points: (concurrency, block size) -> ms, as measured, a full grid. spread: of each the least and the most
        measured, where that is known.
    """

    points: Mapping[tuple[int, int], float]
    spread: Mapping[tuple[int, int], tuple[float, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        grid = {(c, b) for c in self.concurrencies for b in self.block_sizes}
        if missing := grid - set(self.points):
            raise UserError(f"latencies at (concurrency, block size) {sorted(missing)} were not measured")
        if not self.points or min(self.points.values()) <= 0:
            raise UserError("latencies must be measured and above 0")

    @property
    def concurrencies(self) -> list[int]:
        """Measured ones, ascending."""
        return sorted({c for c, _ in self.points})

    @property
    def block_sizes(self) -> list[int]:
        """Measured ones, ascending."""
        return sorted({b for _, b in self.points})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each measured point, with its spread."""
        rows = []
        for (c, b), ms in sorted(self.points.items()):
            low, high = self.spread.get((c, b), (None, None))
            rows.append({"concurrency": c, "block_size": b, "ms": ms, "low": low, "high": high})
        return rows

    def ms(self, concurrency: int, block_size: int) -> float:
        """A measured point, or the straight line between its measured neighbours.

        Raises:
            UserError: outside what was measured; nothing is extrapolated.
        """
        wanted = (
            (concurrency, self.concurrencies, "concurrency"),
            (block_size, self.block_sizes, "block size"),
        )
        for value, measured, name in wanted:
            if not measured[0] <= value <= measured[-1]:
                raise UserError(f"{name} {value} lies outside the measured {measured[0]} to {measured[-1]}")
        by_size = [
            np.interp(concurrency, self.concurrencies, [self.points[c, b] for c in self.concurrencies])
            for b in self.block_sizes
        ]
        return float(np.interp(block_size, self.block_sizes, by_size))


@dataclasses.dataclass(frozen=True)
class Policy:
    """What was measured of one drafter on one machine, and what follows from it.

    about: target and drafter fingerprints, dtype, sampling, capacity of the caches, machine. workloads: by
        name. latency: of this machine.
    plain_rows: concurrency -> the faster form of plain decoding (see `Decoder.plain`), where measured.
    """

    about: Mapping[str, Any]
    workloads: Mapping[str, MatModel]
    latency: LatencyModel
    plain_rows: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def plain_rows_at(self, concurrency: int) -> int:
        """Of the nearest measured concurrency; 1 where none was."""
        nearest = min(self.plain_rows, key=lambda c: abs(c - concurrency), default=None)
        return 1 if nearest is None else self.plain_rows[nearest]

    def model(self, workload: str | None) -> MatModel:
        """None: all workloads in equal shares. Raises UserError for one that was not measured."""
        if workload is None:
            return MatModel.mean(list(self.workloads.values()))
        if workload not in self.workloads:
            raise UserError(f"workload {workload!r} is unknown; known: {', '.join(self.workloads)}")
        return self.workloads[workload]

    def tokens_per_s(self, workload: str | None, concurrency: int, block_size: int) -> float:
        """Predicted, all rows together."""
        mat = self.model(workload).mat(block_size)
        return 1e3 * concurrency * mat / self.latency.ms(concurrency, block_size)

    def best(self, workload: str | None, concurrency: int) -> int:
        """The measured block size with the highest predicted throughput; of equals the smaller."""
        return max(
            self.sizes(workload), key=lambda size: (self.tokens_per_s(workload, concurrency, size), -size)
        )

    def sizes(self, workload: str | None) -> list[int]:
        """Block sizes to choose from."""
        return [b for b in self.latency.block_sizes if b <= self.model(workload).block_size]

    def few_sizes(self, concurrency: int, most: int = 4) -> tuple[int, ...]:
        """Sizes for a decoder that chooses as it learns: 1, each workload's best and the largest, ascending.

        Each is one more draft and one more verification to compile; of more than `most` those are left out
        that the workloads miss least.
        """
        best = [self.best(workload, concurrency) for workload in self.workloads]
        sizes = {1, *best, max(self.sizes(None))}

        def left(without: int) -> float:
            def speed(workload: str, size: int) -> float:
                return self.tokens_per_s(workload, concurrency, size)

            rest = sizes - {without}
            tops = zip(self.workloads, best, strict=True)
            return sum(max(speed(w, b) for b in rest) / speed(w, top) for w, top in tops)

        while len(sizes) > most:
            sizes.remove(max(sorted(sizes - {1}), key=left))
        return tuple(sorted(sizes))

    def table(self) -> list[dict[str, Any]]:
        """A row for each workload, measured concurrency and block size; the best of a cell is `chosen`."""
        rows = []
        for workload, model in self.workloads.items():
            for concurrency in self.latency.concurrencies:
                best = self.best(workload, concurrency)
                for size in self.sizes(workload):
                    rows.append(
                        {
                            "workload": workload,
                            "concurrency": concurrency,
                            "block_size": size,
                            "mat_predicted": model.mat(size),
                            "tokens_per_s_predicted": self.tokens_per_s(workload, concurrency, size),
                            "chosen": size == best,
                        }
                    )
        return rows

    def save(self, path: str | Path) -> Path:
        """Writes JSON: what was measured, and the table for people to read."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "about": dict(self.about),
            "workloads": {name: dataclasses.asdict(model) for name, model in self.workloads.items()},
            "latency": self.latency.rows(),
            "plain_rows": {str(c): rows for c, rows in self.plain_rows.items()},
            "table": self.table(),
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return path


def load_policy(path: str | Path) -> Policy:
    """Reads what `Policy.save` wrote.

    Raises:
        UserError: no such file, or no policy.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is no file; make it with `dscout tune`")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        workloads = {
            name: MatModel(**{k: tuple(v) if isinstance(v, list) else v for k, v in model.items()})
            for name, model in document["workloads"].items()
        }
        measured = {(p["concurrency"], p["block_size"]): p for p in document["latency"]}
        points = {at: p["ms"] for at, p in measured.items()}
        spread = {at: (p["low"], p["high"]) for at, p in measured.items() if p["low"] is not None}
        rows = {int(concurrency): count for concurrency, count in document["plain_rows"].items()}
        return Policy(document["about"], workloads, LatencyModel(points, spread), rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no policy file ({type(error).__name__}: {error})") from None


def gain_over_fixed(
    rows: Sequence[Mapping[str, Any]], key: str = "tokens_per_s_predicted"
) -> tuple[int, float]:
    """(the best single block size, mean gain of the chosen sizes over it), over all cells of a table.

    The best single size is the one with the highest mean throughput relative to each cell's chosen one.
    """
    cells: dict[tuple, dict[int, float]] = {}
    chosen: dict[tuple, int] = {}
    for row in rows:
        cell = (row["workload"], row["concurrency"])
        cells.setdefault(cell, {})[row["block_size"]] = row[key]
        if row["chosen"]:
            chosen[cell] = row["block_size"]
    sizes = set.intersection(*(set(cell) for cell in cells.values()))
    relative = {b: np.mean([cell[b] / cell[chosen[at]] for at, cell in cells.items()]) for b in sizes}
    fixed = max(sorted(relative), key=relative.get)
    return fixed, float(np.mean([cell[chosen[at]] / cell[fixed] for at, cell in cells.items()]) - 1)
