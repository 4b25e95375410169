"""From a trained drafter to a policy: log acceptance once a workload, measure latencies, choose."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dscout_jax.decode import Decoder, Sampling, seed_of
from dscout_jax.decode.batch import round_up
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from infer.apply import identity, said
from infer.fingerprint import digest
from infer.latency import measure
from infer.load import encode_prompt, load_decoder
from infer.machine import describe
from infer.policy import LatencyModel, MatModel, Policy
from infer.records import Records
from infer.workload import first_turns

MIXTURE = "mixture"
"""The workload that changes from one file's prompts to the next's."""

_PROMPT_BUCKET, _CAPACITY_BUCKET = 64, 256


@dataclasses.dataclass(frozen=True)
class TuneSettings:
    """What is measured.

    prompts: JSONL files of {"turns": [...]}, a workload each, named by the file's stem.
    mixture: also a workload of all files' prompts, so many of each in turn; 0: none.
    block_sizes: to choose from beside 1; empty: every size up to the drafter's own.
    concurrencies: rows decoded together.
    limit: prompts of each file. rows: of a batch while acceptance is logged, which needs no clock.
    sampling: how answers are drawn while acceptance is logged, rounds are timed and cells validated; its seed
        is a job's: each prompt's own follows from it.
    out: folder of policy.json and records.jsonl; a second run goes on from the records.
    """

    prompts: tuple[Path, ...]
    drafter: str | Path
    target: str = "smollm2-135m"
    dtype: str = "bfloat16"
    mixture: int = 0
    block_sizes: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    max_new_tokens: int = 128
    limit: int = 64
    max_prompt_tokens: int = 1024
    rows: int = 16
    repeats: int = 3
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    thinking: bool | None = None
    out: Path = Path("runs/tune")
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "limit", "rows", "repeats", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self.sampling.check()
        if self.mixture < 0:
            raise UserError(f"mixture {self.mixture} must be 0 (none) or prompts of a file in turn")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise UserError(f"concurrencies {self.concurrencies} must be one or more, from 1 up")
        names = [path.stem for path in self.prompts] + [MIXTURE] * bool(self.mixture)
        if len(set(names)) < len(names):
            raise UserError(f"workloads {names} share a name; one is named by its file")


@dataclasses.dataclass(frozen=True)
class Ground:
    """What measurements stand on: models, prompts and what was measured before.

    decoder: at the drafter's own size; every prompt fits one prompt bucket and one capacity, so that a
        round's latency is the same for all of them. sizes: block sizes to choose from beside 1.
    prompts: ids by workload, in order. source: file's stem of each prompt, likewise.
    """

    settings: TuneSettings
    decoder: Decoder
    sizes: tuple[int, ...]
    prompts: dict[str, list[list[int]]]
    source: dict[str, list[str]]
    about: dict[str, Any]
    records: Records

    def draws(self, prompt: Sequence[int]) -> Sampling:
        """How a prompt's answer is drawn: by a seed of its own, so that company changes nothing."""
        sampling = self.settings.sampling
        return sampling._replace(seed=seed_of(sampling.seed, prompt))


def prepare(settings: TuneSettings, target: LoadedTarget | None = None) -> Ground:
    """Loads and checks; a target that is loaded already, in the settings' dtype, is not read again.

    Raises:
        UserError: a block size that the drafter does not have, prompts that cannot be read or are too long.
    """
    asked = {path.stem: first_turns(path)[: settings.limit] for path in settings.prompts}
    loaded, decoder = load_decoder(
        target or settings.target, settings.drafter, dtype=settings.dtype, cache_dir=settings.cache_dir
    )
    sizes = settings.block_sizes or tuple(range(2, decoder.block_size + 1))
    if wrong := [size for size in sizes if not 2 <= size <= decoder.block_size]:
        raise UserError(f"block sizes {wrong} are not from 2 to the drafter's own, {decoder.block_size}")
    prompts, source = {}, {}
    for name, texts in asked.items():
        encoded = [encode_prompt(loaded, text, settings.thinking) for text in texts]
        prompts[name] = [prompt for prompt in encoded if len(prompt) <= settings.max_prompt_tokens]
        source[name] = [name] * len(prompts[name])
        if not prompts[name]:
            raise UserError(f"{name}: no prompt is within max_prompt_tokens {settings.max_prompt_tokens}")
    if settings.mixture:
        places = in_turns({name: len(own) for name, own in prompts.items()}, settings.mixture)
        source[MIXTURE] = [name for name, _ in places]
        prompts[MIXTURE] = [prompts[name][i] for name, i in places]
    longest = max(len(p) for own in prompts.values() for p in own)
    slots = round_up(longest, _PROMPT_BUCKET)
    need = max(slots, longest + settings.max_new_tokens + decoder.block_size)
    buckets = {"bucket": slots, "capacity_bucket": round_up(need, _CAPACITY_BUCKET)}
    decoder = decoder.resize(decoder.block_size, **buckets)
    about = {
        **identity(loaded, decoder, settings.drafter, settings.dtype),
        "max_new_tokens": settings.max_new_tokens,
        "capacity": buckets["capacity_bucket"],
        "thinking": settings.thinking,
        "sampling": said(settings.sampling),
        "seed": settings.sampling.seed if settings.sampling.temperature else None,
        "machine": describe(),
    }
    records = Records(settings.out / "records.jsonl", digest(about))
    return Ground(settings, decoder, tuple(sorted(sizes)), prompts, source, about, records)


