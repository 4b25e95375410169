"""The example of docs/extend-the-loss.md is a config that trains, and its weights reach the loss."""

import dataclasses
import json
import re
from pathlib import Path

from tiny_run import tiny_settings, tiny_target, write_answers

from train.loop import train
from train.settings import load_settings


def test_the_example_trains(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "extend-the-loss.md").read_text()
    (tmp_path / "doubtful.py").write_text(re.search(r"```python\n(.*?)```", text, re.S).group(1))
    example = load_settings(tmp_path / "doubtful.py")
    assert example.objective.name == "doubtful" and example.target == "runs/lab/target"
    # Its objective and its blocks, at the size and on the data of a tiny run.
    tiny = dataclasses.replace(tiny_settings(tmp_path), mesh=None, steps=2, num_anchors=8)
    settings = dataclasses.replace(tiny, objective=example.objective, block_size=example.block_size)
    write_answers(settings.data)
    train(settings, tiny_target())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 2 and steps[0]["loss"] > 0
    for step in steps:
        # A fresh drafter is far from sure of the first slot, and hardly ever gets to the last one.
        assert 0.5 < step["weight"][1] < 1 and step["weight"][7] < 0.5
    for field in {*steps[1], "eval", *lines[-1]["eval"]} - {"step", "time"}:
        assert f"`{field}`" in text, field
