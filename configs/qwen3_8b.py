"""DScout drafter for Qwen3-8B: as configs/qwen3_4b.py, on that target's widths and layers.

Reproduces: nothing yet.
Hardware: one accelerator with 80 GB, of which 65 GB are used by arithmetic; not yet tried. On pod slices:
    configs/pods/qwen3_8b.py.
Cost: not yet measured.
Commands (the target from Hugging Face first, into models/Qwen3-8B):
    dscout regenerate PROMPTS.jsonl runs/qwen3_8b/answers.jsonl --target models/Qwen3-8B \\
        --dtype bfloat16 --max-new-tokens 2048 --thinking False
    dscout train configs/qwen3_8b.py
    dscout export runs/qwen3_8b exports/Qwen3-8B-DScout
"""

import dataclasses

from configs import qwen3_4b

config = dataclasses.replace(
    qwen3_4b.config,
    data="runs/qwen3_8b/answers.jsonl",
    run="runs/qwen3_8b",
    target="models/Qwen3-8B",
)
