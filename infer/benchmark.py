"""Plain against speculative decoding, prompt by prompt: speed, MAT, and whether the output is the same."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dscout_jax.decode import Decoder, Sampling
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from infer.apply import PolicyUse
from infer.contest import Contest, Terms
from infer.contestants import Contestant, Entry, called, load_contestants, names_of
from infer.document import write_document
from infer.fingerprint import digest
from infer.load import encode_prompt
from infer.machine import describe
from infer.records import Records
from infer.workload import Turns, load_workloads, order

Log = Callable[[str], object]
PART_ROUNDS = 16
"""Rounds of a part's timed program."""
QUEUE = 4
"""Conversations of a queue for each of its slots. Between queues the sides take turns; a kill loses one."""

SameProgram = Literal["best", "all", "none"]


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured.

    prompts: JSONL files of {"turns": [...]}, folders of such, "hf:NAME[:SPLIT[:COLUMN]]" (see
        `load_workloads`). A file's stem names its dataset.
    drafters: folders, "lookup", or a folder and "+lookup" (see `load_decoder`), all measured beside the one
        plain baseline. Their paths name them (see `names_of`).
    block_sizes: sizes to measure; empty: each drafter's own.
    policy: in place of block sizes (see `infer.apply`).
    smaller, min_confidence: sizes that a round may be cut to when its drafts are too unsure (see Decoder).
    limit: conversations of each dataset, the first that fit; None: all.
    seed: takes them at random instead, the same ones each time, and seeds the draws of a temperature.
    max_turns: of each conversation; plain decoding's own answers stand between them, for every contestant.
    max_prompt_tokens: a longer prompt ends its conversation, and is counted.
    prompt_bucket: prompts are padded to multiples of this; a larger one compiles less and prefills more.
    temperature, top_k, top_p, min_p: how answers are drawn; each prompt has a seed of its own.
    concurrency: above 1 a dataset's prompts are queues over so many slots (see `serve`), QUEUE conversations
        a slot; plain decoding and every contestant answer one before the next begins.
    plain_rows: rows that plain decoding computes (see Decoder); None: the faster of 1 and 2, by trial.
    same_program: at which sizes plain decoding also runs through the speculative program, for an identity
        that does not hang on the kernels' shape: each dataset's "best" (by speed-up), "all" or "none". Never
        where rounds take several sizes: without drafts they take others, and bf16 rounds differently in them.
    parts: time draft, verify and the rest of a round too, once a run at the prompts' median length.
    out: folder of records.jsonl (a line a measurement; a second run goes on from it) and rows.json.
    """

    prompts: tuple[str | Path, ...]
    drafters: tuple[str, ...]
    target: str = "smollm2-135m"
    dtype: str = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    policy: PolicyUse | None = None
    smaller: tuple[int, ...] = ()
    min_confidence: float = 0.0
    max_new_tokens: int = 128
    limit: int | None = None
    seed: int | None = None
    max_turns: int | None = None
    max_prompt_tokens: int = 1024
    prompt_bucket: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    concurrency: int = 1
    plain_rows: int | None = None
    same_program: SameProgram = "best"
    parts: bool = True
    thinking: bool | None = None
    out: Path = Path("runs/benchmark")
    cache_dir: Path | None = None

    def check(self) -> None:
        """Raises UserError for a number that means nothing."""
        counts = ("limit", "max_turns", "max_new_tokens", "max_prompt_tokens", "concurrency", "plain_rows")
        for name in (*counts, "prompt_bucket"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1")
        self.sampling.check()
        if self.min_confidence and not self.smaller:
            raise UserError(
                f"min_confidence {self.min_confidence:g} cuts rounds to smaller sizes: name them, --smaller"
            )
        names = names_of(self.drafters)
        if not names or len(set(names)) < len(names):
            raise UserError(f"name one or more drafters, each once; they are called {names}")

    @property
    def sampling(self) -> Sampling:
        """How answers are drawn. Without a temperature nothing else of it counts."""
        if not self.temperature:
            return Sampling()
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed or 0)


def benchmark(settings: BenchmarkSettings, log: Log = print) -> list[dict[str, Any]]:
    """Measures what is not measured yet and returns a row for each dataset, drafter and block size.

    Raises:
        UserError: two drafters of one name, a setting or workload that means nothing, no prompt that fits, or
            what `load_decoder` refuses; before anything is measured.
    """
    settings.check()
    asked = load_workloads(settings.prompts)
    options: dict[str, Any] = {}
    if settings.smaller:
        options = {"smaller": settings.smaller, "min_confidence": settings.min_confidence}
    loaded, entries = load_contestants(
        settings.target,
        settings.drafters,
        block_sizes=settings.block_sizes,
        policy=settings.policy,
        concurrency=settings.concurrency,
        dtype=settings.dtype,
        cache_dir=settings.cache_dir,
        bucket=settings.prompt_bucket,
        **options,
    )
    decoders = {at: entry.decoder for at, entry in entries.items()}
    longest = _longest(settings, loaded, decoders)
    datasets = {}
    for name, conversations in asked.items():
        datasets[name] = _pick(settings, loaded, conversations, longest)
        if not datasets[name].turns:
            log(f"{name}: none of its {len(conversations)} prompts fits in {longest} tokens; left out")
    if not any(picked.turns for picked in datasets.values()):
        raise UserError(f"no prompt fits in {longest} tokens; raise max_prompt_tokens, if the model allows")
    about = {
        "target": loaded.fingerprint,
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "thinking": settings.thinking,
        "sampling": settings.sampling._asdict(),
        "concurrency": settings.concurrency,
        "plain_rows": settings.plain_rows,
        "machine": describe(),
    }
    records = Records(settings.out / "records.jsonl", digest(about))
    if ("setup",) not in records:
        records.add(("setup",), {"about": about})
    terms = Terms(settings.max_new_tokens, settings.sampling, settings.concurrency, settings.plain_rows)
    contest = Contest(records, decoders, terms)
    if settings.parts:
        # The middle of a typical answer: what a step costs hangs on the cache's size.
        lengths = [length for picked in datasets.values() for length in picked.lengths]
        middle = int(statistics.median(lengths)) + settings.max_new_tokens // 2
        contest.parts(max(1, min(middle, longest + settings.max_new_tokens - PART_ROUNDS - 1)), PART_ROUNDS)
    rows = []
    for name, picked in datasets.items():
        if picked.turns:
            rows += _dataset_rows(settings, loaded, contest, entries, name, picked, longest, log)
    document = {"machine": about["machine"], "rows": rows}
    write_document(settings.out / "rows.json", document)
    return rows


@dataclasses.dataclass(frozen=True)
class _Picked:
    """Conversations by row number, lengths of their first prompts, how many were passed over as too long."""

    turns: Mapping[int, Turns]
    lengths: Sequence[int]
    passed: int


def _pick(
    settings: BenchmarkSettings, loaded: LoadedTarget, conversations: Sequence[Turns], longest: int
) -> _Picked:
    turns, lengths, passed = {}, [], 0
    for index in order(len(conversations), settings.seed):
        if settings.limit is not None and len(turns) == settings.limit:
            break
        length = len(encode_prompt(loaded, conversations[index][0], settings.thinking))
        if length > longest:
            passed += 1
        else:
            turns[index] = conversations[index][: settings.max_turns]
            lengths.append(length)
    return _Picked(dict(sorted(turns.items())), lengths, passed)


def _longest(
    settings: BenchmarkSettings, loaded: LoadedTarget, decoders: Mapping[Contestant, Decoder]
) -> int:
    """Tokens of the longest prompt that every contestant can answer."""
    models = [d.drafter.config for d in decoders.values() if d.drafter]
    room = min(config.max_position for config in (loaded.config, *models))
    block = max(2, settings.plain_rows or 0, *(d.block_size for d in decoders.values()))
    return min(settings.max_prompt_tokens, room - settings.max_new_tokens - block)


def _dataset_rows(
    settings: BenchmarkSettings,
    loaded: LoadedTarget,
    contest: Contest,
    entries: Mapping[Contestant, Entry],
    name: str,
    picked: _Picked,
    longest: int,
    log: Log,
) -> list[dict[str, Any]]:
    """Measures a dataset and returns a row a contestant."""
    together = QUEUE * settings.concurrency if settings.concurrency > 1 else 1
    indices = [*picked.turns]
    groups = [indices[at : at + together] for at in range(0, len(indices), together)]
    asked: list[tuple[int, dict[int, list[int]]]] = []
    skipped = picked.passed
    for done, group in enumerate(groups, start=1):
        history: dict[int, list[tuple[str, str]]] = {index: [] for index in group}
        for turn in range(max(len(picked.turns[index]) for index in group)):
            asks = {}
            for index in [i for i in history if turn < len(picked.turns[i])]:
                ids = encode_prompt(loaded, picked.turns[index][turn], settings.thinking, history[index])
                if len(ids) <= longest:
                    asks[index] = ids
                else:
                    skipped += len(picked.turns[index]) - turn
                    del history[index]
            if not asks:
                break
            contest.measure(name, turn, asks)
            asked.append((turn, asks))
            log(f"{name} {done}/{len(groups)} turn {turn + 1}: {contest.line(name, turn, list(asks))}")
            for index in asks:
                answer = loaded.tokenizer.decode(contest.records[name, index, turn, "plain"]["tokens"])
                history[index].append((picked.turns[index][turn], answer))
    checked = [at for at, decoder in contest.decoders.items() if len(decoder.sizes) == 1]
    if settings.same_program == "best" and checked:
        checked = [max(checked, key=lambda at: contest.row(name, asked, at)["speedup"])]
    for at in checked if settings.same_program != "none" else []:
        log(f"{name}: plain decoding through the program of {called(at)}")
        for turn, asks in asked:
            contest.check_same_program(name, turn, asks, at)
    rows = []
    for at, entry in entries.items():
        row = {
            "dataset": name,
            "target": loaded.name,
            "target_fingerprint": loaded.fingerprint[:16],
            "provenance": entry.provenance(),
            "dtype": settings.dtype,
            "temperature": settings.temperature,
            "seed": settings.seed,
            "thinking": settings.thinking,
            "max_new_tokens": settings.max_new_tokens,
            "skipped": skipped,
        }
        if settings.temperature:
            row |= {"top_k": settings.top_k, "top_p": settings.top_p, "min_p": settings.min_p}
        if settings.smaller:
            row |= {"smaller": list(settings.smaller), "min_confidence": settings.min_confidence}
        if entry.policy:
            row["policy"] = entry.policy
        rows.append(row | contest.row(name, asked, at))
    return rows
