"""DScout drafter for SmolLM2-135M-Instruct, the embedded CPU target.

Reproduces: docs/results/main-job.md.
Hardware: a CPU with 2 cores, bf16 instructions and 10 GB of memory.
Cost: on 2 cores of an AMD EPYC with AVX512-bf16, 32 minutes for 3,481 answers and 62 for training.
Commands:
    dscout regenerate PROMPTS.jsonl runs/smollm2_135m/answers.jsonl \\
        --dtype bfloat16 --batch 96 --max-new-tokens 128
    dscout train configs/smollm2_135m.py --minutes 62
PROMPTS.jsonl is any file of {"turns": [...]}; a few thousand prompts like the ones to be served.
"""

from dscout_jax.objective import Objective
from dscout_jax.objective.inclusion import mixed, prefix_unmasking
from dscout_jax.objective.prediction import ce, mixture, soft_ce
from dscout_jax.objective.weighting import awl
from train.settings import TrainSettings

# Few blocks can be afforded and most rounds end early: short horizons, few revealed slots, and the target's
# own distribution beside the text, which says more about each of the few tokens than the text alone.
objective = Objective(
    "dscout",
    mixed((4, 5, 6)),
    prefix_unmasking(rho=0.25),
    awl(),
    mixture([(0.5, ce), (0.5, soft_ce)]),
)

config = TrainSettings(
    objective=objective,
    data="runs/smollm2_135m/answers.jsonl",
    run="runs/smollm2_135m",
    num_layers=3,
    block_size=6,
    target_layer_ids=(1, 8, 15, 22, 28),
    seq_len=256,
    batch=8,
    query_budget=160,
    steps=2400,
    learning_rate=1e-3,
    dtype="bfloat16",
    train_vocab="seen",
    heldout=32,
    eval_every=800,
    save_every=200,
)
