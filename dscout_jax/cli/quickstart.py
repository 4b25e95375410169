"""`dscout quickstart`: the whole road on the embedded target, each step resumable."""

import dataclasses
import resource
import sys
import time
from pathlib import Path

import jax.numpy as jnp

from configs.quickstart import config
from dscout_jax.interop import load_target
from infer.benchmark import BenchmarkSettings, benchmark
from infer.report import report
from train.loop import train
from train.prompts import builtin_path
from train.regenerate import regenerate


def quickstart(run: Path, minutes: float, cache_dir: Path | None) -> None:
    """Answers, training, comparison. What `run` holds already is reused.

    Training takes at most `minutes`. The comparison runs in bf16 and in fp32, where identity is exact.
    """
    begun = time.monotonic()
    settings = dataclasses.replace(config, run=str(run), data=str(run / "answers.jsonl"))
    print("1/4 the target: SmolLM2-135M-Instruct", flush=True)
    target = load_target(settings.target, jnp.dtype(settings.dtype), cache_dir)
    print("2/4 its answers to the prompts that ship with the project", flush=True)
    regenerate(target, "quickstart", settings.data, max_new_tokens=80, batch=32, limit=192)
    print(f"3/4 training a drafter, {minutes:g} minutes at the most", flush=True)
    drafter = train(settings, target, minutes)
    print("4/4 plain against speculative decoding on prompts that were held out", flush=True)
    # bf16 shows the speed; fp32, where a token's bits do not depend on its company, shows the identity.
    folders = [run / "comparison" / dtype for dtype in ("bfloat16", "float32")]
    for folder in folders:
        dtype = folder.name
        comparison = BenchmarkSettings(
            prompts=(builtin_path("heldout"),),
            drafters=(str(drafter),),
            dtype=dtype,
            block_sizes=(2, settings.block_size),
            max_new_tokens=48,
            limit=6,
            same_program="best" if dtype == "bfloat16" else "none",
            parts=False,
            out=folder,
            cache_dir=cache_dir,
        )
        benchmark(comparison, log=lambda line: print(f"  {line}", flush=True))
    print(report(folders, run / "report", run / "metrics.jsonl"))
    print(f"table, plot and JSON: {run / 'report'}.md, .png, .json\ndrafter: {drafter}")
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes, peak memory {_peak_gib():.1f} GiB")
    print(f'try: dscout generate "Why is the sky blue?" --drafter {drafter} --dtype bfloat16')


def _peak_gib() -> float:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2 ** (30 if sys.platform == "darwin" else 20)
