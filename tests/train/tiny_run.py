"""A tiny training run, for tests in this process and, as a program, for those over several.

    python tests/train/tiny_run.py FOLDER PORT PROCESS_ID [term | kill]

`term` asks process 0 to end, by SIGTERM, at its third step; `kill` ends every process by SIGKILL once step 4
is saved.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.models import Target
from dscout_jax.objective import published_dscout
from train import loop
from train.hosts import join
from train.settings import TrainSettings

PROCESSES, DEVICES = 2, 4
CONFIG = TargetConfig(48, 32, 64, 3, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, False, True, (1,))


def tiny_target():
    params = Target(CONFIG).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    tokenizer = SimpleNamespace(special_ids={}, show_mask=lambda ids, mask: f"{ids} {mask}")
    return SimpleNamespace(config=CONFIG, params=params, tokenizer=tokenizer, name="tiny", fingerprint="f00d")


def write_answers(path):
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for i in range(24):
            answer = rng.integers(2, 46, rng.integers(4, 20)).tolist()
            file.write(json.dumps({"id": i, "prompt_tokens": [3, 4, 5], "answer_tokens": answer}) + "\n")


def tiny_settings(folder, run="run"):
    return TrainSettings(
        objective=published_dscout(4),
        data=str(Path(folder) / "answers.jsonl"),
        run=str(Path(folder) / run),
        num_layers=1,
        block_size=4,
        target_layer_ids=(1,),
        mask_token_id=47,
        seq_len=24,
        batch=8,
        num_anchors=4,
        steps=6,
        heldout=4,
        eval_every=6,
        save_every=4,
        chunk=16,
        cache_features=False,
        mesh=(2, 4, 1),
    )


def dying(make_step, folder, how):
    """`make_step` whose steps end the process as asked."""

    def make(*args):
        step, calls = make_step(*args), []

        def wrapped(*args):
            calls.append(None)
            if how == "term" and len(calls) == 3 and jax.process_index() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "term" and len(calls) >= 3:
                time.sleep(2.0)  # the processes agree on a step that is some steps ahead
            if how == "kill" and int(args[0].step) >= 4:
                saved = Path(folder) / "run" / "checkpoints" / "4"
                for _ in range(600):  # the save is asynchronous
                    if not saved.is_dir():
                        time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args)

        return wrapped

    return make


if __name__ == "__main__":
    folder, port, process_id, *how = sys.argv[1:]
    join(f"localhost:{port}", PROCESSES, int(process_id))
    if how:
        loop.make_step = dying(loop.make_step, folder, how[0])
    loop.train(tiny_settings(folder), tiny_target())
