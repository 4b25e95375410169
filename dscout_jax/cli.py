"""The command `dscout`: parses, then calls. It alone imports train, infer and tyro."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dscout_jax.errors import UserError

Dtype = Literal["float32", "bfloat16"]
Word = tyro.conf.Positional


@dataclasses.dataclass
class Quickstart:
    """The main job on the embedded target: answers, a short training, plain against speculative decoding."""

    minutes: float = 8.0
    """How long to train at the most; the answers and the comparison come on top."""
    run: Path = Path("runs/quickstart")
    """Folder of answers, checkpoints, drafter, table and plot; what it holds is reused."""
    cache_dir: Path | None = None
    """Where the converted target lies; default $DSCOUT_CACHE, else ~/.cache/dscout."""

    def __call__(self) -> None:
        from dscout_jax.cli_quickstart import quickstart

        quickstart(self.run, self.minutes, self.cache_dir)


@dataclasses.dataclass
class Regenerate:
    """Lets the target answer a JSONL of prompts; resumes."""

    prompts: Word[str]
    """JSONL of {"turns": [...]}, or "quickstart" for the prompts that the package ships."""
    out: Word[Path]
    """JSONL of answers; finished rows are kept and skipped."""
    target: str = "smollm2-135m"
    """A Hugging Face folder, or the embedded smollm2-135m."""
    max_new_tokens: int = 160
    batch: int = 32
    temperature: float = 0.0
    """0 is greedy."""
    thinking: bool | None = None
    """The chat template's thinking switch, where it has one."""
    seed: int = 0
    limit: int | None = None
    """Answer only the first so many prompts."""
    dtype: Dtype = "float32"
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from train.convert import open_target
        from train.regenerate import regenerate

        options = dataclasses.asdict(self)
        prompts, out, dtype = options.pop("prompts"), options.pop("out"), options.pop("dtype")
        loaded = open_target(options.pop("target"), _dtype(dtype), options.pop("cache_dir"))
        print(f"answers: {regenerate(loaded, prompts, out, **options)}")


@dataclasses.dataclass
class Train:
    """Trains a drafter by a config file; resumes."""

    config: Word[Path]
    """Executable Python that defines `config`; see configs/."""
    minutes: float | None = None
    """Stop after this long, saved; the next run goes on."""
    cache_dir: Path | None = None
    coordinator: str | None = None
    """host:port of the first of several processes; TPU slices, Slurm and Open MPI tell by themselves."""
    processes: int | None = None
    process_id: int | None = None

    def __call__(self) -> None:
        from train.convert import open_target
        from train.hosts import join
        from train.loop import train
        from train.settings import load_settings

        settings = load_settings(self.config)
        join(self.coordinator, self.processes, self.process_id)
        dtype, mesh = _dtype(settings.dtype), settings.named_mesh()
        loaded = open_target(settings.target, dtype, self.cache_dir, mesh)
        print(f"drafter: {train(settings, loaded, self.minutes)}")


@dataclasses.dataclass
class Plan:
    """Compiles a config's step for chips that are not here: memory, collectives, a bound on the time."""

    config: Word[Path]
    """Of its target only config.json is read."""
    topology: str
    """A TPU slice, such as v5p:4x4x4 (needs the extra `plan`), or simulated devices, such as cpu:8."""
    batch: int | None = None
    """Global; default the config's."""
    mesh: tuple[int, int, int] | None = None
    """Devices along data, fsdp and tensor; default the config's."""
    out: Path | None = None
    """Without an ending; .json and .md are added."""

    def __call__(self) -> None:
        from train.plan import plan

        options = dataclasses.asdict(self)
        print(plan(options.pop("config"), options.pop("topology"), **options))


@dataclasses.dataclass
class Lab:
    """Makes a small target of its own, in minutes, for experiments on the loss."""

    out: Word[Path] = Path("runs/lab")
    """Gets target/ (a Hugging Face folder), prompts, answers and held-out prompts; resumes."""
    steps: int = 700
    prompts: int = 3072
    heldout: int = 128

    def __call__(self) -> None:
        from train.lab.target import make_lab

        options = dataclasses.asdict(self)
        print(f"laboratory: {make_lab(options.pop('out'), **options)}")


@dataclasses.dataclass
class LadderOf:
    """Compares recipes at equal data, steps, seeds and query budget by their decoded MAT; resumes."""

    ladder: Word[Path]
    """Executable Python that defines `ladder`; see configs/ladder/lab.py."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from train.ladder import climb, load_ladder

        print(climb(load_ladder(self.ladder), self.cache_dir))


@dataclasses.dataclass
class Explain:
    """What recipes will ask of each slot, side by side, before any training."""

    configs: Word[tuple[Path, ...]]
    acceptance: float = 0.7
    """What every slot of an imagined drafter accepts; weights depend on it."""
    answer_tokens: int = 256
    out: Path = Path("runs/explain")
    """Without an ending; .json, .md and .png are added."""

    def __call__(self) -> None:
        from train.explain import explain

        print(explain(**dataclasses.asdict(self)))


@dataclasses.dataclass
class Export:
    """Writes a run's checkpoint as a DFlash folder, which serving engines load."""

    run: Word[Path]
    """Folder of a training run, or of `dscout import`."""
    out: Word[Path]
    """The new folder; an earlier export of that name is replaced."""
    step: int | None = None
    """Default: the newest checkpoint."""
    dtype: Dtype = "bfloat16"

    def __call__(self) -> None:
        from train.export import export

        print(f"drafter: {export(self.run, self.out, self.step, _dtype(self.dtype))}")


