"""Benchmark rows as a table and as plots."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dscout_jax.errors import UserError
from infer.document import write_document
from infer.html import page

Row = dict[str, Any]

DEFINITIONS = """tok/s at C = 1: tokens of all rounds / their seconds on the host's monotonic clock, from the
call of the compiled loop until its result is there; prefill, its token, compilation and detokenising are
left out on both sides, every decoder is warmed by a short answer first, and plain and speculative take turns
prompt by prompt. At C > 1: all tokens of a queue over C slots / the seconds from its start to its last
answer, prefills included, compilation not; queues of four conversations a slot, each warmed by a short one,
plain and speculative in turns. *: of some answers plain decoding was measured in an earlier session
(plain_measured_beside in the JSON counts the others). Speed-up: ratio of the two. Intervals: 95 %, by
resampling conversations, plain and speculative together; of a queue's speeds there is none. Of means: mean
over answers of plain decoding's seconds a token / mean of speculation's. MAT: committed tokens / rounds;
tau: mean over answers of the answer's own. Identical: answers equal to plain decoding's, token for token;
(same program): to plain decoding through the very program that speculates, which takes same_program_cost
(JSON) times the baseline's seconds; blank where rounds take several sizes. n: answers; a later turn follows
plain decoding's own answers, for every contestant. Acceptance by slot: share of rounds whose first k drafts
were all committed. Draft + verify + other: ms of a round, each of the first two a timed program of its own,
greedy and alone in a loop, at the length of a typical answer's middle; other: the rest of a whole round so
timed, blank where rounds take several sizes. Policy: the start of its file's digest, the workload it was
asked for, the sizes it chose. First divergence: the first token that differs, the least and the median over
answers that do; logit gap: between the two best logits there, median and most. Rounds by drafts committed:
0, 1, 2, ..."""


PARTS = ("draft", "verify", "other")
_HEAD = ("dataset", "drafter", "dtype", "T", "C", "B")


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, a line for each row; what no row has gets no column."""
    policy = any("policy" in row for row in rows)
    same = any("identical_same_program" in row for row in rows)
    parts = any("draft_ms" in row for row in rows)
    header = [
        *(*_HEAD, "n"),
        *(["policy"] if policy else []),
        *("plain tok/s", "speculative tok/s", "speed-up", "of means", "MAT", "tau", "identical"),
        *(["identical (same program)"] if same else []),
        *(["draft + verify + other ms"] if parts else []),
        "acceptance by slot",
    ]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        cells = [*_head(row), str(row["n"])]
        if policy:
            cells.append(_policy(row["policy"]) if "policy" in row else "")
        apart = row.get("plain_measured_beside", row["n"]) < row["n"]
        cells += [
            f"{row['plain_tokens_per_s']:.1f}{'*' if apart else ''}",
            f"{row['speculative_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}{_interval(row['speedup_spread'])}",
            f"{row['speedup_of_means']:.2f}",
            f"{row['mat']:.2f}",
            f"{row['tau']:.2f}",
            f"{row['identical']}/{row['n']}",
        ]
        if same:
            count = row.get("identical_same_program")
            cells.append("" if count is None else f"{count}/{row['n']}")
        if parts:
            timed = [_ms(row[f"{name}_ms"]) for name in PARTS] if "draft_ms" in row else []
            cells.append(" + ".join(timed))
        cells.append(" ".join(f"{s:.2f}".removeprefix("0") for s in row["survival"]))
        lines.append(_line(cells))
    return "\n".join(lines)


