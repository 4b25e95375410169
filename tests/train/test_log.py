"""What a run tells: rates, memory, TensorBoard and wandb, a trace; paths to buckets reach their library."""

import dataclasses
import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_run import tiny_settings, tiny_target, write_answers

from dscout_jax.cli import main
from dscout_jax.errors import UserError
from dscout_jax.interop import load_drafter
from train import log
from train.convert import open_target
from train.dataset import load_rows, pack
from train.export import decodable, export, import_drafter, is_run
from train.features import FeatureFiles
from train.flops import PEAKS
from train.log import Speed, scalars
from train.loop import train
from train.paths import place
from train.prompts import load_prompts
from train.regenerate import regenerate

LOGGERS = tuple(name for name, package in log.PACKAGES.items() if find_spec(package))  # the extra `logging`


def test_a_run_tells_rates_memory_and_loggers_and_takes_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setitem(PEAKS, "cpu", 1e9)
    write_answers(tmp_path / "answers.jsonl")
    settings = dataclasses.replace(
        tiny_settings(tmp_path), mesh=None, loggers=LOGGERS, profile=(2, 3), steps=4
    )
    drafter = train(settings, tiny_target())
    load_drafter(drafter)
    run = Path(settings.run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert "seconds" not in steps[0] and all(row["host_memory_peak"] > 1e6 for row in steps)
    figures = {"slot_loss", "gradient_share", "weight", "accuracy", "bare_accuracy", "survival", "included"}
    for row in steps:
        assert all(len(row[name]) == 4 for name in figures) and row["skipped_steps"] == 0
        assert 0 < row["blocks"] < row["queries"] <= settings.batch * 11  # horizons 2, 2, 3, 4 a row
    for row in steps[1:]:
        assert row["tokens_per_second"] == pytest.approx(8 * 24 / row["seconds"])
        assert row["mfu"] > 0
    assert list((run / "profile").rglob("*.xplane.pb"))
    assert all(list((run / name).iterdir()) for name in LOGGERS)
    if "wandb" in LOGGERS:
        assert list((run / "wandb").glob("offline-run-*"))
    if len(LOGGERS) < len(log.PACKAGES):
        pytest.skip(f"only {LOGGERS or 'none'} of the loggers: install the extra `logging` for all")


def test_numbers_of_a_record_by_name():
    record = {"step": 3, "time": 1.0, "loss": 2.0, "accuracy": [0.5, 1], "eval": {"mat": {"8": 1.5}}}
    found = dict(scalars(record))
    assert found == {"loss": 2.0, "accuracy/0": 0.5, "accuracy/1": 1.0, "eval/mat/8": 1.5}


def test_lines_are_json_and_the_file_is_there_whole(tmp_path, monkeypatch):
    run = place(tmp_path)
    with log.Log(run, 0) as first:
        first.write({"step": 1, "loss": math.nan, "accuracy": [1.0, -math.inf], "eval": {"mat": {"8": 1.5}}})
        first.write({"step": 2, "loss": 1.0})
    path = run / "metrics.jsonl"
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert rows[0]["loss"] is None and rows[0]["accuracy"] == [1.0, None] and rows[1]["loss"] == 1.0
    before = path.read_text()

    def torn(*args):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", torn)
        with pytest.raises(OSError, match="killed"):
            log.Log(run, 1)
    assert path.read_text() == before
    with log.Log(run, 1) as again:
        assert again.scores == {1: {"mat": {"8": 1.5}}}
    assert path.read_text() == before.splitlines(keepends=True)[0]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rates_leave_evaluations_out(monkeypatch):
    clock = iter([10.0, 12.0, 100.0, 101.0])
    monkeypatch.setattr(log.time, "monotonic", lambda: next(clock))
    speed = Speed(tokens=50, flops=8e9, peak=1e10)
    assert "seconds" not in speed.after_step()
    found = speed.after_step()
    assert (found["tokens_per_second"], found["mfu"]) == (25.0, 0.4)
    speed.pause()
    assert "seconds" not in speed.after_step()
    assert speed.after_step()["seconds"] == 1.0


def test_missing_packages_and_wrong_names_are_told_before_any_work(tmp_path, monkeypatch):
    settings = tiny_settings(tmp_path)
    monkeypatch.setitem(log.PACKAGES, "wandb", "no_such_package")
    with pytest.raises(UserError, match="needs the package no_such_package"):
        train(dataclasses.replace(settings, loggers=("wandb",)), tiny_target())
    assert not Path(settings.run).exists()
    for wrong in ({"loggers": ("comet",)}, {"profile": (3, 2)}, {"data": (("a", 0.0),)}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            dataclasses.replace(settings, **wrong)


def test_a_bucket_reaches_the_library_that_is_missing(tmp_path, capsys):
    bucket = "gs://bucket/of/nobody"
    settings = tiny_settings(tmp_path)
    for use in (
        lambda: place(bucket),
        lambda: load_rows(f"{bucket}/answers.jsonl", 24, 4),
        lambda: train(dataclasses.replace(settings, run=bucket), tiny_target()),
        lambda: is_run(bucket),
        lambda: export(bucket, tmp_path / "out"),
        lambda: load_prompts(f"{bucket}/prompts.jsonl"),
        lambda: open_target(bucket),
        lambda: FeatureFiles(bucket, {}, create=False),
        lambda: pack([f"{bucket}/answers.jsonl"], tmp_path / "a.array_record"),
    ):
        with pytest.raises(UserError, match=r"gs://bucket.*gcsfs.*mount"):
            use()
    with pytest.raises(UserError, match="copy them to a local disk"):
        load_rows(f"{bucket}/a.array_record", 24, 4)
    for use in (
        lambda: export(tmp_path, bucket),
        lambda: import_drafter(bucket, tmp_path / "run"),
        lambda: import_drafter(tmp_path, bucket),
        lambda: decodable(bucket),
        lambda: regenerate(tiny_target(), tmp_path / "prompts.jsonl", f"{bucket}/answers.jsonl"),
        lambda: pack([tmp_path / "answers.jsonl"], f"{bucket}/a.array_record"),
    ):
        with pytest.raises(UserError, match=r"gs://bucket/of/nobody.* on a local disk only"):
            use()
    for words in (
        ("export", f"{bucket}/run", str(tmp_path / "out")),
        ("import", f"{bucket}/drafter", str(tmp_path / "run")),
        ("convert", str(tmp_path), f"{bucket}/out"),
        ("pack", f"{bucket}/answers.jsonl", "--out", str(tmp_path / "a.array_record")),
        ("generate", "hello", "--drafter", f"{bucket}/drafter+lookup"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        assert stopped.value.code == 2 and f"{bucket}/" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert place("~/x").is_absolute() and "~" not in str(place("~/x"))
