"""Kills a tiny training with SIGKILL at random moments and looks at what the next start finds.

    python benchmarks/kill_resume.py --kills 20 --out docs/results/kill-resume.json

After each kill the newest whole checkpoint must not be further behind the last logged step than `save_every`,
be the next one half written or not. In the end losses and weights must be, bit by bit, those of a run that
nobody killed. Children are forked before jax wakes up, so that a life costs no imports.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.interop import LoadedTarget, load_drafter
from dscout_jax.models import Target
from dscout_jax.objective import dscout
from train.loop import train
from train.settings import TrainSettings

CONFIG = TargetConfig(48, 32, 64, 3, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, False, True, (1,))


class Words:
    """Stands for a tokenizer."""

    special_ids: dict[str, int] = {}  # noqa: RUF012

    def show_mask(self, ids: list[int], mask: list[bool]) -> str:
        """The ids themselves."""
        return " ".join(map(str, ids))


def child(folder: Path, run: str, steps: int, every: int) -> None:
    """One life of the training, to its end or its death; never returns."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(os.open(folder / "errors.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    params = Target(CONFIG).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    settings = TrainSettings(
        objective=dscout(4),
        data=str(folder / "answers.jsonl"),
        run=str(folder / run),
        num_layers=1,
        block_size=4,
        target_layer_ids=(1,),
        mask_token_id=47,
        seq_len=24,
        batch=8,
        num_anchors=4,
        steps=steps,
        heldout=0,
        save_every=every,
        chunk=16,
    )
    code = 1
    try:
        train(settings, LoadedTarget(CONFIG, params, Words(), "tiny", "f00d"))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def logged(run: Path) -> dict[int, float]:
    """Step -> loss of the whole lines of a run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def checkpoints(run: Path) -> tuple[int, int]:
    """(newest whole checkpoint, newest that is or was being written), 0 where there is none."""
    names = [p.name for p in (run / "checkpoints").glob("*")]
    whole = [int(name) for name in names if name.isdigit()]
    begun = [int(name.partition(".")[0]) for name in names if name.partition(".")[0].isdigit()]
    return max(whole, default=0), max(begun, default=0)


def live(folder: Path, options: argparse.Namespace, draw: random.Random) -> dict[str, Any] | None:
    """One life and its end; None where the run came to its own."""
    run = folder / "killed"
    before = checkpoints(run)[0]
    pid = os.fork()
    if pid == 0:
        child(folder, "killed", options.steps, options.save_every)
    # A third die before they have done anything, the others some steps later and at any moment of a step.
    aim = draw.choice((None, draw.randrange(1, 3 * options.save_every), draw.randrange(1, 30)))
    pause = draw.uniform(0, 4.0 if aim is None else 0.3)
    if aim is not None:
        while max(logged(run), default=0) < before + aim and os.waitid(os.P_PID, pid, _POLL) is None:
            time.sleep(0.005)
    deadline = time.monotonic() + pause
    while time.monotonic() < deadline and os.waitid(os.P_PID, pid, _POLL) is None:
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        if os.waitstatus_to_exitcode(status):
            raise RuntimeError((folder / "errors.txt").read_text()[-2000:])
        return None
    step = max(logged(run), default=0)
    whole, begun = checkpoints(run)
    return {"step": step, "resumes_at": whole, "lost": step - whole, "writing": begun > whole}


_POLL = os.WEXITED | os.WNOHANG | os.WNOWAIT


def main() -> None:
    """Prints and writes JSON; exits with 1 where a step was lost or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill-resume.json"))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = np.random.default_rng(0)
        with open(folder / "answers.jsonl", "w") as file:
            for i in range(64):
                answer = rows.integers(2, 46, rows.integers(4, 20)).tolist()
                file.write(json.dumps({"id": i, "prompt_tokens": [3, 4], "answer_tokens": answer}) + "\n")
        if (pid := os.fork()) == 0:
            child(folder, "straight", options.steps, options.save_every)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError((folder / "errors.txt").read_text()[-2000:])
        lives: list[dict[str, Any]] = []
        while len(lives) < options.kills and (life := live(folder, options, draw)) is not None:
            lives.append(life)
            print(life, flush=True)
        if (pid := os.fork()) == 0:
            child(folder, "killed", options.steps, options.save_every)
        os.waitpid(pid, 0)
        same_losses = logged(folder / "killed") == logged(folder / "straight")
        (_, one), (_, other) = (load_drafter(folder / run / "drafter") for run in ("killed", "straight"))
        same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), one, other)
        found = {
            "kills": len(lives),
            "steps": options.steps,
            "save_every": options.save_every,
            "most_lost": max((life["lost"] for life in lives), default=0),
            "within_the_interval": all(life["lost"] <= options.save_every for life in lives),
            "every_loss_the_same": same_losses,
            "weights_the_same_bits": all(jax.tree.leaves(same)),
            "lives": lives,
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print({name: value for name, value in found.items() if name != "lives"})
    good = found["within_the_interval"] and same_losses and found["weights_the_same_bits"]
    raise SystemExit(0 if good and len(lives) == options.kills else 1)


if __name__ == "__main__":
    main()
