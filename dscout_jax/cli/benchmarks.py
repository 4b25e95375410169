"""Commands that measure, and judge what was measured."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dscout_jax.cli.common import Dtype, Word, decodable, policy_use
from dscout_jax.errors import UserError


@dataclasses.dataclass
class Bench:
    """Plain against speculative decoding, prompt by prompt: speed-up, MAT, identity; resumes."""

    prompts: Word[tuple[str, ...]]
    """JSONL files of {"turns": [...]}, folders of such, or hf:NAME[:SPLIT[:COLUMN]] (extra `datasets`)."""
    drafters: Annotated[tuple[str, ...], tyro.conf.arg(name="drafter")]
    """DFlash folders; runs: their newest checkpoints; "lookup" for prompt lookup; DIR+lookup for both."""
    target: str = "smollm2-135m"
    dtype: Dtype = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    """Default: each drafter's own."""
    policy: Path | None = None
    """What `dscout tune` wrote: decodes at its block size, plainly where that is the fastest."""
    workload: str | None = None
    """With --policy: the workload to go by; default all of the policy's, in equal shares."""
    adapt: bool = False
    """With --policy: begin there, and choose each round's size by what the rounds accept."""
    explore: float = 0.01
    """With --adapt: share of the time that trying larger sizes may lose."""
    smaller: tuple[int, ...] = ()
    """Sizes that a round may be cut to when the drafter is unsure."""
    min_confidence: float = 0.0
    """With --smaller: drafts are sent while the product of their probabilities is at least this."""
    max_new_tokens: int = 128
    limit: int | None = None
    """Conversations of each dataset; default: all."""
    seed: int | None = None
    """Takes them at random, the same ones each time; also seeds draws. Default: from the start."""
    max_turns: int | None = None
    """Of each conversation; later turns follow plain decoding's own answers. Default: all."""
    max_prompt_tokens: int = 1024
    """A longer prompt ends its conversation."""
    prompt_bucket: int = 64
    """Prompts are padded to multiples of this; a larger one compiles less."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    concurrency: int = 1
    """Above 1: queues over so many slots, four conversations a slot, and speeds are of whole queues."""
    plain_rows: int | None = None
    """Form of the plain baseline; default: the faster of 1 and 2 by trial."""
    same_program: Literal["best", "all", "none"] = "best"
    """Sizes at which plain decoding also runs through the speculative program (exact identity in bf16); never
    where rounds take several sizes."""
    parts: bool = True
    """Time draft, verify and the rest of a round too, in programs of their own."""
    thinking: bool | None = None
    out: Path = Path("runs/benchmark")
    """records.jsonl, rows.json, report.json, .md, .png and .html."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from infer.benchmark import BenchmarkSettings, benchmark
        from infer.report import report

        drafters = tuple(decodable(drafter) for drafter in self.drafters)
        options = dataclasses.asdict(self) | {"drafters": drafters}
        options["policy"] = policy_use(options)
        if options["policy"] and self.block_sizes:
            raise UserError("a policy chooses the block size: give --policy or --block-sizes")
        if options["policy"]:
            options["policy"].load(self.concurrency)
        benchmark(BenchmarkSettings(**options))
        print(report([self.out], self.out / "report"))


@dataclasses.dataclass
class BenchLatency:
    """Times prefill, plain step, and the parts of a round: draft, verify, the whole."""

    drafter: str
    target: str = "smollm2-135m"
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    block_sizes: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = (1,)
    """Rows decoded together."""
    contexts: tuple[int, ...] = ()
    """Capacities of the caches, which prompts nearly fill; default: what prompts of 100 tokens need."""
    repeats: int = 5
    """Of each measurement, all taking turns; medians, with the least and the most."""
    out: Path = Path("runs/latency.json")
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from infer.latency import latency

        latency(**dataclasses.asdict(self) | {"drafter": decodable(self.drafter)})


@dataclasses.dataclass
class BenchCompare:
    """Two benchmarks of the same prompts, paired: ratios and differences, second to first, with intervals."""

    first: Word[Path]
    """rows.json or report.json, or the folder of `dscout bench`."""
    second: Word[Path]
    out: Path = Path("runs/compare.json")

    def __call__(self) -> None:
        import json

        from infer.compare import compare, table

        rows = compare(self.first, self.second)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        print(table(rows))


@dataclasses.dataclass
class BenchCheck:
    """Exits with 1, and says why, when a benchmark's result is not good enough; for your CI."""

    result: Word[Path]
    """rows.json or report.json, or the folder of `dscout bench`."""
    min_speedup: float | None = None
    """Of every dataset, at its fastest block size."""
    min_mat: float | None = None
    identical: bool = False
    """Every answer equal to plain decoding's."""

    def __call__(self) -> None:
        from infer.compare import failures

        options = dataclasses.asdict(self)
        if reasons := failures(options.pop("result"), **options):
            print("\n".join(reasons), file=sys.stderr)
            raise SystemExit(1)


@dataclasses.dataclass
class Report:
    """One table, plot and JSON of several benchmarks on the same machine."""

    folders: Word[tuple[Path, ...]]
    """Folders that `dscout bench` wrote."""
    out: Path = Path("runs/report")
    """Without an ending; .json, .md, .png and .html are added."""
    metrics: Path | None = None
    """metrics.jsonl of a training run, to plot its loss too."""

    def __call__(self) -> None:
        from infer.report import report

        print(report(self.folders, self.out, self.metrics))
