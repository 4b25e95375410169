"""The ladder on a real model, SmolLM2-135M-Instruct: maths, chat and code that no recipe was trained on.

Reproduces: the part of docs/results/ladder.md on SmolLM2, once that is measured.
Hardware: a CPU with 2 cores, bf16 instructions and 12 GB of memory.
Cost: not yet measured; ten runs of about half an hour each, and the target's features once. It resumes.
Commands:
    dscout regenerate PROMPTS.jsonl runs/smollm2_135m/greedy.jsonl \\
        --dtype bfloat16 --batch 96 --max-new-tokens 128
    dscout ladder configs/ladder/smollm2.py
PROMPTS.jsonl is as for configs/smollm2_135m.py. The prompts decoded are JSONL of {"turns": [...]} too, under
data/: gsm8k.jsonl, mt-bench.jsonl, humaneval.jsonl.
"""

import dataclasses

from configs.smollm2_135m import config as base
from dscout_jax.objective import auf, dflash, dpace, dscout, published_dscout
from train.ladder import Ladder

published = published_dscout(8)
mixed = dataclasses.replace(dflash(8), name="mixed", horizon=published.horizon)
unmasked = dataclasses.replace(mixed, name="unmasked", unmask=published.unmask)

ladder = Ladder(
    base=dataclasses.replace(
        base,
        data="runs/smollm2_135m/greedy.jsonl",
        objective=dflash(8),
        block_size=8,
        query_budget=192,
        steps=1600,
    ),
    recipes={
        "dflash": {"objective": dflash(8), "seeds": (0, 1)},
        "+ mixed horizons": {"objective": mixed},
        "+ unmasking": {"objective": unmasked},
        "+ awl = published dscout": {"objective": published},
        "dscout": {"objective": dscout(8), "seeds": (0, 1)},
        "dpace": {"objective": dpace(8)},
        "auf": {"objective": auf(8)},
        "dscout, fresh start": {"objective": dscout(8), "init": "fresh"},
    },
    datasets={name: f"data/{name}.jsonl" for name in ("gsm8k", "mt-bench", "humaneval")},
    block_sizes=(8, 6, 4),
    limit=80,
    out="runs/ladder_smollm2",
)
