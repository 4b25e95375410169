"""The figures of a policy, as PNG and SVG, and one page that holds them all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dscout_jax.errors import UserError
from infer.html import page
from infer.policy import Policy, load_policy

Row = Mapping[str, Any]

NOTES = (
    "MAT: tokens committed a round, the bonus included; predicted as 1 + the sum of S_k over the slots of a "
    "block, S_k being the share of rounds whose first k drafts were right in one logged run at the largest "
    "block size; bands are 95 % intervals over answers.",
    "tokens/s: all rows together, without prefills. Predicted and measured: a queue over as many slots as "
    "the concurrency says, its drain at the end included. B = 1 is plain decoding.",
)


def pictures(folder: Path, searches: Sequence[Path] = ()) -> list[Path]:
    """Draws what `folder` holds (policy.json; validation.json where there is one) and writes its report.html.

    Args:
        searches: folders of `dscout tune depth` or `dscout tune taps`, to put their curves in too.
    Raises:
        UserError: no policy in the folder, no search in one of `searches`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    policy = load_policy(folder / "policy.json")
    document = _read(folder / "validation.json")
    rows = document.get("rows", [])
    searched: dict[str, Row] = {}
    for path in searches:
        found = _read(path / "search.json")
        if not found:
            raise UserError(f"{path} has no search.json; make it with `dscout tune depth`")
        name = found["what"]
        searched[f"{name}-{len(searched) + 1}" if name in searched else name] = found
    figures = {
        "mat": _mat(plt, policy, rows),
        "acceptance": _acceptance(plt, policy),
        "latency": _latency(plt, policy),
        "throughput": _heat(plt, policy),
        **{name: draw_search(plt, found) for name, found in searched.items()},
    }
    paths = []
    for name, figure in figures.items():
        for ending in ("png", "svg"):
            paths.append(folder / f"{name}.{ending}")
            figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    tables = [("Predicted", policy.table())]
    if document:
        online = [("Choosing round by round", document["online"])] if document["online"] else []
        tables = [
            ("Summary", [document["summary"]]),
            ("Predicted and measured", rows),
            *online,
            *tables,
        ]
    for name, found in searched.items():
        tables.append((f"Search over {name}: {found['reason']}", found["rows"]))
    tables.append(("Milliseconds of a round", policy.latency.rows()))
    about = json.dumps(dict(policy.about))
    images = [path for path in paths if path.suffix == ".svg"]
    text = page("From a drafter to its configuration", tables, (*NOTES, f"Measured on: {about}"), images)
    report = folder / "report.html"
    report.write_text(text, encoding="utf-8")
    return [*paths, report]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _grid(plt: Any, count: int) -> tuple[Any, Sequence[Any]]:
    figure, axes = plt.subplots(1, count, figsize=(3.6 * count + 1, 3.4), layout="constrained", squeeze=False)
    return figure, axes[0]


def _mat(plt: Any, policy: Policy, rows: Sequence[Row]) -> Any:
    """MAT by block size, predicted with its interval, and what was measured."""
    figure, axes = _grid(plt, len(policy.workloads))
    for axis, (name, model) in zip(axes, policy.workloads.items(), strict=True):
        sizes = range(1, model.block_size + 1)
        axis.fill_between(sizes, [1, *model.mat_low], [1, *model.mat_high], alpha=0.25, linewidth=0)
        axis.plot(sizes, [model.mat(b) for b in sizes], label="predicted")
        found = [(r["block_size"], r["mat_measured"]) for r in rows if r["workload"] == name]
        if found:
            axis.plot(*zip(*found, strict=True), "x", color="black", label="measured")
        axis.set(xlabel="block size B", ylabel="MAT", title=name)
        axis.legend(fontsize=8)
    return figure


def _acceptance(plt: Any, policy: Policy) -> Any:
    """S_k, and the share of slot k among rounds that reach it."""
    figure, axes = _grid(plt, 2)
    for name, model in policy.workloads.items():
        slots = range(1, model.block_size)
        survival = np.array(model.survival)
        before = np.concatenate([[1.0], survival[:-1]])
        likely = np.divide(survival, before, out=np.full(len(before), np.nan), where=before > 0)
        axes[0].plot(slots, survival, marker="o", label=name)
        axes[1].plot(slots, likely, marker="o", label=name)
    axes[0].set(xlabel="slot k", ylabel="share of rounds", title="first k drafts right: S_k", ylim=(0, 1))
    axes[1].set(xlabel="slot k", ylabel="share", title="k right where those before are", ylim=(0, 1))
    axes[0].legend(fontsize=8)
    return figure


