"""One step of the target beside PyTorch and transformers: same weights, same machine, one run.

    pip install -e '.[parity]'
    python benchmarks/against_pytorch.py --out docs/results/against-pytorch

Both sides run a forward of T tokens after a context of 256, head and argmax included; ours inside the loop
that decoding uses, theirs eagerly with a DynamicCache, as transformers' own generation does. Sides take turns
(a slow spell of the machine falls on both); figures are medians in milliseconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from dscout_jax.interop.gguf import embedded_folder
from infer.latency import forward_step, timer
from infer.load import load_decoder
from infer.machine import describe

CONTEXT, CALLS, TOKENS = 256, 8, (1, 2, 4, 8, 16)


def ours(folder: Path, dtype: str, tokens: int) -> Callable[[], float]:
    """A timer of our forward, in milliseconds a call."""
    _, decoder = load_decoder(folder, dtype=dtype, block_size=tokens, capacity_bucket=64)
    prompt = [(7 * i) % 1000 + 20 for i in range(CONTEXT)]
    state, _ = decoder.prefill(decoder.requests([prompt], CALLS + 1))
    return timer(forward_step(decoder.target, tokens), decoder.weights, state, CALLS)


def theirs(model: transformers.PreTrainedModel, tokens: int) -> Callable[[], float]:
    """A timer of transformers' forward, in milliseconds a call."""
    context = torch.arange(CONTEXT)[None] * 7 % 1000 + 20
    block = torch.full((1, tokens), 20)

    @torch.inference_mode()
    def timed() -> float:
        cache = transformers.DynamicCache(config=model.config)
        model(context, past_key_values=cache, use_cache=True, logits_to_keep=1)
        begun = time.perf_counter()
        for _ in range(CALLS):
            model(block, past_key_values=cache, use_cache=True).logits.argmax(-1)
        return (time.perf_counter() - begun) * 1e3 / CALLS

    timed()
    return timed


def main() -> None:
    """Measures, prints a table, writes OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/against-pytorch"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args()
    folder = embedded_folder(options.cache_dir)
    rows = []
    for dtype in ("bfloat16", "float32"):
        kind = getattr(torch, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
        timers = {("ours", t): ours(folder, dtype, t) for t in TOKENS}
        timers |= {("pytorch", t): theirs(model, t) for t in TOKENS}
        samples: dict[tuple[str, int], list[float]] = {key: [] for key in timers}
        for _ in range(options.repeats):
            for key, timed in timers.items():
                samples[key].append(timed())
        ms = {key: statistics.median(times) for key, times in samples.items()}
        plain = min(ms["ours", 1], ms["ours", 2])
        for t in TOKENS:
            # A plain step may run as two identical rows, whichever form is faster.
            mine = plain if t == 1 else ms["ours", t]
            rows.append(
                {
                    "dtype": dtype,
                    "tokens": t,
                    "ours_ms": mine,
                    "pytorch_ms": ms["pytorch", t],
                    "pytorch_over_ours": ms["pytorch", t] / mine,
                    "ours_over_plain": mine / plain,
                    "spread_ours": [min(samples["ours", t]), max(samples["ours", t])],
                    "spread_pytorch": [min(samples["pytorch", t]), max(samples["pytorch", t])],
                }
            )
            print("{dtype:9} T={tokens:<2} ours {ours_ms:6.1f}  pytorch {pytorch_ms:6.1f}".format(**rows[-1]))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": describe() | versions, "context": CONTEXT, "rows": rows}
    Path(f"{options.out}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
