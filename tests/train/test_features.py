"""Stored features train as computed ones do; what is stored is checked, resumed and held to its contract."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_run import tiny_settings, tiny_target, write_answers

from dscout_jax.cli import main
from dscout_jax.errors import UserError
from dscout_jax.objective.prediction import soft_ce
from train.features import FeatureFiles
from train.loop import train
from train.prepare import prepare
from train.step import Features
from train.write_features import write_features


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(settings with stored features, target, losses of a run that computed its own)."""
    folder = tmp_path_factory.mktemp("features")
    write_answers(folder / "answers.jsonl")
    plain = tiny_settings(folder, "computed")
    # An objective that sees the target needs its hidden states too.
    objective = dataclasses.replace(plain.objective, prediction=soft_ce)
    plain = dataclasses.replace(plain, objective=objective, mesh=None, steps=4, eval_every=3)
    target = tiny_target()
    train(plain, target)
    settings = dataclasses.replace(plain, run=str(folder / "stored"), features=str(folder / "features"))
    return settings, target, losses(folder / "computed")


def losses(run):
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    return [row["loss"] for row in rows if "loss" in row], [row["eval"] for row in rows if "eval" in row]


def test_stored_features_give_the_loss_curve_of_computed_ones_and_resume(made, monkeypatch, capsys):
    settings, target, computed = made
    with pytest.raises(UserError, match="has no features"):
        train(settings, target)
    with pytest.raises(UserError, match=r"GB in .*--yes"):
        write_features(settings, target)
    write_features(settings, target, yes=True)
    assert "24 rows" in capsys.readouterr().out
    files = FeatureFiles(settings.features, prepare(settings, target).features_contract(settings), False)
    assert files.finished() == set(range(24))
    before = files.read([3, 20])
    # What a kill leaves: rows without their taps.
    for place in (3, 20):
        (Path(settings.features) / f"taps/c/{place}/0/0").unlink()
    with pytest.raises(UserError, match="2 of 24 rows"):
        train(settings, target)
    written = []
    real = FeatureFiles.write
    monkeypatch.setattr(FeatureFiles, "write", lambda self, p, r: (written.extend(p), real(self, p, r)))
    write_features(settings, target, yes=True)
    assert written == [3, 20]
    np.testing.assert_array_equal(files.read([3, 20]).taps, before.taps)
    train(settings, target)
    stored = losses(Path(settings.run))
    assert len(stored[0]) == 4 and stored[1] == computed[1] and len(stored[1]) == 2
    # Checkpoints come after each half of save_every, after evaluations and at the end; the newest two stay,
    # with the MAT by which the best of all would.
    for run in (Path(settings.run), Path(settings.run).with_name("computed")):
        kept = sorted((run / "checkpoints").iterdir())
        assert [step.name for step in kept] == ["3", "4"]
        mats = [json.loads((step / "metrics" / "metrics").read_text())["mat"] for step in kept]
        assert mats == [found["mat"]["4"] for found in stored[1]]
    np.testing.assert_allclose(stored[0], computed[0], rtol=1e-5)


def test_other_contracts_and_damage_are_named(made, tmp_path):
    settings, target, _ = made
    write_features(settings, target, yes=True)
    with pytest.raises(UserError, match=r"layers: \[1\] there, \[0\] now"):
        write_features(dataclasses.replace(settings, target_layer_ids=(0,)), target, yes=True)
    files = FeatureFiles(settings.features, prepare(settings, target).features_contract(settings), False)
    shard = Path(settings.features) / "taps" / "c" / "5" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"taps/c/5 is damaged .*delete it"):
        files.read([4, 5])
    data[100] ^= 1
    shard.write_bytes(bytes(data))
    half = np.arange(2 * 300 * 4).reshape(2, 300, 4).astype("bfloat16")
    shape = {"rows": 3, "seq_len": 300, "width": 4, "hidden": None, "dtype": "bfloat16"}
    files = FeatureFiles(tmp_path / "half", shape, create=True)
    files.write([0, 2], [Features(row, None) for row in half])
    assert files.finished() == {0, 2}
    np.testing.assert_array_equal(files.read([2, 0]).taps, half[::-1])
    with pytest.raises(UserError, match="names no folder"):
        write_features(dataclasses.replace(settings, features=None), target, yes=True)
    with pytest.raises(SystemExit) as stopped:
        main(["features", str(tmp_path / "none.py")])
    assert stopped.value.code == 2
