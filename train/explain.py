"""Recipes side by side before any training: what each will ask of each slot."""

import json
from collections.abc import Sequence
from pathlib import Path

from dscout_jax.errors import UserError
from dscout_jax.objective.expect import Expected, expected_slots
from train.settings import load_settings


def explain(
    configs: Sequence[str | Path], out: str | Path, *, acceptance: float = 0.7, answer_tokens: int = 256
) -> str:
    """Expected inclusion, mean weight and share of every slot of each config; writes out.json, .md, .png.

    Args:
        acceptance: of the imagined drafter, see `expected_slots`.
    Raises:
        UserError: a config that does not load, or an acceptance outside 0..1.
    """
    if not 0 < acceptance < 1:
        raise UserError(f"acceptance {acceptance} must lie between 0 and 1")
    found: dict[str, Expected] = {}
    for path in configs:
        settings = load_settings(path)
        found[_name(settings.objective.name, found)] = expected_slots(
            settings.objective,
            block_size=settings.block_size,
            num_anchors=settings.anchors,
            answer_tokens=answer_tokens,
            acceptance=acceptance,
        )
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = _table(found)
    note = (
        f"Expected over answers of {answer_tokens} tokens and a drafter that accepts {acceptance:g} a slot."
    )
    rows = {name: {k: v.tolist() for k, v in e._asdict().items()} for name, e in found.items()}
    Path(f"{out}.json").write_text(
        json.dumps({"acceptance": acceptance, "answer_tokens": answer_tokens, "recipes": rows}, indent=1)
        + "\n"
    )
    _plot(found, Path(f"{out}.png"))
    text = f"{text}\n\n{note}\n"
    Path(f"{out}.md").write_text(text)
    return text


def _name(name: str, taken: dict[str, Expected]) -> str:
    """The recipe's name, numbered when two configs share it."""
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
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
