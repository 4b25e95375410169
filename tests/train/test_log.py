"""What a run tells: rates, memory, TensorBoard and wandb, a trace; paths to buckets reach their library."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_run import tiny_settings, tiny_target, write_answers

from dscout_jax.errors import UserError
from dscout_jax.interop import load_drafter
from train import log
from train.dataset import load_rows
from train.export import export, is_run
from train.flops import PEAKS
from train.log import Speed, scalars
from train.loop import train
from train.paths import place

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


def test_a_bucket_reaches_the_library_that_is_missing(tmp_path):
    bucket = "gs://bucket/of/nobody"
    settings = tiny_settings(tmp_path)
    for use in (
        lambda: place(bucket),
        lambda: load_rows(f"{bucket}/answers.jsonl", 24, 4),
        lambda: train(dataclasses.replace(settings, run=bucket), tiny_target()),
        lambda: is_run(bucket),
        lambda: export(bucket, tmp_path / "out"),
    ):
        with pytest.raises(UserError, match=r"gs://bucket.*gcsfs.*mount"):
            use()
    with pytest.raises(UserError, match="copy them to a local disk"):
        load_rows(f"{bucket}/a.array_record", 24, 4)
    assert place("~/x").is_absolute() and "~" not in str(place("~/x"))
