"""Qwen3-4B: a 5-layer drafter on a TPU slice; `dscout plan` reads its shapes without the weights.

Reproduces: docs/results/pods/.
Hardware: from 16 v5e chips up; weights are split as far as the memory asks.
Cost: not measured; the bound is in docs/results/pods/
Commands:
    dscout plan configs/pods/qwen3_4b.py --topology v5p:4x4x4 --batch 64
    dscout train configs/pods/qwen3_4b.py        # with `target` set to the real folder, on every host
"""

from pathlib import Path

from dscout_jax.objective import dflash
from train.settings import TrainSettings

config = TrainSettings(
    objective=dflash(block_size=16),
    data="runs/qwen3_4b/answers.jsonl",
    run="runs/qwen3_4b",
    target=str(Path(__file__).parent / "qwen3_4b"),
    num_layers=5,
    block_size=16,
    mask_token_id=151669,
    seq_len=3072,
    batch=16,
    num_anchors=512,
    dtype="bfloat16",
    cache_features=False,
    chunk=512,
    attention_chunk=32,
    remat="layer",
    scan_layers=True,
)