def details(rows: Sequence[Row]) -> str:
    """A second Markdown table: intervals, prefill, where outputs part, and the histogram."""
    header = [
        *_HEAD,
        *(f"{name}, 95 %" for name in ("plain tok/s", "speculative tok/s", "MAT", "tau")),
        *("plain prefill ms", "prefill ms", "identical %"),
        *("first divergence", "logit gap", "rounds by drafts committed"),
    ]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in rows:
        spreads = (
            row.get(f"{name}_spread")
            for name in ("plain_tokens_per_s", "speculative_tokens_per_s", "mat", "tau")
        )
        parted = [row.get(f"first_divergence_{which}") for which in ("min", "median")]
        gaps = [row.get(f"logit_gap_{which}") for which in ("median", "max")]
        cells = [
            *_head(row),
            *(_interval(spread).strip(" ()") for spread in spreads),
            f"{row['plain_prefill_ms']:.1f}",
            f"{row['prefill_ms']:.1f}",
            f"{row['identical_percent']:.1f}",
            "" if None in parted else ", ".join(f"{at:g}" for at in parted),
            "" if None in gaps else ", ".join(f"{gap:.3g}" for gap in gaps),
            " ".join(map(str, row["histogram"])),
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _head(row: Row) -> list[str]:
    """What tells a row from another."""
    names = [row["dataset"], row["drafter"], row["dtype"]]
    return [*names, f"{row['temperature']:g}", str(row["concurrency"]), str(row["block_size"])]


def _policy(policy: Row) -> str:
    sizes = " ".join(map(str, policy["sizes"]))
    adapts = f", adapts, explores {policy['explore']:g}" if policy["adapt"] else ""
    return f"{policy['digest'][:6]}: {policy['workload'] or 'all'}{adapts}: {sizes}"


def _interval(spread: Sequence[float] | None) -> str:
    return "" if spread is None else f" ({spread[0]:.2f}-{spread[1]:.2f})"


def _ms(value: float | None) -> str:
    return " " if value is None else f"{value:.1f}"


def in_cells(row: Row) -> Row:
    """A row for the page: lists of numbers and the policy as text."""
    texts = {
        name: " ".join(f"{v:.3g}" for v in value) if isinstance(value, list | tuple) else value
        for name, value in row.items()
    }
    return texts | ({"policy": _policy(row["policy"])} if "policy" in row else {})


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
        label = f"{_label(row)}, MAT {row['mat']:.2f}"
        slots = range(1, len(row["survival"]) + 1)
        axes[0].plot(slots, row["survival"], marker="o", label=label)
    axes[0].set(xlabel="slot k", ylabel="share of rounds", title="first k drafts all accepted", ylim=(0, 1))
    lines: dict[tuple, list[Row]] = {}
    for row in rows:
        lines.setdefault(_line_of(row), []).append(row)
    for line in lines.values():
        points = sorted((r["block_size"], r["speedup"]) for r in line)
        axes[1].plot(*zip(*points, strict=True), marker="o", label=_label(line[0]))
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


def _line_of(row: Row) -> tuple:
    return row["dataset"], row["drafter"], row["dtype"], row["temperature"], row["concurrency"]


def _label(row: Row) -> str:
    temperature = f" T={row['temperature']:g}" if row["temperature"] else ""
    side_by_side = f" C={row['concurrency']}" if row["concurrency"] > 1 else ""
    return f"{row['dataset']} {row['drafter']} {row['dtype']}{temperature}{side_by_side}"


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
    return [(row["step"], row["loss"]) for row in rows if "step" in row and row.get("loss") is not None]


def report(folders: Sequence[str | Path], out: str | Path, metrics: str | Path | None = None) -> str:
    """Puts benchmarks of one machine together: writes out.json, .md, .png and .html, returns the text.

    Raises:
        UserError: no folder, one without rows.json or with an older one, or folders of unlike machines.
    """
    if not folders:
        raise UserError("name one or more folders that `dscout bench` wrote")
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
    if any("speedup_of_means" not in row for row in rows):
        raise UserError("a rows.json is an older benchmark's and lacks columns; run the benchmark again")
    out = Path(out)
    image = Path(f"{out}.png")
    notes = (DEFINITIONS, machine_line(machine))
    text = "\n\n".join([table(rows), details(rows), *notes, f"![acceptance and speed-up]({image.name})\n"])
    plot(rows, image, metrics)
    write_document(f"{out}.json", {"machine": machine, "rows": rows})
    Path(f"{out}.md").write_text(text)
    tables = [("", [*map(in_cells, rows)])]
    Path(f"{out}.html").write_text(page("Plain against speculative decoding", tables, notes, [image]))
    return text


def machine_line(machine: Row) -> str:
    """What a measurement ran on, in a line."""
    units = ", ".join(machine["bf16_units"]) or "none"
    return (
        f"{machine['cpus']} x {machine['cpu']} (bf16 instructions: {units}), backend {machine['backend']} "
        f"({machine['device']}), jax {machine['jax']}, Python {machine['python']}."
    )