@dataclasses.dataclass
class Import:
    """Makes a run of a DFlash folder: an Orbax checkpoint to start a training from, or to decode with."""

    drafter: Word[Path]
    run: Word[Path]
    """The new run folder."""

    def __call__(self) -> None:
        from train.export import import_drafter

        print(f"run: {import_drafter(self.drafter, self.run)}")


@dataclasses.dataclass
class Convert:
    """Writes a target as an Orbax checkpoint, or such a checkpoint back as its Hugging Face folder."""

    source: Word[str]
    """A Hugging Face folder, the embedded smollm2-135m, or what `dscout convert` wrote."""
    out: Word[str]
    """The new folder."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from train.convert import convert

        print(f"target: {convert(self.source, self.out, self.cache_dir)}")


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

        options = dataclasses.asdict(self) | {"drafter": _decodable(self.drafter)}
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
class Bench:
    """Plain against speculative decoding, prompt by prompt: speed-up, MAT, identity; resumes."""

    prompts: Word[tuple[Path, ...]]
    """JSONL files of {"turns": [...]}; the first turn is asked."""
    drafters: Annotated[tuple[str, ...], tyro.conf.arg(name="drafter")]
    """DFlash folders; runs: their newest checkpoints; "lookup" for prompt lookup; DIR+lookup for both."""
    target: str = "smollm2-135m"
    dtype: Dtype = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    """Default: each drafter's own."""
    smaller: tuple[int, ...] = ()
    """Sizes that a round may be cut to when the drafter is unsure."""
    min_confidence: float = 0.0
    """With --smaller: drafts are sent while the product of their probabilities is at least this."""
    max_new_tokens: int = 128
    limit: int | None = None
    """Prompts of each file."""
    plain_rows: int | None = None
    """Form of the plain baseline; default: the faster of 1 and 2 by trial."""
    same_program: Literal["best", "all", "none"] = "best"
    """Sizes at which plain decoding also runs through the speculative program (exact identity in bf16)."""
    thinking: bool | None = None
    out: Path = Path("runs/benchmark")
    """records.jsonl, rows.json, report.json, .md, .png and .html."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from infer.benchmark import BenchmarkSettings, benchmark
        from infer.report import report

        drafters = tuple(str(_decodable(Path(drafter))) for drafter in self.drafters)
        benchmark(BenchmarkSettings(**dataclasses.asdict(self) | {"drafters": drafters}))
        print(report([self.out], self.out / "report"))


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


@dataclasses.dataclass
class BenchCompare:
    """Two benchmarks of the same prompts, second over first, with intervals."""

    first: Word[Path]
    """Folder that `dscout bench` wrote, or its rows.json."""
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
class BenchLatency:
    """Times the parts of a round: plain step, draft, verify, whole round."""

    drafter: Path
    target: str = "smollm2-135m"
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    block_sizes: tuple[int, ...] = ()
    batch: int = 1
    repeats: int = 5
    out: Path = Path("runs/latency.json")
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from infer.latency import latency

        latency(**dataclasses.asdict(self) | {"drafter": _decodable(self.drafter)})


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

        policy = tune(TuneSettings(**dataclasses.asdict(self) | {"drafter": _decodable(self.drafter)}))
        fixed, gain = gain_over_fixed(policy.table())
        print(table(policy))
        print(f"predicted gain over the best single block size, {fixed}: {gain:+.1%}")
        print(f"policy: {self.out / 'policy.json'}")


COMMANDS: dict[str, type[Callable[[], None]]] = {
    "quickstart": Quickstart,
    "regenerate": Regenerate,
    "train": Train,
    "plan": Plan,
    "lab": Lab,
    "ladder": LadderOf,
    "explain": Explain,
    "export": Export,
    "import": Import,
    "convert": Convert,
    "generate": Generate,
    "bench": Bench,
    "bench-latency": BenchLatency,
    "bench-compare": BenchCompare,
    "bench-check": BenchCheck,
    "tune": Tune,
    "report": Report,
}


def _decodable(drafter: Path | None) -> Path | None:
    """A run's newest checkpoint as a folder; anything else as it stands."""
    if drafter is None:
        return None
    folder = Path(str(drafter).removesuffix("+lookup"))
    # The name is train.export's; a plain folder must not wait for Orbax to be imported.
    if not (folder / "drafter.json").is_file():
        return drafter
    from train.export import decodable

    return Path(str(drafter).replace(str(folder), str(decodable(folder)), 1))


def _dtype(name: str):
    import jax.numpy as jnp

    return jnp.dtype(name)


def main(arguments: list[str] | None = None) -> None:
    """Exit code 2 and one line for a user's mistake; tracebacks are for ours."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "-".join(words[:2]) in COMMANDS:
        words[:2] = ["-".join(words[:2])]  # `dscout bench latency` is bench-latency
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="dscout", description="Block-diffusion drafters in JAX.", args=words
    )
    try:
        command()
    except UserError as error:
        print(f"dscout: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
