"""Every set of a folder, a fixed sample of each: drafters beside plain decoding and one another.

    python benchmarks/suite.py SETS --drafter DIR lookup DIR+lookup --out docs/results/suite

SETS holds JSONL files of {"turns": [...]}. What `dscout bench` does, with means over the sets and a plot of
all of them; writes OUT.md, .json, .png and .html. A killed run goes on by the same command.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.cli.common import decodable
from infer.benchmark import BenchmarkSettings, benchmark
from infer.document import write_document
from infer.html import page
from infer.machine import describe
from infer.report import DEFINITIONS, details, in_cells, machine_line, table

Row = dict[str, Any]


def means(rows: Sequence[Row]) -> list[Row]:
    """A row a drafter and block size: means over the sets, each set counting alike."""
    by_contestant: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        by_contestant.setdefault((row["drafter"], row["block_size"]), []).append(row)
    return [
        {
            "drafter": drafter,
            "block_size": size,
            "sets": len(own),
            "n": sum(row["n"] for row in own),
            **{name: float(np.mean([row[name] for row in own])) for name in ("mat", "tau", "speedup")},
            "slowest": min(row["speedup"] for row in own),
            "identical": sum(row["identical"] for row in own),
        }
        for (drafter, size), own in by_contestant.items()
    ]


def means_table(rows: Sequence[Row]) -> str:
    """Markdown of `means`."""
    lines = [
        "| drafter | B | sets | n | MAT | tau | speed-up | of the slowest set | identical |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        figures = (f"{row[name]:.2f}" for name in ("mat", "tau", "speedup", "slowest"))
        cells = [row["drafter"], row["block_size"], row["sets"], row["n"], *figures]
        lines.append("| " + " | ".join(map(str, [*cells, f"{row['identical']}/{row['n']}"])) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of MAT and speed-up, a group a set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    contestants = list(dict.fromkeys((row["drafter"], row["block_size"]) for row in rows))
    found = {(row["dataset"], row["drafter"], row["block_size"]): row for row in rows}
    figure, axes = plt.subplots(2, 1, figsize=(max(6, len(sets)), 6), sharex=True, layout="constrained")
    width = 0.8 / len(contestants)
    for axis, name, title in zip(axes, ("mat", "speedup"), ("MAT", "speed-up"), strict=True):
        for at, (drafter, size) in enumerate(contestants):
            heights = [found[one, drafter, size][name] for one in sets]
            places = np.arange(len(sets)) + (at - (len(contestants) - 1) / 2) * width
            axis.bar(places, heights, width, label=f"{drafter} B={size}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=title, xticks=range(len(sets)))
        axis.set_xticklabels(sets, rotation=30, ha="right")
    axes[0].legend(fontsize=8, ncols=len(contestants))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what is missing and writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--drafter", nargs="+", required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4])
    parser.add_argument("--limit", type=int, default=8, help="conversations of each set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=512)
    parser.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--records", type=Path, default=Path("runs/suite"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/suite"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    o = parser.parse_args(arguments)
    settings = BenchmarkSettings(
        prompts=tuple(o.sets),
        drafters=tuple(decodable(drafter) for drafter in o.drafter),
        target=o.target,
        dtype=o.dtype,
        block_sizes=tuple(o.block_sizes),
        max_new_tokens=o.max_new_tokens,
        limit=o.limit,
        seed=o.seed,
        max_prompt_tokens=o.max_prompt_tokens,
        # Few shapes: with buckets of 64 the suite would compile longer than it decodes.
        prompt_bucket=256,
        temperature=o.temperature,
        same_program="none",
        parts=o.parts,
        out=o.records,
        cache_dir=o.cache_dir,
    )
    rows = benchmark(settings, lambda line: print(line, flush=True))
    machine, over_sets = describe(), means(rows)
    plot(rows, Path(f"{o.out}.png"))
    skipped = {row["dataset"]: row["skipped"] for row in rows if row["skipped"]}
    sample = (
        f"{o.limit} conversations of each set by seed {o.seed}, {o.max_new_tokens} new tokens, prompts of at "
        f"most {o.max_prompt_tokens}; longer ones were passed over: {skipped or 'none'}."
    )
    notes = (sample, DEFINITIONS, machine_line(machine))
    shown = f"![MAT and speed-up]({o.out.name}.png)\n"
    text = "\n\n".join(
        ["Means over the sets:", means_table(over_sets), table(rows), details(rows), *notes, shown]
    )
    document = {"machine": machine, "means": over_sets, "rows": rows}
    write_document(f"{o.out}.json", document)
    Path(f"{o.out}.md").write_text(text)
    tables = [("Means over the sets", over_sets), ("Sets", [*map(in_cells, rows)])]
    Path(f"{o.out}.html").write_text(page("Suite", tables, notes, [Path(f"{o.out}.png")]))
    print(means_table(over_sets))


if __name__ == "__main__":
    main()
