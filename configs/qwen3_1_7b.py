"""DScout drafter for Qwen3-1.7B: as configs/qwen3_4b.py, on that target's widths and layers.

Reproduces: nothing yet.
Hardware: one accelerator with 40 GB; not yet tried.
Cost: not yet measured.
Commands (the target from Hugging Face first, into models/Qwen3-1.7B):
    dscout regenerate PROMPTS.jsonl runs/qwen3_1_7b/answers.jsonl --target models/Qwen3-1.7B \\
        --dtype bfloat16 --max-new-tokens 2048 --thinking False
    dscout train configs/qwen3_1_7b.py
    dscout export runs/qwen3_1_7b exports/Qwen3-1.7B-DScout
"""

import dataclasses

from configs import qwen3_4b

config = dataclasses.replace(
    qwen3_4b.config,
    data="runs/qwen3_1_7b/answers.jsonl",
    run="runs/qwen3_1_7b",
    target="models/Qwen3-1.7B",
)
