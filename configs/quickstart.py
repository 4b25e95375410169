"""The short training of `dscout quickstart`: SmolLM2-135M-Instruct, the prompts that the package ships.

Reproduces: the table of `make quickstart`.
Hardware: a CPU with 2 cores and 8 GB of memory.
Cost: 13 minutes and 3 GiB on 2 cores of an AMD EPYC with AVX512-bf16; 8 of them training, 1 installing.
Command: make quickstart, or `dscout quickstart`.
"""

from dscout_jax.objective import dscout
from train.settings import TrainSettings

config = TrainSettings(
    objective=dscout(block_size=4),
    data="runs/quickstart/answers.jsonl",
    run="runs/quickstart",
    num_layers=1,
    block_size=4,
    target_layer_ids=(8, 15, 22, 28),
    seq_len=160,
    batch=4,
    query_budget=96,
    steps=100_000,  # minutes end it, and bring the learning rate down
    learning_rate=1e-3,
    train_vocab="seen",
    heldout=8,
    eval_every=200,
    save_every=100,
)
