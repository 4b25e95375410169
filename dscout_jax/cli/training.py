"""Commands that make drafters: answers, training, plans, experiments."""

import dataclasses
from pathlib import Path

from dscout_jax.cli.common import Dtype, Word, dtype_of


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
        from dscout_jax.cli.quickstart import quickstart

        quickstart(self.run, self.minutes, self.cache_dir)


@dataclasses.dataclass
class Regenerate:
    """Lets the target answer a JSONL of prompts; resumes."""

    prompts: Word[str]
    """JSONL of {"turns": [...]}, or "quickstart" for the prompts that the package ships."""
    out: Word[str]
    """JSONL of answers, on a local disk; finished rows are kept and skipped."""
    target: str = "smollm2-135m"
    """A Hugging Face folder, what `dscout convert` made of one, or the embedded smollm2-135m."""
    max_new_tokens: int = 160
    batch: int = 32
    temperature: float = 0.0
    """0 is greedy."""
    thinking: bool | None = None
    """The chat template's thinking switch, where it has one."""
    seed: int = 0
    limit: int | None = None
    """Answer only the first so many prompts."""
    shard: tuple[int, int] | None = None
    """I N: answer every N-th prompt from the I-th on, into OUT's name with .I-of-N; default: where several
    processes run together, each takes its share."""
    mesh: tuple[int, int, int] | None = None
    """This process's devices along data, fsdp and tensor, such as 1 1 4 for a target that one of them does
    not hold; default: one device."""
    dtype: Dtype = "float32"
    cache_dir: Path | None = None

    def __call__(self) -> None:
        import jax

        from dscout_jax.sharding import make_mesh
        from train.convert import open_target
        from train.hosts import join, share
        from train.regenerate import regenerate

        options = dataclasses.asdict(self)
        if self.shard is None:
            join()
            options["shard"] = share()
        prompts, out, dtype = options.pop("prompts"), options.pop("out"), options.pop("dtype")
        mesh = None if self.mesh is None else make_mesh(*self.mesh, devices=jax.local_devices())
        loaded = open_target(options.pop("target"), dtype_of(dtype), options.pop("cache_dir"), mesh)
        print(f"answers: {regenerate(loaded, prompts, out, **options | {'mesh': mesh})}")


@dataclasses.dataclass
class Train:
    """Trains a drafter by a config file; resumes."""

    config: Word[Path]
    """Executable Python that defines `config`; see configs/."""
    minutes: float | None = None
    """Stop after this long, saved; the next run goes on."""
    profile: tuple[int, int] | None = None
    """First and last step, counted from 1, to trace into RUN/profile; default the config's."""
    accept: tuple[str, ...] = ()
    """Go on with a run that was made under another contract in these points, such as: learning_rate data."""
    cache_dir: Path | None = None
    coordinator: str | None = None
    """host:port of the first of several processes; TPU slices, Slurm and Open MPI tell by themselves."""
    processes: int | None = None
    process_id: int | None = None

    def __call__(self) -> None:
        from train.hosts import join
        from train.loop import train
        from train.settings import load_settings

        settings = load_settings(self.config)
        if self.profile is not None:
            settings = dataclasses.replace(settings, profile=self.profile)
        join(self.coordinator, self.processes, self.process_id)
        # It loads the target itself, since nothing else may keep the weights.
        drafter = train(settings, minutes=self.minutes, accept=self.accept, cache_dir=self.cache_dir)
        print(f"drafter: {drafter}")


@dataclasses.dataclass
class Pack:
    """Joins files of answers into one for random access, for data that host memory does not hold."""

    answers: Word[tuple[str, ...]]
    """JSONL of `dscout regenerate`, such as what several hosts wrote; in a bucket (gs://...) too."""
    out: str
    """Ends with .array_record, on a local disk; a config names it as its data."""

    def __call__(self) -> None:
        from train.dataset import pack

        print(f"packed: {pack(self.answers, self.out)}")


@dataclasses.dataclass
class FeaturesOf:
    """Writes the target's features of a config's rows to its folder `features`; resumes."""

    config: Word[Path]
    """Trainings by this config, or by others that ask the same of target and data, then read them."""
    yes: bool = False
    """Do not ask whether the size may be written."""
    cache_dir: Path | None = None
    coordinator: str | None = None
    """host:port of the first of several processes; TPU slices, Slurm and Open MPI tell by themselves."""
    processes: int | None = None
    process_id: int | None = None

    def __call__(self) -> None:
        from train.hosts import join
        from train.settings import load_settings
        from train.write_features import write_features

        settings = load_settings(self.config)
        join(self.coordinator, self.processes, self.process_id)
        print(f"features: {write_features(settings, yes=self.yes, cache_dir=self.cache_dir)}")


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
    steps: int = 450
    prompts: int = 3072
    heldout: int = 128

    def __call__(self) -> None:
        from train.lab.target import make_lab

        options = dataclasses.asdict(self)
        print(f"laboratory: {make_lab(options.pop('out'), **options)}")


@dataclasses.dataclass
class LadderOf:
    """Compares recipes at equal data, steps, seeds and query budget by their decoded MAT; resumes."""

    ladders: Word[tuple[Path, ...]]
    """Executable Python that defines `ladder`; see configs/ladder/lab.py."""
    report: Path | None = None
    """Without an ending: the rows of all these ladders together, as .json, .md and .png."""
    shard: tuple[int, int] = (0, 1)
    """I N: every N-th run from the I-th on, for N processes on one disk; then once without, to publish."""
    cache_dir: Path | None = None

    def __call__(self) -> None:
        from train.ladder import climb_all

        print(climb_all(self.ladders, self.report, self.cache_dir, self.shard))


@dataclasses.dataclass
class Explain:
    """What recipes will ask of each slot, side by side, before any training."""

    configs: Word[tuple[Path, ...]]
    """Each defines a `config`, or a `ladder`, which is all of its recipes."""
    acceptance: float = 0.7
    """What every slot of an imagined drafter accepts; weights depend on it."""
    answer_tokens: int | None = None
    """Of every imagined answer; default each config's seq_len."""
    out: Path = Path("runs/explain")
    """Without an ending; .json, .md and .png are added."""

    def __call__(self) -> None:
        from train.explain import explain

        print(explain(**dataclasses.asdict(self)))
