"""Commands that decode: answers, and how fast."""

import dataclasses
from pathlib import Path

from dscout_jax.cli.common import Dtype, Word, decodable, policy_use
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
    drafter: str | None = None
    """A DFlash folder, a run (its newest checkpoint), "lookup" for prompt lookup, or DIR+lookup for both.
    Without one the target decodes alone."""
    target: str = "smollm2-135m"
    dtype: Dtype = "float32"
    max_new_tokens: int = 128
    block_size: int | None = None
    """Slots verified a round; default the drafter's own."""
    smaller: tuple[int, ...] = ()
    """Sizes that a round may be cut to when the drafter is unsure."""
    min_confidence: float = 0.0
    """With --smaller: drafts are sent while the product of their probabilities is at least this."""
    policy: Path | None = None
    """What `dscout tune` wrote: decodes at its block size, plainly where that is the fastest."""
    workload: str | None = None
    """With --policy: the workload to go by; default all of the policy's, in equal shares."""
    adapt: bool = False
    """With --policy: begin there, and choose each round's size by what the rounds accept."""
    explore: float = 0.01
    """With --adapt: share of the time that trying larger sizes may lose."""
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
        options["policy"] = policy_use(options)
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
