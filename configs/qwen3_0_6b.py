"""DScout drafter for Qwen3-0.6B: as configs/qwen3_4b.py, on that target's widths and layers.

Reproduces: nothing yet.
Hardware: one accelerator with 40 GB; not yet tried.
Cost: not yet measured.
Commands (the target from Hugging Face first, into models/Qwen3-0.6B):
    dscout regenerate PROMPTS.jsonl runs/qwen3_0_6b/answers.jsonl --target models/Qwen3-0.6B \\
        --dtype bfloat16 --max-new-tokens 2048 --thinking False
    dscout train configs/qwen3_0_6b.py
    dscout export runs/qwen3_0_6b exports/Qwen3-0.6B-DScout
"""

import dataclasses

from configs import qwen3_4b

config = dataclasses.replace(
    qwen3_4b.config,
    data="runs/qwen3_0_6b/answers.jsonl",
    run="runs/qwen3_0_6b",
    target="models/Qwen3-0.6B",
)
