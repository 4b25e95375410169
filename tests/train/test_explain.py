"""`dscout explain`: a table, JSON and a plot of recipes, from config files."""

import json

import pytest

from dscout_jax.errors import UserError
from train.explain import explain

CONFIG = """
from dscout_jax.objective import {recipe}
from train.settings import TrainSettings

config = TrainSettings(objective={recipe}({block}), data="x", run="y", block_size={block}, num_anchors=16)
"""


def test_recipes_side_by_side(tmp_path):
    paths = []
    for recipe, block in (("dflash", 4), ("dscout", 8), ("dflash", 8)):
        paths.append(tmp_path / f"{recipe}{block}.py")
        paths[-1].write_text(CONFIG.format(recipe=recipe, block=block))
    text = explain(paths, tmp_path / "deep" / "out")
    assert [text.count(f"| {name} |") for name in ("dflash", "dscout", "dflash #2")] == [3, 3, 3]
    document = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert [len(r["included"]) for r in document["recipes"].values()] == [4, 8, 8]
    assert (tmp_path / "deep" / "out.png").stat().st_size > 1000
    with pytest.raises(UserError, match="acceptance"):
        explain(paths, tmp_path / "no", acceptance=1.5)
