"""What the jitted loop is worth: against its parts, against rounds driven from Python, and with more rows.

    python benchmarks/decoding.py --drafter DIR --out docs/results/decoding

Ratios within one run, sides taking turns; writes OUT.json and OUT.md. Answers are of one length (nothing
stops them), greedy, on prompts that were held out. Parts are timed programs of their own
(`infer.latency`); the rounds from Python are `Decoder.stream`'s, which reads lengths and tokens back
after each.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dscout_jax.decode import Decoder, mat
from dscout_jax.interop import LoadedTarget
from infer.latency import measure, take_turns
from infer.load import encode_prompt, load_decoder
from infer.machine import describe
from infer.workload import first_turns
from train.prompts import builtin_path


def fused(decoder: Decoder, prompt: Sequence[int], tokens: int) -> Callable[[], float]:
    """Milliseconds a round of the loop that never leaves the device."""

    def timed() -> float:
        [answer] = decoder.generate([prompt], tokens, stop_ids=[[]])
        return answer.decode_seconds * 1e3 / answer.rounds

    timed()
    return timed


def driven(decoder: Decoder, prompt: Sequence[int], tokens: int) -> Callable[[], float]:
    """Milliseconds a round where Python asks for each."""

    def timed() -> float:
        rounds = decoder.stream(prompt, tokens, stop_ids=[])
        next(rounds)
        begun = time.perf_counter()
        count = sum(1 for _ in rounds)
        return (time.perf_counter() - begun) * 1e3 / count

    timed()
    return timed


def in_batches(
    decoder: Decoder, prompts: Sequence[Sequence[int]], batch: int, tokens: int
) -> Callable[[], dict[str, float]]:
    """Tokens a second of all prompts, `batch` at a time, and their MAT; prefill left out.

    A last batch that is not full is padded: it takes a full one's time and compiles nothing new.
    """

    def timed() -> dict[str, float]:
        seconds, accepted = 0.0, []
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            answers = decoder.generate(part, tokens, stop_ids=[[]] * len(part), rows=batch)
            seconds += answers[0].decode_seconds
            accepted += [answer.accepted for answer in answers]
        return {"tokens_per_s": len(prompts) * (tokens - 1) / seconds, "mat": mat(accepted)}

    timed()
    return timed


def ids_of(loaded: LoadedTarget, path: Path, count: int, most: int = 128) -> list[list[int]]:
    """The first `count` prompts of a file that are short enough to share one shape."""
    ids = (encode_prompt(loaded, text) for text in first_turns(path))
    return [prompt for prompt in ids if len(prompt) <= most][:count]


def rounds(decoder: Decoder, prompt: Sequence[int], tokens: int, repeats: int) -> dict[str, float]:
    """The loop against the same rounds driven from Python, ms a round; plain and speculative."""
    plain = decoder.plain(2 if decoder.weights.target["embed_tokens"]["weight"].itemsize == 2 else 1)
    timers = {
        (kind, side): make(which, prompt, tokens)
        for kind, which in (("plain", plain), ("speculative", decoder))
        for side, make in (("fused", fused), ("driven", driven))
    }
    ms = {key: statistics.median(values) for key, values in take_turns(timers, repeats).items()}
    row = {f"{kind}_{side}_ms": value for (kind, side), value in ms.items()}
    for kind in ("plain", "speculative"):
        row[f"{kind}_driven_over_fused"] = ms[kind, "driven"] / ms[kind, "fused"]
    return row


def batches(
    decoder: Decoder, prompts: Sequence[Sequence[int]], sizes: Sequence[int], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Plain and speculative tokens a second for each batch; plain in its faster form."""
    table = []
    for batch in sizes:
        sides = {"plain, 1 row": decoder.plain(1), "plain, 2 rows": decoder.plain(2), "speculative": decoder}
        timers = {name: in_batches(d, prompts, batch, tokens) for name, d in sides.items()}
        samples = take_turns(timers, repeats)
        speed = {name: statistics.median(s["tokens_per_s"] for s in own) for name, own in samples.items()}
        plain = max(speed["plain, 1 row"], speed["plain, 2 rows"])
        table.append(
            {
                "batch": batch,
                "plain_tokens_per_s": plain,
                "speculative_tokens_per_s": speed["speculative"],
                "speedup": speed["speculative"] / plain,
                "mat": samples["speculative"][0]["mat"],
            }
        )
    return table


def text_of(document: dict[str, Any]) -> str:
    """Markdown of what was measured."""
    lines = [
        "| dtype | B | whole round / (draft + verify) | plain: from Python / loop | speculative: likewise |",
        "|---|---|---|---|---|",
    ]
    for dtype, found in document["dtypes"].items():
        own = found["rounds"]
        ratios = f"{own['plain_driven_over_fused']:.3f} | {own['speculative_driven_over_fused']:.3f}"
        for block in found["parts"]["blocks"]:
            lines.append(f"| {dtype} | {block['block_size']} | {block['round_over_parts']:.3f} | {ratios} |")
    lines += ["", "| dtype | batch | plain tok/s | speculative tok/s | speed-up | MAT |", "|" + "---|" * 6]
    for dtype, found in document["dtypes"].items():
        for row in found["batches"]:
            lines.append(
                f"| {dtype} | {row['batch']} | {row['plain_tokens_per_s']:.1f} "
                f"| {row['speculative_tokens_per_s']:.1f} | {row['speedup']:.2f} | {row['mat']:.2f} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, writes OUT.json and OUT.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=Path, default=builtin_path("heldout"))
    parser.add_argument("--new-tokens", type=int, default=65)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/decoding"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    o = parser.parse_args(arguments)
    document: dict[str, Any] = {"machine": describe(), "target": o.target, "dtypes": {}}
    o.out.parent.mkdir(parents=True, exist_ok=True)
    for dtype in o.dtypes:
        loaded, decoder = load_decoder(
            o.target, o.drafter, dtype=dtype, block_size=o.block_size, cache_dir=o.cache_dir, bucket=128
        )
        # As many as the largest batch takes, so that its one batch is full.
        prompts = ids_of(loaded, o.prompts, max(o.batches))
        document["dtypes"][dtype] = {
            "parts": measure(decoder, [o.block_size], repeats=o.repeats),
            "rounds": rounds(decoder, prompts[0], o.new_tokens, o.repeats),
            "batches": batches(decoder, prompts, o.batches, o.new_tokens, o.repeats),
        }
        Path(f"{o.out}.json").write_text(json.dumps(document, indent=1) + "\n")
        Path(f"{o.out}.md").write_text(text_of(document) + "\n")
    print(text_of(document))


if __name__ == "__main__":
    main()
