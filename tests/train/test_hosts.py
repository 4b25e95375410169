"""Two processes of four devices train as one process of eight does: asked to end, killed, gone on with."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import DEVICES, PROCESSES, dying, tiny_settings, tiny_target, write_answers

from dscout_jax.errors import UserError
from dscout_jax.interop import load_drafter
from train import loop
from train.hosts import join
from train.loop import train

HERE = Path(__file__).parent


def launch(folder, *how):
    """Exit codes of a run over all processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    words = [sys.executable, str(HERE / "tiny_run.py"), str(folder), str(port)]
    runs = []
    for i in range(PROCESSES):
        with open(folder / f"{'-'.join(how) or 'last'}.{i}.log", "w") as log:
            runs.append(subprocess.Popen([*words, str(i), *how], env=environment, stdout=log, stderr=log))
    try:
        return [run.wait(timeout=600) for run in runs]
    finally:
        for run in runs:
            run.kill()


@pytest.mark.parametrize(
    ("said", "raised"), [("coordinator_address should be defined.", None), ("odd endpoints", UserError)]
)
def test_only_a_machine_without_a_cluster_runs_alone(monkeypatch, said, raised):
    def initialize():
        raise ValueError(said)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(raised, match=f"{said}.*--coordinator") if raised else contextlib.nullcontext():
        join()


def test_one_process_asked_to_end_saves_and_exits_with_0(tmp_path, monkeypatch):
    write_answers(tmp_path / "answers.jsonl")
    settings = tiny_settings(tmp_path)
    monkeypatch.setattr(loop, "make_step", dying(loop.make_step, tmp_path, "term"))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        loop.train(settings, tiny_target())
    assert stopped.value.code == 0 and signal.getsignal(signal.SIGTERM) is before
    assert steps(tmp_path) == [2, 3] and not (tmp_path / "run" / "drafter").exists()
    # The evaluation of the end is what a signal must not wait for.
    assert "eval" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def steps(folder):
    return sorted(int(p.name) for p in (folder / "run" / "checkpoints").iterdir() if p.name.isdigit())


def test_two_processes_stop_together_survive_a_kill_and_end_as_one_does(tmp_path):
    write_answers(tmp_path / "answers.jsonl")
    assert launch(tmp_path, "term") == [0, 0], (tmp_path / "term.0.log").read_text()[-3000:]
    saved = steps(tmp_path)
    assert 2 <= saved[-1] < 6, "a SIGTERM saves where it stopped"
    assert not (tmp_path / "run" / "drafter").exists()
    assert -signal.SIGKILL in launch(tmp_path, "kill"), (tmp_path / "kill.0.log").read_text()[-3000:]
    assert steps(tmp_path)[-1] == 4
    assert launch(tmp_path) == [0, 0], (tmp_path / "last.0.log").read_text()[-3000:]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in logged if "loss" in r] == [1, 2, 3, 4, 5, 6]

    _, several = load_drafter(tmp_path / "run" / "drafter")
    _, one = load_drafter(train(tiny_settings(tmp_path, "one"), tiny_target()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), several, one)
    alone = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    for here, there in zip(logged, alone, strict=True):
        np.testing.assert_allclose(here.get("loss", 0), there.get("loss", 0), rtol=1e-5)
    assert [r["eval"] for r in logged if "eval" in r] == [r["eval"] for r in alone if "eval" in r] != []
