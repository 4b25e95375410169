"""Commands that choose a configuration: block sizes, depths, tapped layers."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dscout_jax.cli.common import Dtype, Word, decodable
from dscout_jax.errors import UserError


@dataclasses.dataclass
class Tune:
    """Measures acceptance and latencies of a drafter and writes the policy, its choice of B; resumes."""

    prompts: Word[tuple[Path, ...]]
    """JSONL files of {"turns": [...]}, a workload each."""
    drafter: Annotated[str, tyro.conf.arg(name="drafter")]
    target: str = "smollm2-135m"
    dtype: Dtype = "bfloat16"
    mixture: int = 0
    """Also a workload of all files, so many prompts of each in turn."""
    block_sizes: tuple[int, ...] = ()
    """Default: every size up to the drafter's own."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    max_new_tokens: int = 128
    limit: int = 64
    """Prompts of each file."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out. All rounds are timed with caches for the longest."""
    repeats: int = 3
    temperature: float = 0.0
    """How answers are drawn: acceptance belongs to it, so a policy is for one. 0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    validate: bool = False
    """Also decodes at the chosen sizes and their neighbours, and choosing round by round: predicted against
    measured, in validation.json."""
    all_sizes: bool = False
    """With --validate: at every size."""
    passes: int = 3
    """With --validate: over each cell's prompts, all sizes taking turns."""
    explore: float = 0.01
    """With --validate: share of the time that learning may lose by trying larger sizes."""
    thinking: bool | None = None
    out: Path = Path("runs/tune")
    """policy.json, records.jsonl, figures and report.html."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from dscout_jax.decode import Sampling
        from infer.pictures import pictures
        from infer.policy import gain_over_fixed
        from infer.tune import TuneSettings, prepare, table, tune
        from infer.validate import say, validate

        options = dataclasses.asdict(self) | {"drafter": decodable(self.drafter)}
        checks = options.pop("validate")
        how = {name: options.pop(name) for name in ("explore", "passes", "all_sizes")}
        sampling = Sampling(**{name: options.pop(name) for name in Sampling._fields})
        if how["passes"] < 1:
            raise UserError(f"passes {how['passes']} must be at least 1")
        if how["all_sizes"] and not checks:
            raise UserError("--all-sizes says what --validate decodes: give both")
        ground = prepare(TuneSettings(**options, sampling=sampling))
        policy = tune(ground)
        fixed, gain = gain_over_fixed(policy.table())
        print(table(policy))
        print(f"predicted gain over the best single block size, {fixed}: {gain:+.1%}")
        if checks:
            print(say(validate(ground, policy, **how)))
        pictures(self.out)
        print(f"policy: {self.out / 'policy.json'}\nreport: {self.out / 'report.html'}")


@dataclasses.dataclass
class TuneReport:
    """Draws all figures of a policy's folder anew, PNG and SVG, and one page that holds them."""

    folder: Word[Path]
    """What `dscout tune` wrote."""
    search: tuple[Path, ...] = ()
    """Folders that `dscout tune depth` or `dscout tune taps` wrote, to put in too."""

    def __call__(self) -> None:
        from infer.pictures import pictures

        print("\n".join(map(str, pictures(self.folder, self.search))))


@dataclasses.dataclass
class _Search:
    """What the searches share."""

    config: Word[Path]
    """A training config; each candidate is trained by it."""
    prompts: tuple[Path, ...]
    """JSONL files of {"turns": [...]} to decode, in equal shares."""
    steps: int | None = None
    """Of each training; default the config's."""
    minutes: float | None = None
    """Bound on each training."""
    concurrency: int = 1
    dtype: Dtype = "bfloat16"
    """Of decoding."""
    block_sizes: tuple[int, ...] = ()
    """Default: every size up to the drafter's own; the best of them counts."""
    max_new_tokens: int = 128
    limit: int = 32
    """Prompts of each file."""
    repeats: int = 3
    cache_dir: Path | None = None


@dataclasses.dataclass
class TuneDepth(_Search):
    """Searches the number of drafter layers with the highest throughput, training few of them; resumes."""

    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """To choose from, ascending."""
    within: int = 1
    """Steps that the answer may lie beside the best depth; 0 trains more of them."""
    out: Path = Path("runs/depth")
    """A run folder for each, search.json, .md, .png and .svg."""

    def __call__(self) -> None:
        from dscout_jax.cli.search import Search, say, tune_depth

        options = dataclasses.asdict(self)
        depths, within = options.pop("depths"), options.pop("within")
        say(tune_depth(Search(**options), depths, within))


@dataclasses.dataclass
class TuneTaps(_Search):
    """Trains and measures drafters that are shown so many of the target's layers, by each fusion; resumes."""

    counts: tuple[int | Literal["all"], ...] = (1, 3, 5)
    """Numbers of tapped layers, spread evenly; "all": every one."""
    fusions: tuple[Literal["fc", "softmax"], ...] = ("fc", "softmax")
    """Dense, and a few weights a layer."""
    out: Path = Path("runs/taps")
    """A run folder for each, search.json, .md, .png and .svg."""

    def __call__(self) -> None:
        from dscout_jax.cli.search import Search, say, tune_taps

        options: dict[str, Any] = dataclasses.asdict(self)
        counts, fusions = options.pop("counts"), options.pop("fusions")
        say(tune_taps(Search(**options), counts, fusions))
