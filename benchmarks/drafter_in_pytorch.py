"""An exported drafter in PyTorch beside transformers' target, against ours: the same rounds, and how fast.

    pip install -e '.[parity]'
    python benchmarks/drafter_in_pytorch.py PROMPTS.jsonl --drafter FOLDER

Both sides decode greedily, plainly and with the drafter, and stop at nothing but the budget; in bf16 and in
fp32, prompt by prompt in turn, each side compared in its faster. Drafts are chosen from the ids that the
drafter lists, on both sides; `whole vocabulary` is PyTorch's loop without that, as such loops are written.
PyTorch's rounds are driven from the host. Its drafter is the parity tests' reference, which keeps the
target's keys and values and not its own: `without_drafts` is what that loop would reach if its drafts
took no time, the bound of any better one. Prefill counts on both sides, compilation on none. Exits with 1
where the two MATs of fp32 differ by more than 1 %: in bf16 a product's shape decides near ties.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from dscout_jax.decode import Decoder, mat
from dscout_jax.interop import LoadedTarget, load_draft_ids, load_drafter, load_target
from dscout_jax.interop.huggingface import target_folder
from dscout_jax.interop.jsonl import read_jsonl
from dscout_jax.models import Drafter, Target
from infer.load import DTYPES, encode_prompt
from infer.machine import describe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))
import torch_dflash as reference

WITHIN = 0.01
"""Share by which the two MATs may differ."""

Answer = tuple[list[int], list[int], float]
"""Tokens, accepted drafts a round, seconds."""


class Clock(torch.nn.Module):
    """A module, and the seconds spent in it."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside, self.seconds = inside, 0.0

    def forward(self, *args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        out = self.inside(*args, **options)
        self.seconds += time.perf_counter() - begun
        return out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inside, name)


def ours(decoder: Decoder, budget: int) -> Callable[[Sequence[int]], Answer]:
    """Our decoding of a prompt; its programs are compiled before the clock starts."""

    def run(prompt: Sequence[int]) -> Answer:
        [answer] = decoder.generate([prompt], budget)
        return answer.tokens, answer.accepted, answer.prefill_seconds + answer.decode_seconds

    return run


@torch.inference_mode()
def plain(model: torch.nn.Module, prompt: list[int], budget: int) -> tuple[list[int], list[int]]:
    """Greedy decoding, a token a forward."""
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    tokens = [int(out.logits[0, -1].argmax())]
    while len(tokens) < budget:
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
    return tokens, [0] * (budget - 1)


def timed(run: Callable[[list[int]], tuple[list[int], list[int]]]) -> Callable[[list[int]], Answer]:
    """A run with its seconds."""

    def timed_run(prompt: list[int]) -> Answer:
        begun = time.perf_counter()
        tokens, accepted = run(prompt)
        return tokens, accepted, time.perf_counter() - begun

    return timed_run


def sides_of(options: argparse.Namespace, loaded: LoadedTarget, dtype: str) -> tuple[dict, Clock]:
    """name -> decoding of a prompt in this dtype, and the clock of PyTorch's drafter."""
    budget = options.max_new_tokens
    config, params = load_drafter(options.drafter, DTYPES[dtype])
    target = Target(loaded.config, DTYPES[dtype])
    listed = load_draft_ids(options.drafter)
    full = Decoder(
        target, loaded.params, Drafter(config, DTYPES[dtype]), params, bucket=256, draft_ids=listed
    )
    kind = getattr(torch, dtype)
    folder = target_folder(options.target)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
    whole = reference.DFlash(Path(options.drafter)).to(kind)
    drafter = Clock(whole)
    few = () if listed is None else _head(model, listed)
    return {
        "ours plain, 1 row": ours(full.plain(1), budget),
        "ours plain, 2 rows": ours(full.plain(2), budget),
        "ours speculative": ours(full, budget),
        "pytorch plain": timed(lambda prompt: plain(model, prompt, budget)),
        "pytorch speculative": timed(lambda prompt: reference.decode(model, drafter, prompt, budget, *few)),
        "pytorch speculative, whole vocabulary": timed(
            lambda prompt: reference.decode(model, whole, prompt, budget)
        ),
    }, drafter


def _head(model: torch.nn.Module, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and their rows of the head."""
    rows = torch.tensor(ids)
    return rows, model.get_output_embeddings().weight[rows].detach()


def measure(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Tokens a second of every side in one dtype, MAT, and how many answers were the same rounds."""
    loaded = load_target(options.target, DTYPES[dtype], options.cache_dir)
    sides, clock = sides_of(options, loaded, dtype)
    asked = [row["turns"][0] for row in islice(read_jsonl(options.prompts), options.limit)]
    prompts = [encode_prompt(loaded, text) for text in asked]
    for run in sides.values():
        run(prompts[0])
    clock.seconds = 0.0
    found: dict[str, list[Answer]] = {name: [] for name in sides}
    for number, prompt in enumerate(prompts):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(sides[name](prompt))
    count = len(prompts) * options.max_new_tokens
    seconds = {name: sum(answer[2] for answer in answers) for name, answers in found.items()}
    seconds["pytorch speculative, without_drafts"] = seconds["pytorch speculative"] - clock.seconds
    both = zip(found["ours speculative"], found["pytorch speculative"], strict=True)
    mats = {side: mat([a[1] for a in found[f"{side} speculative"]]) for side in ("ours", "pytorch")}
    return {
        "tokens_per_s": {name: count / taken for name, taken in seconds.items()},
        "mat": mats,
        "mat_agrees": abs(mats["ours"] / mats["pytorch"] - 1) <= WITHIN,
        "same_rounds": sum(a[:2] == b[:2] for a, b in both),
    }


def faster(dtypes: dict[str, Any]) -> dict[str, Any]:
    """Each kind of decoding in its faster dtype and form, and ours over PyTorch's."""
    best: dict[str, Any] = {}
    for name in ("ours plain", "ours speculative", "pytorch plain", "pytorch speculative"):
        best[name] = max(
            (speed, f"{dtype} {form}")
            for dtype, found in dtypes.items()
            for form, speed in found["tokens_per_s"].items()
            if form.split(",")[0] == name and "without" not in form
        )
    whole = max(found["tokens_per_s"]["pytorch speculative, whole vocabulary"] for found in dtypes.values())
    bound = max(found["tokens_per_s"]["pytorch speculative, without_drafts"] for found in dtypes.values())
    return best | {
        "plain_ratio": best["ours plain"][0] / best["pytorch plain"][0],
        "speculative_ratio": best["ours speculative"][0] / best["pytorch speculative"][0],
        "speculative_ratio_whole_vocabulary": best["ours speculative"][0] / whole,
        "speculative_ratio_if_its_drafts_were_free": best["ours speculative"][0] / bound,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, writes OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=list(DTYPES))
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("runs/drafter-in-pytorch.json"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args(arguments)
    dtypes = {dtype: measure(options, dtype) for dtype in options.dtypes}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {
        "limit": options.limit,
        "max_new_tokens": options.max_new_tokens,
        "dtypes": dtypes,
        "faster": faster(dtypes),
        "machine": describe() | versions | {"torch_threads": torch.get_num_threads()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}, indent=1))
    for dtype, found in dtypes.items():
        verdict = "agrees" if found["mat_agrees"] else "does not agree"
        print(f"{dtype}: MAT {verdict} within {WITHIN:.0%} ({found['mat']})", file=sys.stderr)
    if "float32" in dtypes and not dtypes["float32"]["mat_agrees"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
