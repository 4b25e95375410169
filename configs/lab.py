"""A drafter for the laboratory's target: the DFlash recipe at blocks of 16.

Reproduces: the base line of docs/results/ladder.md.
Hardware: a CPU with 2 cores and 4 GB of memory.
Cost: 2 cores of an AMD EPYC with AVX512-bf16: 9 minutes for the target and its answers, 1.7 for this.
Commands:
    dscout lab runs/lab
    dscout train configs/lab.py
"""

from dscout_jax.objective import dflash
from train.settings import TrainSettings

config = TrainSettings(
    objective=dflash(block_size=16),
    data="runs/lab/answers.jsonl",
    run="runs/lab/dflash",
    target="runs/lab/target",
    num_layers=2,
    block_size=16,
    target_layer_ids=(0, 1, 2),
    seq_len=288,
    batch=8,
    query_budget=512,
    steps=300,
    learning_rate=2e-3,
    heldout=16,
    eval_every=300,
    save_every=150,
)
