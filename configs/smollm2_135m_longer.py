"""A longer recipe for SmolLM2-135M-Instruct: goes on from configs/smollm2_135m.py with more answers.

Reproduces: docs/results/main-job.md, the rows of the longer recipe.
Hardware: a CPU with 2 cores, bf16 instructions and 16 GB of memory.
Cost: on 2 cores of an AMD EPYC with AVX512-bf16 and with other work beside it, 37 minutes for 3,422 sampled
    answers and 62 for training, on top of the first recipe's 94.
Commands (CHAT and MATHS: the chat and maths prompts of the first recipe; OTHER: answers of the first recipe
to all other prompts):
    dscout regenerate CHAT.jsonl chat1.jsonl --dtype bfloat16 --batch 96 --max-new-tokens 128 \\
        --temperature 0.6 --seed 1            # chat2.jsonl with --seed 2, maths1.jsonl of MATHS with --seed 1
    cat chat1.jsonl chat2.jsonl maths1.jsonl OTHER.jsonl > runs/smollm2_135m_longer/answers.jsonl
    dscout train configs/smollm2_135m_longer.py --minutes 62
"""

import dataclasses

from configs.smollm2_135m import config as first

config = dataclasses.replace(
    first,
    init="runs/smollm2_135m/drafter",
    data="runs/smollm2_135m_longer/answers.jsonl",
    run="runs/smollm2_135m_longer",
    steps=4000,
    learning_rate=6e-4,
    draft_vocab=8192,
)
