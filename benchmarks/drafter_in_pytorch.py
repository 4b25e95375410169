"""An exported drafter in PyTorch beside transformers' target, against ours: the same rounds, and how fast.

    pip install -e '.[parity]'
    python benchmarks/drafter_in_pytorch.py PROMPTS.jsonl --drafter FOLDER

Both sides decode greedily in fp32, draft from the whole vocabulary, and stop at nothing but the budget. The
PyTorch side is the parity tests' reference: it keeps the target's keys and values, not the drafter's, so its
speed is what a plain implementation gives and no engine's. Prefill counts on both sides, compilation on none.
"""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

import jax.numpy as jnp
import torch
import transformers

from dscout_jax.decode import Decoder, mat
from dscout_jax.interop import load_drafter, load_target
from dscout_jax.interop.huggingface import target_folder
from dscout_jax.interop.jsonl import read_jsonl
from dscout_jax.models import Drafter, Target
from infer.load import encode_prompt
from infer.machine import describe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))
import torch_dflash as reference


def main() -> None:
    """Measures, prints, writes OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("runs/drafter-in-pytorch.json"))
    options = parser.parse_args()
    loaded = load_target(options.target, jnp.float32)
    config, params = load_drafter(options.drafter, jnp.float32)
    decoder = Decoder(Target(loaded.config), loaded.params, Drafter(config), params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        target_folder(options.target), dtype=torch.float32
    ).eval()
    drafter = reference.DFlash(options.drafter)
    asked = [row["turns"][0] for row in islice(read_jsonl(options.prompts), options.limit)]
    ours, theirs, seconds, same = [], [], {"ours": 0.0, "pytorch": 0.0}, 0
    for text in asked:
        prompt = encode_prompt(loaded, text)
        (answer,) = decoder.generate([prompt], options.max_new_tokens)
        seconds["ours"] += answer.prefill_seconds + answer.decode_seconds
        begun = time.perf_counter()
        tokens, accepted = reference.decode(model, drafter, prompt, options.max_new_tokens)
        seconds["pytorch"] += time.perf_counter() - begun
        ours.append(answer.accepted)
        theirs.append(accepted)
        same += answer.tokens == tokens and answer.accepted == accepted
    count = len(asked) * options.max_new_tokens
    result = {
        "prompts": len(asked),
        "max_new_tokens": options.max_new_tokens,
        "block_size": config.block_size,
        "mat": {"ours": mat(ours), "pytorch": mat(theirs)},
        "same_rounds": same,
        "tokens_per_s": {side: count / taken for side, taken in seconds.items()},
        "machine": describe() | {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
