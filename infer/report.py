"""Benchmark rows as a table and as plots."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dscout_jax.errors import UserError
from infer.html import page

Row = dict[str, Any]

DEFINITIONS = """tok/s: tokens of all rounds / their seconds; prefill, its token and compilation are left
out on both sides. Speed-up: their ratio. MAT: committed tokens / rounds; tau: mean over answers of the
answer's own. Identical: answers equal to plain decoding's, token for token; (same program): to plain
decoding through the very program that speculates. Acceptance by slot: share of rounds whose first k
drafts were all committed."""


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, a line for each dataset, dtype and block size."""
    names = (
        "dataset",
        "drafter",
        "dtype",
        "B",
        "n",
        "plain tok/s",
        "speculative tok/s",
        "speed-up",
        "MAT",
        "tau",
    )
    same = any("identical_same_program" in row for row in rows)
    header = [*names, "identical", *(["identical (same program)"] if same else []), "acceptance by slot"]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        cells = [
            row["dataset"],
            row["drafter"],
            row["dtype"],
            str(row["block_size"]),
            str(row["n"]),
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['speculative_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['mat']:.2f}",
            f"{row['tau']:.2f}",
            f"{row['identical']}/{row['n']}",
        ]
        if same:
            count = row.get("identical_same_program")
            cells.append("" if count is None else f"{count}/{row['n']}")
        cells.append(" ".join(f"{s:.2f}".removeprefix("0") for s in row["survival"]))
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot(rows: Sequence[Row], path: str | Path, metrics: str | Path | None = None) -> Path:
    """Acceptance per slot, speed-up by block size and, given a `metrics.jsonl`, the training loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses = _losses(metrics)
    figure, axes = plt.subplots(
        1, 3 if losses else 2, figsize=(13 if losses else 9, 3.6), layout="constrained"
    )
    for row in _longest(rows):
        label = f"{row['dataset']} {row['drafter']} {row['dtype']}, MAT {row['mat']:.2f}"
        slots = range(1, len(row["survival"]) + 1)
        axes[0].plot(slots, row["survival"], marker="o", label=label)
    axes[0].set(xlabel="slot k", ylabel="share of rounds", title="first k drafts all accepted", ylim=(0, 1))
    for name in dict.fromkeys(map(_line_of, rows)):
        points = sorted((r["block_size"], r["speedup"]) for r in rows if _line_of(r) == name)
        axes[1].plot(*zip(*points, strict=True), marker="o", label=" ".join(name))
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    axes[1].set(xlabel="block size B", ylabel="times plain decoding", title="speed-up")
    if losses:
        axes[2].plot(*zip(*losses, strict=True), linewidth=0.9)
        axes[2].set(xlabel="step", ylabel="loss", title="training loss")
    for axis in axes[:2]:
        axis.legend(fontsize=8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _line_of(row: Row) -> tuple[str, str, str]:
    return row["dataset"], row["drafter"], row["dtype"]


def _longest(rows: Sequence[Row]) -> list[Row]:
    """The largest block size of each dataset, drafter and dtype: its curve holds the smaller ones'."""
    best: dict[tuple, Row] = {}
    for row in rows:
        key = _line_of(row)
        if key not in best or row["block_size"] > best[key]["block_size"]:
            best[key] = row
    return list(best.values())


def _losses(metrics: str | Path | None) -> list[tuple[int, float]]:
    if metrics is None or not Path(metrics).is_file():
        return []
    rows = [json.loads(line) for line in Path(metrics).read_text().split("\n") if line.strip()]
    return [(row["step"], row["loss"]) for row in rows if "step" in row and "loss" in row]


def report(folders: Sequence[str | Path], out: str | Path, metrics: str | Path | None = None) -> str:
    """Puts benchmarks of one machine together: writes out.json, .md, .png and .html, returns the text.

    Raises:
        UserError: a folder without rows.json, or folders measured on unlike machines.
    """
    documents = []
    for folder in map(Path, folders):
        if not (folder / "rows.json").is_file():
            raise UserError(f"{folder} has no rows.json; run the benchmark with --out {folder} first")
        documents.append(json.loads((folder / "rows.json").read_text()))
    machine = documents[0]["machine"]
    for folder, document in zip(folders, documents, strict=True):
        if document["machine"] != machine:
            raise UserError(f"{folders[0]} and {folder} were measured on unlike machines; report them apart")
    rows = [row for document in documents for row in document["rows"]]
    out = Path(out)
    image = Path(f"{out}.png")
    text = (
        f"{table(rows)}\n\n{DEFINITIONS}\n\n{_machine(machine)}\n\n![acceptance and speed-up]({image.name})\n"
    )
    plot(rows, image, metrics)
    Path(f"{out}.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    Path(f"{out}.md").write_text(text)
    notes = (DEFINITIONS, _machine(machine))
    Path(f"{out}.html").write_text(page("Plain against speculative decoding", [("", rows)], notes, [image]))
    return text


def _machine(machine: Row) -> str:
    units = ", ".join(machine["bf16_units"]) or "none"
    return (
        f"{machine['cpus']} x {machine['cpu']} (bf16 instructions: {units}), backend {machine['backend']} "
        f"({machine['device']}), jax {machine['jax']}, Python {machine['python']}."
    )
