"""Plain against speculative decoding, prompt by prompt: speed, MAT, and whether the output is the same."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from dscout_jax import ops
from dscout_jax.decode import Decoder, mat, mat_interval, prefix_survival, tau
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, load_provenance
from dscout_jax.interop.jsonl import read_jsonl
from dscout_jax.models import Target, target_head
from infer.apply import PolicyUse
from infer.fingerprint import fingerprint
from infer.load import LOOKUP, encode_prompt, load_decoder
from infer.machine import describe
from infer.records import Records

Log = Callable[[str], object]
SameProgram = Literal["best", "all", "none"]


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured.

    prompts: JSONL files of {"turns": [...]}; the first turn is asked. A file's stem names its dataset.
    drafters: folders, "lookup", or a folder and "+lookup" (see `load_decoder`), all measured beside the one
        plain baseline. A folder's last part names it.
    block_sizes: sizes to measure; empty: each drafter's own.
    policy: in place of block sizes (see `infer.apply`).
    smaller, min_confidence: sizes that a round may be cut to when its drafts are too unsure (see Decoder).
    limit: prompts of each file, from its start; None: all.
    max_prompt_tokens: longer prompts are left out, and counted.
    plain_rows: rows that plain decoding computes (see Decoder); None: the faster of 1 and 2, by trial.
    same_program: at which sizes plain decoding also runs through the speculative program, for an identity
        that does not hang on the kernels' shape: each dataset's "best" (by speed-up), "all" or "none".
    out: folder of records.jsonl (a line a measurement; a second run goes on from it) and rows.json.
    """

    prompts: tuple[Path, ...]
    drafters: tuple[str, ...]
    target: str = "smollm2-135m"
    dtype: str = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    policy: PolicyUse | None = None
    smaller: tuple[int, ...] = ()
    min_confidence: float = 0.0
    max_new_tokens: int = 128
    limit: int | None = None
    max_prompt_tokens: int = 1024
    plain_rows: int | None = None
    same_program: SameProgram = "best"
    thinking: bool | None = None
    out: Path = Path("runs/benchmark")
    cache_dir: Path | None = None


def benchmark(settings: BenchmarkSettings, log: Log = print) -> list[dict[str, Any]]:
    """Measures what is not measured yet and returns a row for each dataset, drafter and block size.

    Raises:
        UserError: two drafters of one name, or what `load_decoder` refuses.
    """
    names = [_name(drafter) for drafter in settings.drafters]
    if not names or len(set(names)) < len(names):
        raise UserError(f"name one or more drafters, each once; their folders are called {names}")
    asked = {path: first_turns(path)[: settings.limit] for path in settings.prompts}
    loaded, decoders = _load(settings)
    setup = {
        "target": loaded.fingerprint,
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "thinking": settings.thinking,
        "backend": jax.default_backend(),
    }
    records = Records(settings.out / "records.jsonl", _digest(setup))
    bench = Bench(records, decoders, settings.max_new_tokens, settings.plain_rows)
    rows = []
    for path, texts in asked.items():
        prompts = [encode_prompt(loaded, text, settings.thinking) for text in texts]
        kept = {i: p for i, p in enumerate(prompts) if len(p) <= settings.max_prompt_tokens}
        for done, (index, prompt) in enumerate(kept.items(), start=1):
            bench.measure(path.stem, index, prompt)
            log(f"{path.stem} {done}/{len(kept)}: {bench.line(path.stem, index)}")
        checked = list(decoders) if settings.same_program == "all" else []
        if settings.same_program == "best":
            checked = [max(decoders, key=lambda at: bench.row(path.stem, list(kept), at)["speedup"])]
        for at in checked:
            log(f"{path.stem}: plain decoding through the program of {_said(at)}")
            for index, prompt in kept.items():
                bench.check_same_program(path.stem, index, prompt, at)
        for at, drafter in zip(decoders, _per_decoder(settings, decoders), strict=True):
            row = {
                "dataset": path.stem,
                "target": loaded.name,
                "provenance": _provenance(drafter),
                "dtype": settings.dtype,
                "temperature": 0.0,
                "max_new_tokens": settings.max_new_tokens,
                "skipped": len(prompts) - len(kept),
            }
            if settings.smaller:
                row |= {"smaller": list(settings.smaller), "min_confidence": settings.min_confidence}
            rows.append(row | bench.row(path.stem, list(kept), at))
    document = {"machine": describe(), "rows": rows}
    (settings.out / "rows.json").write_text(json.dumps(document, indent=1) + "\n")
    return rows


Contestant = tuple[str, int]
"""A drafter's name with a digest of its weights and options behind an @, and a block size."""


