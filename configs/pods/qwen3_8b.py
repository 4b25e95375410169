"""Qwen3-8B: a 5-layer drafter on a TPU slice; `dscout plan` reads its shapes without the weights.

Reproduces: docs/results/pods/.
Hardware: from 16 v5e chips up; weights are split as far as the memory asks.
Cost: not measured; the bound is in docs/results/pods/
Commands:
    dscout plan configs/pods/qwen3_8b.py --topology v5p:4x4x4 --batch 64
    dscout train configs/pods/qwen3_8b.py        # with `target` set to the real folder, on every host
"""

import dataclasses
from pathlib import Path

from configs.pods.qwen3_4b import config as smaller

config = dataclasses.replace(
    smaller,
    data="runs/qwen3_8b/answers.jsonl",
    run="runs/qwen3_8b",
    target=str(Path(__file__).parent / "qwen3_8b"),
)