def _latency(plt: Any, policy: Policy) -> Any:
    figure, axes = _grid(plt, 2)
    latency = policy.latency
    for c in latency.concurrencies:
        ms = [latency.ms(c, b) for b in latency.block_sizes]
        ends = [latency.spread.get((c, b), (at, at)) for b, at in zip(latency.block_sizes, ms, strict=True)]
        beside = np.abs(np.array(ends).T - np.array(ms))
        axes[0].errorbar(latency.block_sizes, ms, beside, marker="o", capsize=2, label=f"C = {c}")
        axes[1].plot(latency.block_sizes, np.array(ms) / ms[0], marker="o", label=f"C = {c}")
    axes[0].set(xlabel="block size B", ylabel="ms", title="a round", ylim=(0, None))
    axes[1].set(xlabel="block size B", ylabel="plain steps", title="MAT that pays for it")
    axes[0].legend(fontsize=8)
    return figure


def _heat(plt: Any, policy: Policy) -> Any:
    """Predicted tokens/s over that of the cell's plain decoding; the chosen size is framed."""
    figure, axes = _grid(plt, len(policy.workloads))
    concurrencies = policy.latency.concurrencies
    for axis, name in zip(axes, policy.workloads, strict=True):
        sizes = policy.sizes(name)
        speeds = np.array([[policy.tokens_per_s(name, c, b) for b in sizes] for c in concurrencies])
        axis.imshow(speeds / speeds[:, :1], cmap="Greens", alpha=0.7, aspect="auto")
        for i, c in enumerate(concurrencies):
            for j, b in enumerate(sizes):
                chosen = policy.best(name, c) == b
                box = {"edgecolor": "red", "facecolor": "none", "pad": 3} if chosen else None
                axis.text(j, i, f"{speeds[i, j]:.0f}", ha="center", va="center", bbox=box)
        axis.set_xticks(range(len(sizes)), sizes)
        axis.set_yticks(range(len(concurrencies)), concurrencies)
        axis.set(
            xlabel="block size B",
            ylabel="concurrency C",
            title=f"{name}: tokens/s\n(colour: over B = 1; framed: chosen)",
        )
    return figure


def save_search(searched: Mapping[str, Any], out: Path) -> None:
    """Writes search.json, .md, .png and .svg of a search over drafters.

    searched: {"what": a column's name, "best": its value, "reason", "rows": [{what, "order", "mat",
        "round_ms", "block_size", "tokens_per_s", "plain_tokens_per_s", "over_plain"}, ...]}.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    (out / "search.json").write_text(json.dumps(searched, indent=1) + "\n", encoding="utf-8")
    head = f"| {searched['what']} | B | MAT | ms a round | tokens/s | plain tokens/s | over plain |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    names = ("mat", "round_ms", "tokens_per_s", "plain_tokens_per_s", "over_plain")
    for row in searched["rows"]:
        figures = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {row[searched['what']]} | {row['block_size']} | {figures} |")
    text = "\n".join([*lines, "", searched["reason"], ""])
    (out / "search.md").write_text(text, encoding="utf-8")
    figure = draw_search(plt, searched)
    for ending in ("png", "svg"):
        figure.savefig(out / f"search.{ending}", dpi=120)
    plt.close(figure)


def draw_search(plt: Any, searched: Row) -> Any:
    """Throughput over plain decoding's, MAT and latency of every drafter that a search trained."""
    figure, axes = _grid(plt, 3)
    rows = sorted(searched["rows"], key=lambda row: row["order"])
    names = [str(row[searched["what"]]) for row in rows]
    for axis, (key, label) in zip(
        axes, (("over_plain", "tokens/s over plain"), ("mat", "MAT"), ("round_ms", "ms a round")), strict=True
    ):
        axis.plot(names, [row[key] for row in rows], marker="o")
        axis.set(xlabel=searched["what"], ylabel=label, title=label)
    best = next(row for row in rows if row[searched["what"]] == searched["best"])
    axes[0].plot([str(best[searched["what"]])], [best["over_plain"]], "o", color="red", markersize=9)
    return figure
