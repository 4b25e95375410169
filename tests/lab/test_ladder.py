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
from train.ladder import Ladder, climb, climb_all, load_ladder
from train.ladder_page import READING, publish, table
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


def test_climbs_and_goes_on(ladder, tmp_path, monkeypatch):
    rows = climb(ladder)
    with open(ladder.out + ".json") as file:
        assert json.load(file)["rows"] == rows
    page = Path(ladder.out + ".md").read_text()
    assert "| dflash | 1 |" in page and "| + all | 1 |" in page and "B=4" in page and "B=2" in page
    assert len(rows) == 4 and {row["target"] for row in rows} == {"target"}
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
    # Several ladders, all of them done, make one page.
    named = {name: dataclasses.replace(ladder, target_name=name) for name in ("one", "two")}
    monkeypatch.setattr("train.ladder.load_ladder", named.__getitem__)
    found = climb_all(["one", "two"], tmp_path / "deep" / "both")
    assert {p: p.stat().st_mtime_ns for p in marks} == marks
    assert found.count("| dflash | 1 |") == 2 and "## one" in found and "## two" in found
    merged = json.loads((tmp_path / "deep" / "both.json").read_text())["rows"]
    assert [row | {"target": "target"} for row in merged] == rows + rows
    assert (tmp_path / "deep" / "both.png").stat().st_size > 1000
    with pytest.raises(UserError, match="target_name"):
        publish(rows + rows, tmp_path / "no")
    assert not list(tmp_path.glob("no*"))
    # What people wrote below the tables outlives them.
    page, theirs = tmp_path / "read.md", f"{READING}\nIt helps.\n"
    publish(rows, tmp_path / "read")
    page.write_text("old tables\n" + theirs)
    publish(rows, tmp_path / "read")
    assert page.read_text() == table(rows) + "\n" + theirs
    with pytest.raises(UserError, match="at least one"):
        climb_all([])
    (tmp_path / "none.py").write_text("x = 1")
    monkeypatch.undo()
    with pytest.raises(UserError, match="no `ladder"):
        load_ladder(tmp_path / "none.py")


def test_what_was_measured_otherwise_is_measured_again(ladder):
    alone = dataclasses.replace(ladder, recipes={"dflash": ladder.recipes["dflash"]}, block_sizes=(2,))
    climb(alone)
    run = Path(alone.settings("dflash", 0).run)
    kept = (run / "mat.json").read_text()
    logged, found = (run / "metrics.jsonl").read_text(), json.loads(kept)
    assert found["measurement"]["max_new_tokens"] == 12
    # Another measurement, and one that does not say what it is of.
    for change, before in (({"max_new_tokens": 6}, kept), ({}, json.dumps(found["rows"]))):
        (run / "mat.json").write_text(before)
        asked = dataclasses.replace(alone, **change)
        assert len(climb(asked)) == 1
        measurement = json.loads((run / "mat.json").read_text())["measurement"]
        assert measurement == found["measurement"] | {"max_new_tokens": asked.max_new_tokens}
    assert (run / "mat.json").read_text() == kept
    assert (run / "metrics.jsonl").read_text() == logged  # and nothing was trained
    # Another training is another run.
    other = dataclasses.replace(alone, base=dataclasses.replace(alone.base, learning_rate=1e-5))
    with pytest.raises(UserError, match=r"dflash-0/checkpoints.*learning_rate: 0\.0006 then, 1e-05 now"):
        climb(other)
    assert (run / "mat.json").read_text() == kept


def test_shards_climb_one_ladder(ladder, tmp_path):
    shared = dataclasses.replace(ladder, out=str(tmp_path / "shared"))
    parts = [climb(shared, shard=(i, 3)) for i in range(3)]
    assert [{row["recipe"] for row in rows} for rows in parts] == [{"dflash"}, {"+ all"}, set()]
    assert not list(tmp_path.glob("shared.*"))
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shared/*/mat.json")}
    assert climb(shared) == parts[0] + parts[1]
    assert {path: path.stat().st_mtime_ns for path in marks} == marks and len(marks) == 2
    assert json.loads((tmp_path / "shared.json").read_text())["rows"] == parts[0] + parts[1]
    for wrong in ((-1, 2), (2, 2)):
        with pytest.raises(UserError, match=f"shard {wrong[0]}/2"):
            climb(shared, shard=wrong)
    with pytest.raises(UserError, match="page is to hold all runs"):
        climb_all(["any.py"], tmp_path / "page", shard=(1, 2))


def row(recipe, seed, mat, size=4, **changes):
    survival = [0.5] * (size - 1)
    found = {"target": "t", "recipe": recipe, "seed": seed, "dataset": "d", "block_size": size, "mat": mat}
    return found | {"mat_low": mat - 0.5, "mat_high": mat + 1.0, "survival": survival} | changes


def test_a_table_compares_on_the_seeds_that_both_have():
    rows = [row("base", seed, mat) for seed, mat in ((0, 2.0), (1, 4.0), (2, 3.0))]
    rows += [row("some", 1, 5.0, survival=[0.9, 0.5, 0.25]), row("some", 2, 3.0, survival=[0.7, 0.5, 0.15])]
    rows += [row("other", 7, 6.0), row("short", 0, 1.5, 2), row("base", 0, 1.25, 2)]
    lines = table(rows).splitlines()
    assert lines[0] == "| recipe | seeds | d B=4 | d B=2 |"
    assert lines[2:6] == [
        "| base | 3 | 3.00 (2.00-4.00) [2.50, 4.00] x1.00 | 1.25 (1.25-1.25) [0.75, 2.25] x1.00 |",
        "| some | 2 | 4.00 (3.00-5.00) [3.50, 5.00] x1.14 (1.00-1.25) |  |",  # 4 over (4 + 3) / 2
        "| other | 1 | 6.00 (6.00-6.00) [5.50, 7.00] |  |",
        "| short | 1 |  | 1.50 (1.50-1.50) [1.00, 2.50] x1.20 |",
    ]
    assert lines[-5] == "|---|---|---|---|---|---|" and lines[-6].endswith("| dataset | B | 1 | 2 | 3 |")
    assert lines[-4:] == [
        "| base | d | 4 | .50 | .50 | .50 |",
        "| some | d | 4 | .80 | .50 | .20 |",
        "| other | d | 4 | .50 | .50 | .50 |",
        "| short | d | 2 | .50 |  |  |",
    ]


@pytest.mark.parametrize("name, seeds", [("lab", 5), ("smollm2", 2)])
def test_the_shipped_ladders_are_the_papers(name, seeds):
    shipped = load_ladder(Path(__file__).parents[2] / "configs" / "ladder" / f"{name}.py")
    rungs = ["dflash", "+ mixed horizons", "+ unmasking", "+ awl = published dscout"]
    assert list(shipped.recipes)[:5] == [*rungs, "dscout"]
    runs = shipped.runs()
    assert all(runs.count((rung, seed)) == 1 for rung in ("dflash", "dscout") for seed in range(seeds))
    said = [shipped.settings(rung, 0).contract()["objective"] | {"name": ""} for rung in rungs]
    changed = [{k for k in one if one[k] != other[k]} for one, other in pairwise(said)]
    assert changed == [{"horizon"}, {"unmask"}, {"weighting"}]