def _load(settings: BenchmarkSettings) -> tuple[LoadedTarget, dict[Contestant, Decoder]]:
    """The target, and a decoder for every drafter and block size."""
    options: dict[str, Any] = {}
    if settings.smaller:
        options = {"smaller": settings.smaller, "min_confidence": settings.min_confidence}
    loaded: Any = settings.target
    decoders: dict[Contestant, Decoder] = {}
    for drafter in settings.drafters:
        loaded, full = load_decoder(
            loaded, drafter, dtype=settings.dtype, cache_dir=settings.cache_dir, **options
        )
        made_of = [fingerprint(full.weights.drafter), len(full.draft_ids or ()), options]
        if settings.policy:
            decoder, size = settings.policy.follow(loaded, full, drafter, settings.dtype)
            made_of.append([settings.policy.adapt, settings.policy.explore, size])
            decoders[f"{_name(drafter)}@{_digest(made_of)}", size] = decoder
            continue
        name = f"{_name(drafter)}@{_digest(made_of)}"
        for size in settings.block_sizes or (full.block_size,):
            decoders[name, size] = full if size == full.block_size else full.resize(size)
    return loaded, decoders


def _per_decoder(settings: BenchmarkSettings, decoders: dict[Contestant, Decoder]) -> list[str]:
    """The drafter of each decoder, as the settings give it."""
    given = {_name(drafter): drafter for drafter in settings.drafters}
    return [given[name.rpartition("@")[0]] for name, _ in decoders]


def _name(drafter: str) -> str:
    return Path(drafter).name


def _said(at: Contestant) -> str:
    return f"{at[0].rpartition('@')[0]} B={at[1]}"


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _provenance(drafter: str) -> dict[str, Any]:
    folder = Path(drafter.removesuffix(f"+{LOOKUP}"))
    return load_provenance(folder) if folder.is_dir() else {}


