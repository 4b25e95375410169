"""DScout drafter for SmolLM2-135M-Instruct, the embedded CPU target.

Reproduces: the full DScout recipe (mixed horizons, prefix unmasking, AWL); not yet run to its end.
Hardware: a CPU with 2 cores and 8 GB of memory.
Cost: not yet measured.
Commands:
    dscout regenerate PROMPTS.jsonl runs/smollm2_135m/answers.jsonl
    dscout train configs/smollm2_135m.py
PROMPTS.jsonl is any file of {"turns": [...]}; a few thousand prompts like the ones to be served.
"""

from dscout_jax.objective import dscout
from train.settings import TrainSettings

config = TrainSettings(
    objective=dscout(block_size=8),
    data="runs/smollm2_135m/answers.jsonl",
    run="runs/smollm2_135m",
    num_layers=2,
    block_size=8,
    target_layer_ids=(1, 8, 15, 22, 28),
    seq_len=384,
    batch=4,
    num_anchors=32,
    query_budget=160,
    steps=4000,
    train_vocab="seen",
    heldout=32,
    eval_every=500,
    save_every=250,
)
