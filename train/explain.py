"""Recipes side by side before any training: what each will ask of each slot."""

import json
from collections.abc import Sequence
from pathlib import Path

from dscout_jax.errors import UserError
from dscout_jax.objective.expect import Expected, expected_slots
from train.ladder import Ladder
from train.settings import TrainSettings, load_settings, run_file


def explain(
    configs: Sequence[str | Path],
    out: str | Path,
    *,
    acceptance: float = 0.7,
    answer_tokens: int | None = None,
    draws: int = 256,
) -> str:
    """Expected inclusion, mean weight and share of every slot of each recipe; writes out.json, .md, .png.

    Args:
        configs: files that define a `config`, or a `ladder`: then each of its recipes.
        acceptance: of the imagined drafter, see `expected_slots`.
        answer_tokens: of the imagined answers; None: each config's `seq_len`, the most it can learn from.
        draws: answers imagined.
    Raises:
        UserError: no config, or one that fails; an acceptance outside 0..1; answers too short to draft.
    """
    if not configs:
        raise UserError("name at least one config file; see configs/")
    if not 0 < acceptance < 1:
        raise UserError(f"acceptance {acceptance} must lie between 0 and 1")
    if answer_tokens is not None and answer_tokens < 2:
        raise UserError(f"answer_tokens {answer_tokens} must be at least 2: an anchor and a token to draft")
    found: dict[str, Expected] = {}
    for name, settings in (recipe for path in configs for recipe in _recipes(path)):
        found[_name(name, found)] = expected_slots(
            settings.objective,
            block_size=settings.block_size,
            num_anchors=settings.anchors,
            answer_tokens=answer_tokens or settings.seq_len,
            acceptance=acceptance,
            draws=draws,
        )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = _table(found)
    length = "each config's seq_len" if answer_tokens is None else f"{answer_tokens} tokens"
    note = f"Expected over answers of {length} and a drafter that accepts {acceptance:g} a slot."
    rows = {name: {k: v.tolist() for k, v in e._asdict().items()} for name, e in found.items()}
    Path(f"{out}.json").write_text(
        json.dumps({"acceptance": acceptance, "answer_tokens": answer_tokens, "recipes": rows}, indent=1)
        + "\n"
    )
    _plot(found, Path(f"{out}.png"))
    text = f"{text}\n\n{note}\n"
    Path(f"{out}.md").write_text(text)
    return text


def _recipes(path: str | Path) -> list[tuple[str, TrainSettings]]:
    """(name, settings) of what a file defines."""
    ladder = run_file(path).get("ladder")
    if isinstance(ladder, Ladder):
        return [(name, ladder.settings(name, ladder.seeds_of(name)[0])) for name in ladder.recipes]
    settings = load_settings(path)
    return [(settings.objective.name, settings)]


def _name(name: str, taken: dict[str, Expected]) -> str:
    """The recipe's name, numbered when two of them share it."""
    same = sum(other.split(" #")[0] == name for other in taken)
    return f"{name} #{same + 1}" if same else name


def _table(found: dict[str, Expected]) -> str:
    width = max(len(e.included) for e in found.values())
    lines = [f"| recipe | per slot | {' | '.join(map(str, range(1, width)))} |", "|---" * (width + 1) + "|"]
    for name, expected in found.items():
        for what, values in expected._asdict().items():
            cells = [f"{float(v):.3g}" for v in values[1:]] + [""] * (width - len(values))
            lines.append(f"| {name} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _plot(found: dict[str, Expected], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for name, expected in found.items():
        for axis, values in zip(axes, expected, strict=True):
            axis.plot(range(1, len(values)), values[1:], marker="o", markersize=3, label=name)
    for axis, title in zip(
        axes, ("supervised slots an answer", "mean weight", "share of the loss"), strict=True
    ):
        axis.set(xlabel="slot k", title=title, ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