class Bench:
    """One target, several drafters and block sizes, and what was measured so far.

    A key is (dataset, index, mode, *contestant), the mode one of plain, speculative, same_program and
    divergence; plain decoding is (dataset, index, "plain"), whoever competes.
    """

    def __init__(
        self,
        records: Records,
        decoders: dict[Contestant, Decoder],
        max_new_tokens: int,
        plain_rows: int | None = None,
    ) -> None:
        self.records, self.decoders, self.budget = records, decoders, max_new_tokens
        some = next(iter(decoders.values()))
        self._forms = {rows: some.plain(rows) for rows in ((1, 2) if plain_rows is None else (plain_rows,))}
        self._plain_rows = plain_rows
        self._gap = make_gap(some.target)
        self._target_params = some.weights.target
        self._warm: set[int] = set()

    def plain_rows(self, prompt: Sequence[int]) -> int:
        """The faster form of plain decoding, chosen once; a resumed run keeps the choice of its records."""
        if self._plain_rows is None and ("plain_rows",) in self.records:
            self._plain_rows = self.records[("plain_rows",)]["rows"]
        if self._plain_rows is None:
            times = {rows: [] for rows in self._forms}
            for _ in range(4):
                for rows, decoder in self._forms.items():
                    [g] = decoder.generate([prompt], 24, stop_ids=[[]])
                    times[rows].append(g.decode_seconds)
            # The first of each warms up.
            best = {rows: min(seconds[1:]) for rows, seconds in times.items()}
            self._plain_rows = min(best, key=best.get)
            self.records.add(("plain_rows",), {"rows": self._plain_rows, "seconds_of_24_tokens": best})
        return self._plain_rows

    def measure(self, dataset: str, index: int, prompt: Sequence[int]) -> None:
        """Measures every mode of one prompt that is missing, the modes next to one another in time."""
        jobs = [((dataset, index, "plain"), self._forms[self.plain_rows(prompt)])]
        jobs += [((dataset, index, "speculative", *at), decoder) for at, decoder in self.decoders.items()]
        jobs = [job for job in jobs if job[0] not in self.records]
        # Every other prompt runs in the other order, so that drift of the machine favours no mode.
        for key, decoder in jobs if index % 2 == 0 else jobs[::-1]:
            if id(decoder) not in self._warm:
                decoder.generate([prompt], min(8, self.budget))
                self._warm.add(id(decoder))
            self._record(key, decoder, prompt)
        for at in self.decoders:
            self._compare(dataset, index, prompt, at)

    def check_same_program(self, dataset: str, index: int, prompt: Sequence[int], at: Contestant) -> None:
        """Decodes one prompt plainly through the program that speculates."""
        key = (dataset, index, "same_program", *at)
        if key not in self.records:
            self._record(key, self.decoders[at], prompt, live_slots=1)

    def _record(
        self, key: tuple, decoder: Decoder, prompt: Sequence[int], live_slots: int | None = None
    ) -> None:
        [g] = decoder.generate([prompt], self.budget, live_slots=live_slots)
        row = {
            "prompt_tokens": len(prompt),
            "tokens": g.tokens,
            "accepted": g.accepted,
            "finish": g.finish,
            "prefill_seconds": g.prefill_seconds,
            "decode_seconds": g.decode_seconds,
        }
        self.records.add(key, row)

    def _compare(self, dataset: str, index: int, prompt: Sequence[int], at: Contestant) -> None:
        """Where the two outputs part, how close the two best logits were there."""
        key = (dataset, index, "divergence", *at)
        plain = self.records[dataset, index, "plain"]["tokens"]
        speculative = self.records[dataset, index, "speculative", *at]["tokens"]
        if plain == speculative or key in self.records:
            return
        place = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
        place = min(len(plain), len(speculative)) if place is None else place
        gap = self._gap(self._target_params, [*prompt, *plain[:place]])
        self.records.add(key, {"at": place, "gap": gap})

    def line(self, dataset: str, index: int) -> str:
        """A prompt's figures for the log."""
        plain = self.records[dataset, index, "plain"]
        parts = [f"plain {speed([plain]):.1f} tok/s"]
        for at in self.decoders:
            spec = self.records[dataset, index, "speculative", *at]
            same = "same" if spec["tokens"] == plain["tokens"] else "differs"
            parts.append(f"{_said(at)} {speed([spec]):.1f} (MAT {mat([spec['accepted']]):.2f}, {same})")
        return ", ".join(parts)

    def row(self, dataset: str, indices: Sequence[int], at: Contestant) -> dict[str, Any]:
        """A dataset's figures of one contestant; speeds are of all rounds together, prefill excluded."""

        def all_of(*mode: str | int) -> list[dict[str, Any]]:
            return [self.records[dataset, i, *mode] for i in indices]

        plain, spec = all_of("plain"), all_of("speculative", *at)
        accepted = [r["accepted"] for r in spec]
        keys = [(dataset, i, "divergence", *at) for i in indices]
        gaps = [self.records[key]["gap"] for key in keys if key in self.records]
        row = {
            "drafter": at[0].rpartition("@")[0],
            "n": len(indices),
            "block_size": at[1],
            "plain_rows": self._plain_rows,
            "plain_tokens_per_s": speed(plain),
            "speculative_tokens_per_s": speed(spec),
            "speedup": speed(spec) / speed(plain) if speed(plain) else 0.0,
            "mat": mat(accepted),
            "tau": tau(accepted),
            "mat_spread": mat_interval(accepted),
            "survival": prefix_survival(accepted, at[1]),
            "identical": sum(a["tokens"] == b["tokens"] for a, b in zip(plain, spec, strict=True)),
            "divergence_rate": len(gaps) / max(1, len(indices)),
            "logit_gap_median": float(np.median(gaps)) if gaps else None,
            "logit_gap_max": max(gaps) if gaps else None,
        }
        if all((dataset, i, "same_program", *at) in self.records for i in indices):
            same = all_of("same_program", *at)
            equal = sum(a["tokens"] == b["tokens"] for a, b in zip(same, spec, strict=True))
            row["identical_same_program"] = equal
        return row


def speed(records: Sequence[dict[str, Any]]) -> float:
    """Tokens a second of the rounds; the prefill's token and time are left out on both sides."""
    seconds = sum(r["decode_seconds"] for r in records)
    return sum(len(r["tokens"]) - 1 for r in records) / seconds if seconds else 0.0


def make_gap(target: Target, bucket: int = 256) -> Callable[[Any, Sequence[int]], float]:
    """gap(params, ids): the best logit after `ids` minus the second best, by one full forward."""

    @jax.jit
    def two_best(params, tokens_1xT, last):
        hidden = target.apply({"params": params}, tokens_1xT).hidden[0, last]
        return jax.lax.top_k(ops.head_logits(hidden[None], target_head(params))[0], 2)[0]

    def gap(params: Any, ids: Sequence[int]) -> float:
        tokens = np.zeros((1, -(-len(ids) // bucket) * bucket), np.int32)
        tokens[0, : len(ids)] = ids
        first, second = two_best(params, tokens, len(ids) - 1)
        return float(first - second)

    return gap


def first_turns(path: Path) -> list[str]:
    """What each row of a JSONL of {"turns": [...]} asks first. Raises UserError for a row without turns."""
    texts = []
    for row in read_jsonl(path):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise UserError(f'{path}: a row lacks "turns": ["text", ...]')
        texts.append(turns[0])
    return texts