def in_turns(lengths: dict[str, int], count: int) -> list[tuple[str, int]]:
    """(name, index) of every element, `count` of each name in turn."""
    most = max(lengths.values())
    return [
        (name, i)
        for start in range(0, most, count)
        for name, length in lengths.items()
        for i in range(start, min(start + count, length))
    ]


def tune(ground: Ground, log: Callable[[str], object] = print) -> Policy:
    """Measures what is not measured yet and writes `out/policy.json`."""
    settings, records = ground.settings, ground.records
    workloads = {}
    for name in ground.prompts:
        workloads[name] = MatModel.fit(logged(ground, name), ground.decoder.block_size)
        largest = ground.decoder.block_size
        log(f"{name}: MAT {workloads[name].mat(largest):.3f} at B={largest}")
    points: dict[tuple[int, int], float] = {}
    spread: dict[tuple[int, int], tuple[float, float]] = {}
    forms: dict[int, int] = {}
    for concurrency in settings.concurrencies:
        key = ("latency", concurrency, *ground.sizes)
        if key not in records:
            log(f"latency at concurrency {concurrency}")
            options = dict(batch=concurrency, repeats=settings.repeats, parts=False, log=log)
            options["sampling"] = settings.sampling
            records.add(key, measure(ground.decoder, ground.sizes, **options))
        found = records[key]
        forms[concurrency] = found["plain_rows"]
        points[concurrency, 1] = found["plain_ms"]
        spread[concurrency, 1] = tuple(found["spread"][f"plain_{found['plain_rows']}"])
        for block in found["blocks"]:
            size = block["block_size"]
            points[concurrency, size] = block["round_ms"]
            spread[concurrency, size] = tuple(found["spread"][f"round_{size}"])
    policy = Policy(ground.about, workloads, LatencyModel(points, spread), forms)
    policy.save(settings.out / "policy.json")
    return policy


def logged(ground: Ground, workload: str) -> list[list[int]]:
    """Accepted drafts of every round of every answer at the drafter's own size; decodes what is missing."""
    settings, records = ground.settings, ground.records
    prompts = {("logged", digest(prompt)): prompt for prompt in ground.prompts[workload]}
    missing = sorted((key for key in prompts if key not in records), key=lambda key: len(prompts[key]))
    for start in range(0, len(missing), settings.rows):
        part = missing[start : start + settings.rows]
        answers = ground.decoder.generate(
            [prompts[key] for key in part],
            settings.max_new_tokens,
            sampling=[ground.draws(prompts[key]) for key in part],
            rows=min(settings.rows, len(prompts)),
        )
        for key, answer in zip(part, answers, strict=True):
            records.add(key, {"accepted": answer.accepted})
    return [records["logged", digest(prompt)]["accepted"] for prompt in ground.prompts[workload]]


def table(policy: Policy) -> str:
    """Markdown: predicted tokens/s of each block size, the chosen one in bold."""
    sizes = policy.latency.block_sizes
    lines = ["| workload | concurrency | " + " | ".join(f"B={b}" for b in sizes) + " |"]
    lines.append("|---" * (2 + len(sizes)) + "|")
    rows: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in policy.table():
        rows.setdefault((row["workload"], row["concurrency"]), {})[row["block_size"]] = row
    for (workload, concurrency), cells in rows.items():
        lines.append(f"| {workload} | {concurrency} | " + " | ".join(_texts(sizes, cells)) + " |")
    return "\n".join(
        [*lines, "", "Predicted tokens/s, all rows together; bold: chosen. B=1 is plain decoding."]
    )


def _texts(sizes: Sequence[int], cells: dict[int, dict[str, Any]]) -> list[str]:
    texts = []
    for size in sizes:
        cell = cells.get(size)
        text = f"{cell['tokens_per_s_predicted']:.1f}" if cell else ""
        texts.append(f"**{text}**" if cell and cell["chosen"] else text)
    return texts
