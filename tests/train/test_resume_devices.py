"""A run on eight devices goes on bit by bit, and on four of them within rounding."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
from tiny_run import tiny_settings, tiny_target, write_answers

from dscout_jax.interop import load_drafter
from train import prepare
from train.hosts import mesh_for
from train.loop import train


def losses(run):
    rows = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_eight_devices_resume_bit_by_bit_and_four_go_on_within_rounding(tmp_path, monkeypatch):
    write_answers(tmp_path / "answers.jsonl")
    settings = dataclasses.replace(tiny_settings(tmp_path), steps=4)
    target = tiny_target()
    _, straight = load_drafter(train(settings, target))
    whole = losses(settings.run)
    # What a kill after step 2 leaves.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "run" / "drafter")
    shutil.copytree(tmp_path / "run", tmp_path / "four")
    _, resumed = load_drafter(train(settings, target))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    assert losses(settings.run) == whole and sorted(whole) == [1, 2, 3, 4]

    monkeypatch.setattr(prepare, "mesh_for", partial(mesh_for, devices=jax.devices()[:4]))
    four = dataclasses.replace(settings, run=str(tmp_path / "four"), mesh=(2, 2, 1))
    _, fewer = load_drafter(train(four, target))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), straight, fewer)
    np.testing.assert_allclose(list(losses(four.run).values()), list(whole.values()), rtol=1e-6)
