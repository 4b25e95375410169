"""Commands that decode: answers, and how fast."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from dscout_jax.cli.common import Dtype, Word, decodable
from dscout_jax.errors import UserError


@dataclasses.dataclass
class Generate:
    """Streams the answer to a prompt, or answers a file of prompts as JSON lines."""

    prompt: Word[str | None] = None
    prompts: Path | None = None
    """Instead of a prompt: JSONL of {"turns": [...]}, or - for standard input."""
    out: Path | None = None
    """A new JSONL file for the answers to --prompts; default: standard output."""
    slots: int = 4
    """Prompts of --prompts decoded at a time."""
    drafter: Path | None = None
    """A DFlash folder, a run (its newest checkpoint), "lookup" for prompt lookup, or DIR+lookup for both.
    Without one the target decodes alone."""
    target: str = "smollm2-135m"
    dtype: Dtype = "float32"
    max_new_tokens: int = 128
    block_size: int | None = None
    """Slots verified a round; default the drafter's own."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Draw among tokens at least so likely as this share of the likeliest."""
    seed: int = 0
    sample_drafts: bool = False
    """Draw the drafts too, and verify by full rejection sampling."""
    thinking: bool | None = None
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from dscout_jax.decode import Sampling
        from infer.answer_file import answer_file
        from infer.generate import GenerateSettings, generate

        options = dataclasses.asdict(self) | {"drafter": decodable(self.drafter)}
        prompt, prompts, out, slots = (options.pop(k) for k in ("prompt", "prompts", "out", "slots"))
        sampling = Sampling(**{name: options.pop(name) for name in Sampling._fields})
        settings = GenerateSettings(sampling=sampling, **options)
        if (prompt is None) == (prompts is None):
            raise UserError("give either a prompt or --prompts FILE")
        if prompts is None:
            if out is not None:
                raise UserError("--out goes with --prompts; an answer to one prompt is printed")
            generate(prompt, settings)
        else:
            answer_file(prompts, settings, slots=slots, out=out)


@dataclasses.dataclass
class Tune:
    """Measures acceptance and latencies of a drafter and writes the policy, its choice of B; resumes."""

    prompts: Word[tuple[Path, ...]]
    """JSONL files of {"turns": [...]}, a workload each."""
    drafter: Annotated[Path, tyro.conf.arg(name="drafter")]
    target: str = "smollm2-135m"
    dtype: Dtype = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    """Default: every size up to the drafter's own."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    max_new_tokens: int = 128
    limit: int = 64
    """Prompts of each file."""
    repeats: int = 3
    thinking: bool | None = None
    out: Path = Path("runs/tune")
    """policy.json and records.jsonl."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from infer.policy import gain_over_fixed
        from infer.tune import TuneSettings, table, tune

        policy = tune(TuneSettings(**dataclasses.asdict(self) | {"drafter": decodable(self.drafter)}))
        fixed, gain = gain_over_fixed(policy.table())
        print(table(policy))
        print(f"predicted gain over the best single block size, {fixed}: {gain:+.1%}")
        print(f"policy: {self.out / 'policy.json'}")
