"""`dscout explain`: a table, JSON and a plot of recipes, from config files."""

import json
from pathlib import Path

import pytest

from dscout_jax.errors import UserError
from train.explain import explain
from train.ladder import Ladder
from train.settings import TrainSettings, load_settings, run_file

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
    with pytest.raises(UserError, match="at least one"):
        explain([], tmp_path / "no")
    for wrong in ({"acceptance": 1.5}, {"answer_tokens": 1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            explain(paths, tmp_path / "no", **wrong)


def test_every_shipped_config_is_explained(tmp_path):
    paths = sorted((Path(__file__).parents[2] / "configs").rglob("[!_]*.py"))
    explain(paths, tmp_path / "out", draws=2)
    recipes = json.loads((tmp_path / "out.json").read_text())["recipes"]
    ladders = [found for path in paths if isinstance(found := run_file(path).get("ladder"), Ladder)]
    names = [name for ladder in ladders for name in ladder.recipes]
    assert len(ladders) == 2 and len(recipes) == len(names) + len(paths) - len(ladders)
    assert set(names) <= set(recipes) and "dflash at 4" in recipes
    for found in recipes.values():
        # An answer as long as a row has an anchor for every block, and each includes its first slot.
        assert found["included"][1] > 0 and abs(sum(found["share"]) - 1) < 1e-4


def test_answers_shorter_than_the_anchors_leave_blocks_out(tmp_path):
    (tmp_path / "c.py").write_text(CONFIG.format(recipe="dflash", block=4))
    explain([tmp_path / "c.py"], tmp_path / "out", answer_tokens=5, draws=4)
    found = json.loads((tmp_path / "out.json").read_text())["recipes"]["dflash"]
    assert found["included"] == [0, 4, 3, 2]


def test_a_ladder_is_no_config():
    path = Path(__file__).parents[2] / "configs" / "ladder" / "lab.py"
    assert not isinstance(run_file(path).get("config"), TrainSettings)
    with pytest.raises(UserError, match="dscout ladder"):
        load_settings(path)
