"""DScout drafter for SmolLM2-135M-Instruct, the embedded CPU target.

Reproduces: docs/results/main-job.md.
Hardware: a CPU with 2 cores, bf16 instructions and 16 GB of memory.
Cost: 2 hours on 2 cores of an AMD EPYC with AVX512-bf16: 69 minutes for 6,903 answers, 53 for training.
    38 of the 53 are spent on steps that make the target's features, once for each answer.
Commands (the first three in runs/smollm2_135m; CHAT and MATHS: the chat prompts, and a thousand of the maths
prompts, of PROMPTS.jsonl):
    dscout regenerate PROMPTS.jsonl greedy.jsonl --dtype bfloat16 --batch 96 --max-new-tokens 128
    dscout regenerate CHAT.jsonl chat1.jsonl --dtype bfloat16 --batch 96 --max-new-tokens 128 \\
        --temperature 0.6 --seed 1            # chat2.jsonl with --seed 2, maths1.jsonl of MATHS with --seed 1
    cat greedy.jsonl chat1.jsonl chat2.jsonl maths1.jsonl > answers.jsonl
    dscout train configs/smollm2_135m.py
PROMPTS.jsonl is any file of {"turns": [...]}; a few thousand prompts like the ones to be served.
"""

from dscout_jax.objective import Objective
from dscout_jax.objective.inclusion import mixed
from dscout_jax.objective.prediction import ce, mixture, soft_ce
from dscout_jax.objective.weighting import awl
from train.settings import TrainSettings

# Few blocks can be afforded and most rounds end early: short horizons, and the target's own distribution
# beside the text, which says more about each of the few tokens than the text alone.
objective = Objective(
    "dscout",
    mixed((4, 5, 6)),
    weighting=awl(),
    prediction=mixture([(0.5, ce), (0.5, soft_ce)]),
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
    steps=1800,
    learning_rate=1e-3,
    dtype="bfloat16",
    train_vocab="seen",
    # Of 18,600 ids seen; more cost a round more time than they save.
    draft_vocab=8192,
    heldout=32,
    eval_every=800,
    save_every=200,
)
