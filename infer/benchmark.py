"""Plain against speculative decoding, prompt by prompt: speed, MAT, and whether the output is the same."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax import ops
from dscout_jax.decode import Decoder, mat, mat_interval, prefix_survival, tau
from dscout_jax.errors import UserError
from dscout_jax.interop import load_provenance
from dscout_jax.interop.jsonl import read_jsonl
from dscout_jax.models import Target, target_head
from infer.load import encode_prompt, load_decoder
from infer.machine import describe
from infer.records import Records

Log = Callable[[str], object]
SameProgram = Literal["best", "all", "none"]


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured.

    prompts: JSONL files of {"turns": [...]}; the first turn is asked. A file's stem names its dataset.
    block_sizes: sizes to measure; empty: the drafter's own.
    limit: prompts of each file, from its start; None: all.
    max_prompt_tokens: longer prompts are left out, and counted.
    plain_rows: rows that plain decoding computes (see Decoder); None: the faster of 1 and 2, by trial.
    same_program: at which sizes plain decoding also runs through the speculative program, for an identity
        that does not hang on the kernels' shape: each dataset's "best" (by speed-up), "all" or "none".
    out: folder of records.jsonl (a line a measurement; a second run goes on from it) and rows.json.
    """

    prompts: tuple[Path, ...]
    drafter: Path
    target: str = "smollm2-135m"
    dtype: str = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    max_new_tokens: int = 128
    limit: int | None = None
    max_prompt_tokens: int = 1024
    plain_rows: int | None = None
    same_program: SameProgram = "best"
    thinking: bool | None = None
    out: Path = Path("runs/benchmark")
    cache_dir: Path | None = None


def benchmark(settings: BenchmarkSettings, log: Log = print) -> list[dict[str, Any]]:
    """Measures what is not measured yet and returns a row for each dataset and block size."""
    loaded, full = load_decoder(
        settings.target, settings.drafter, dtype=settings.dtype, cache_dir=settings.cache_dir
    )
    sizes = settings.block_sizes or (full.block_size,)
    decoders = {size: full if size == full.block_size else full.resize(size) for size in sizes}
    setup = {
        "target": loaded.fingerprint,
        "drafter": fingerprint(full.weights.drafter),
        "draft_ids": len(full.draft_ids or ()),
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "thinking": settings.thinking,
        "backend": jax.default_backend(),
    }
    digest = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()[:16]
    records = Records(settings.out / "records.jsonl", digest)
    bench = Bench(records, full, decoders, settings.max_new_tokens, settings.plain_rows)
    rows = []
    for path in settings.prompts:
        texts = first_turns(path)[: settings.limit]
        prompts = [encode_prompt(loaded, text, settings.thinking) for text in texts]
        kept = {i: p for i, p in enumerate(prompts) if len(p) <= settings.max_prompt_tokens}
        for done, (index, prompt) in enumerate(kept.items(), start=1):
            bench.measure(path.stem, index, prompt)
            log(f"{path.stem} {done}/{len(kept)}: {bench.line(path.stem, index)}")
        checked = list(decoders) if settings.same_program == "all" else []
        if settings.same_program == "best":
            checked = [max(decoders, key=lambda size: bench.row(path.stem, list(kept), size)["speedup"])]
        for size in checked:
            log(f"{path.stem}: plain decoding through the program of B={size}")
            for index, prompt in kept.items():
                bench.check_same_program(path.stem, index, prompt, size)
        for size in decoders:
            row = {
                "dataset": path.stem,
                "target": loaded.name,
                "drafter": load_provenance(settings.drafter) or str(settings.drafter),
                "dtype": settings.dtype,
                "temperature": 0.0,
                "max_new_tokens": settings.max_new_tokens,
                "skipped": len(prompts) - len(kept),
            }
            rows.append(row | bench.row(path.stem, list(kept), size))
    document = {"machine": describe(), "rows": rows}
    (settings.out / "rows.json").write_text(json.dumps(document, indent=1) + "\n")
    return rows


