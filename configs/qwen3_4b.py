"""DScout drafter for Qwen3-4B, in the shape of the published DFlash drafter: 5 layers, blocks of 16.

Reproduces: nothing yet; the recipe is DScout as published, with DFlash's numbers where it has none of its
    own (learning rate, length, 8,192 slots a sequence, as 512 anchors x 16 make).
Hardware: one accelerator with 80 GB, or several that each hold all weights; not yet tried. Where weights are
    split, on pod slices, configs/pods/qwen3_4b.py scans the layers instead.
Cost: not yet measured.
Commands (the target from Hugging Face first, into models/Qwen3-4B):
    dscout regenerate PROMPTS.jsonl runs/qwen3_4b/answers.jsonl --target models/Qwen3-4B \\
        --dtype bfloat16 --max-new-tokens 2048 --thinking False
    dscout train configs/qwen3_4b.py
    dscout export runs/qwen3_4b exports/Qwen3-4B-DScout
"""

from dscout_jax.objective import published_dscout
from train.settings import TrainSettings

config = TrainSettings(
    # Not `dscout`, the laboratory's choice where a step sees few anchors: here every fourth position is one
    # anyhow, and its 1,664 shorter blocks take more memory than the 819 of these.
    objective=published_dscout(block_size=16),
    data="runs/qwen3_4b/answers.jsonl",
    run="runs/qwen3_4b",
    target="models/Qwen3-4B",
    num_layers=5,
    block_size=16,
    # Beyond the tokenizer's 151,669 ids, inside the embedding's 151,936 rows: no text uses it.
    mask_token_id=151669,
    init="fresh",
    seq_len=3072,
    batch=32,
    # Eight rows at a time, and of each 32 blocks through all layers: some 35 GB in all, by arithmetic.
    accumulation=4,
    anchor_chunk=32,
    attention_chunk=16,
    query_budget=8192,
    steps=12000,
    learning_rate=6e-4,
    dtype="bfloat16",
    # 25.6 kB a token: more than a host's memory holds.
    cache_features=False,
    heldout=128,
    eval_every=1000,
    save_every=500,
)
