"""The ladder: equal budgets, decoded figures, and going on where it stopped."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dscout_jax.errors import UserError
from dscout_jax.objective import dflash, dscout
from train.lab.target import make_lab
from train.ladder import Ladder, climb, load_ladder
from train.settings import TrainSettings


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ladder")
    make_lab(root / "lab", steps=2, batch=2, prompts=16, heldout=3)
    base = TrainSettings(
        objective=dflash(4),
        data=str(root / "lab" / "answers.jsonl"),
        run="",
        target=str(root / "lab" / "target"),
        num_layers=1,
        block_size=4,
        target_layer_ids=(1,),
        seq_len=128,
        batch=8,
        query_budget=16,
        steps=2,
        heldout=2,
    )
    return Ladder(
        base=base,
        recipes={"dflash": {"objective": dflash(4)}, "+ all": {"objective": dscout(4)}},
        datasets={"held out": str(root / "lab" / "heldout.jsonl")},
        block_sizes=(4, 2),
        max_new_tokens=12,
        rows=4,
        out=str(root / "out"),
    )


def test_recipes_share_everything_but_themselves(ladder):
    one, other = ladder.settings("dflash", 3), ladder.settings("+ all", 3)
    assert (one.anchors, other.anchors) == (4, 5)
    own = {"objective": dflash(2), "run": ""}
    assert str(dataclasses.replace(one, **own)) == str(dataclasses.replace(other, **own)) and one.seed == 3
    for changes in ({"steps": 9}, {"query_budget": 99}, {"data": "x"}):
        with pytest.raises(UserError, match="all recipes share"):
            dataclasses.replace(ladder, recipes={"unfair": changes})
    twice = dataclasses.replace(ladder, recipes=ladder.recipes | {"+ all": {"seeds": (0, 1)}})
    assert twice.runs() == [("dflash", 0), ("+ all", 0), ("+ all", 1)]
    with pytest.raises(UserError, match="query_budget"):
        dataclasses.replace(ladder, base=dataclasses.replace(ladder.base, query_budget=None, num_anchors=4))


def test_climbs_and_goes_on(ladder, tmp_path):
    first = climb(ladder)
    assert "| dflash |" in first and "| + all |" in first and "B=4" in first and "B=2" in first
    with open(ladder.out + ".json") as file:
        rows = json.load(file)["rows"]
    assert len(rows) == 4
    for row in rows:
        assert np.isclose(row["mat"], 1 + sum(row["survival"]))
        assert row["mat_low"] <= row["mat"] + 1e-9 and row["mat"] <= row["mat_high"] + 1e-9
    # A run that is done is not done again; one more seed is all that is trained.
    more = dataclasses.replace(ladder, seeds=(0, 1), recipes={"dflash": ladder.recipes["dflash"]})
    marks = {p: p.stat().st_mtime_ns for p in (tmp_path.parent).glob("ladder*/out/dflash-0/mat.json")}
    climb(more)
    assert {p: p.stat().st_mtime_ns for p in marks} == marks and marks
    with open(ladder.out + ".json") as file:
        assert [row["seed"] for row in json.load(file)["rows"]] == [0, 0, 1, 1]
    (tmp_path / "none.py").write_text("x = 1")
    with pytest.raises(UserError, match="no `ladder"):
        load_ladder(tmp_path / "none.py")


@pytest.mark.parametrize("name, seeds", [("lab", 5), ("smollm2", 2)])
def test_the_shipped_ladders_are_the_papers(name, seeds):
    shipped = load_ladder(Path(__file__).parents[2] / "configs" / "ladder" / f"{name}.py")
    rungs = ["dflash", "+ mixed horizons", "+ unmasking", "+ awl = dscout"]
    assert list(shipped.recipes)[:4] == rungs
    runs = shipped.runs()
    assert all(runs.count((rung, seed)) == 1 for rung in (rungs[0], rungs[3]) for seed in range(seeds))
    said = [shipped.settings(rung, 0).contract()["objective"] | {"name": ""} for rung in rungs]
    changed = [{k for k in one if one[k] != other[k]} for one, other in pairwise(said)]
    assert changed == [{"horizon"}, {"unmask"}, {"weighting"}]