class Bench:
    """One target and drafter, several block sizes, and what was measured so far.

    A key is (dataset, index, mode, size), the mode one of plain, speculative and same_program.
    """

    def __init__(
        self,
        records: Records,
        full: Decoder,
        decoders: dict[int, Decoder],
        max_new_tokens: int,
        plain_rows: int | None = None,
    ) -> None:
        self.records, self.decoders, self.budget = records, decoders, max_new_tokens
        self._forms = {rows: full.plain(rows) for rows in ((1, 2) if plain_rows is None else (plain_rows,))}
        self._plain_rows = plain_rows
        self._gap = make_gap(full.target)
        self._target_params = full.weights.target
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
        jobs = [("plain", 0, self._forms[self.plain_rows(prompt)])]
        jobs += [("speculative", size, decoder) for size, decoder in self.decoders.items()]
        jobs = [job for job in jobs if (dataset, index, *job[:2]) not in self.records]
        # Every other prompt runs in the other order, so that drift of the machine favours no mode.
        for mode, size, decoder in jobs if index % 2 == 0 else jobs[::-1]:
            if id(decoder) not in self._warm:
                decoder.generate([prompt], min(8, self.budget))
                self._warm.add(id(decoder))
            self._record((dataset, index, mode, size), decoder, prompt)
        for size in self.decoders:
            self._compare(dataset, index, prompt, size)

    def check_same_program(self, dataset: str, index: int, prompt: Sequence[int], size: int) -> None:
        """Decodes one prompt plainly through the program that speculates with `size` slots."""
        key = (dataset, index, "same_program", size)
        if key not in self.records:
            self._record(key, self.decoders[size], prompt, live_slots=1)

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

    def _compare(self, dataset: str, index: int, prompt: Sequence[int], size: int) -> None:
        """Where the two outputs part, how close the two best logits were there."""
        key = (dataset, index, "divergence", size)
        plain = self.records[dataset, index, "plain", 0]["tokens"]
        speculative = self.records[dataset, index, "speculative", size]["tokens"]
        if plain == speculative or key in self.records:
            return
        at = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
        at = min(len(plain), len(speculative)) if at is None else at
        gap = self._gap(self._target_params, [*prompt, *plain[:at]])
        self.records.add(key, {"at": at, "gap": gap})

    def line(self, dataset: str, index: int) -> str:
        """A prompt's figures for the log."""
        plain = self.records[dataset, index, "plain", 0]
        parts = [f"plain {speed([plain]):.1f} tok/s"]
        for size in self.decoders:
            spec = self.records[dataset, index, "speculative", size]
            same = "same" if spec["tokens"] == plain["tokens"] else "differs"
            parts.append(f"B={size} {speed([spec]):.1f} (MAT {mat([spec['accepted']]):.2f}, {same})")
        return ", ".join(parts)

    def row(self, dataset: str, indices: Sequence[int], size: int) -> dict[str, Any]:
        """A dataset's figures at one block size; speeds are of all rounds together, prefill excluded."""

        def all_of(mode: str, at: int) -> list[dict[str, Any]]:
            return [self.records[dataset, i, mode, at] for i in indices]

        plain, spec = all_of("plain", 0), all_of("speculative", size)
        accepted = [r["accepted"] for r in spec]
        keys = [(dataset, i, "divergence", size) for i in indices]
        gaps = [self.records[key]["gap"] for key in keys if key in self.records]
        row = {
            "n": len(indices),
            "block_size": size,
            "plain_rows": self._plain_rows,
            "plain_tokens_per_s": speed(plain),
            "speculative_tokens_per_s": speed(spec),
            "speedup": speed(spec) / speed(plain) if speed(plain) else 0.0,
            "mat": mat(accepted),
            "tau": tau(accepted),
            "mat_spread": mat_interval(accepted),
            "survival": prefix_survival(accepted, size),
            "identical": sum(a["tokens"] == b["tokens"] for a, b in zip(plain, spec, strict=True)),
            "divergence_rate": len(gaps) / max(1, len(indices)),
            "logit_gap_median": float(np.median(gaps)) if gaps else None,
            "logit_gap_max": max(gaps) if gaps else None,
        }
        if all((dataset, i, "same_program", size) in self.records for i in indices):
            same = all_of("same_program", size)
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


def fingerprint(params: Any) -> str:
    """Of a drafter's weights: the sums of every tensor, in fp32."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = jnp.asarray(leaf, jnp.float32)
        figures = np.asarray(jnp.stack([leaf.sum(), jnp.abs(leaf).sum(), jnp.square(leaf).sum()]))
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.shape}".encode() + figures.tobytes())
    return digest.hexdigest()[:16]


def first_turns(path: Path) -> list[str]:
    """What each row of a JSONL of {"turns": [...]} asks first. Raises UserError for a row without turns."""
    texts = []
    for row in read_jsonl(path):
        turns = row.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise UserError(f'{path}: a row lacks "turns": ["text", ...]')
        texts.append(turns[0])
    return texts
