"""From a trained drafter to a policy: log acceptance once a workload, measure latencies, choose."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dscout_jax.decode import Decoder
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from infer.fingerprint import fingerprint
from infer.latency import measure
from infer.load import encode_prompt, load_decoder
from infer.machine import describe
from infer.policy import LatencyModel, MatModel, Policy
from infer.records import Records
from infer.workload import first_turns


@dataclasses.dataclass(frozen=True)
class TuneSettings:
    """What is measured.

    prompts: JSONL files of {"turns": [...]}, a workload each, named by the file's stem.
    block_sizes: to choose from beside 1; empty: every size up to the drafter's own.
    concurrencies: rows decoded together.
    limit: prompts of each workload. rows: of a batch while acceptance is logged, which needs no clock.
    out: folder of policy.json and records.jsonl; a second run goes on from the records.
    """

    prompts: tuple[Path, ...]
    drafter: Path
    target: str = "smollm2-135m"
    dtype: str = "bfloat16"
    block_sizes: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    max_new_tokens: int = 128
    limit: int = 64
    max_prompt_tokens: int = 1024
    rows: int = 16
    repeats: int = 3
    thinking: bool | None = None
    out: Path = Path("runs/tune")
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "limit", "rows", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise UserError(f"concurrencies {self.concurrencies} must be one or more, from 1 up")
        if len({path.stem for path in self.prompts}) < len(self.prompts):
            raise UserError("two files of prompts have one name; a workload is named by its file")


def tune(settings: TuneSettings, log: Callable[[str], object] = print) -> Policy:
    """Measures what is not measured yet and writes `out/policy.json`.

    Raises:
        UserError: a block size that the drafter does not have, prompts that cannot be read.
    """
    loaded, decoder = load_decoder(
        settings.target, settings.drafter, dtype=settings.dtype, cache_dir=settings.cache_dir
    )
    sizes = settings.block_sizes or tuple(range(2, decoder.block_size + 1))
    if wrong := [size for size in sizes if not 2 <= size <= decoder.block_size]:
        raise UserError(f"block sizes {wrong} are not from 2 to the drafter's own, {decoder.block_size}")
    about = {
        "target": loaded.fingerprint,
        "drafter": fingerprint(decoder.weights.drafter),
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "thinking": settings.thinking,
        "machine": describe(),
    }
    asked = {path: first_turns(path)[: settings.limit] for path in settings.prompts}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    records = Records(settings.out / "records.jsonl", digest)
    workloads = {}
    for path, texts in asked.items():
        accepted = _log_acceptance(settings, loaded, decoder, path.stem, texts, records)
        workloads[path.stem] = MatModel.fit(accepted, decoder.block_size)
        log(f"{path.stem}: MAT {workloads[path.stem].mat(decoder.block_size):.3f} at B={decoder.block_size}")
    points: dict[tuple[int, int], float] = {}
    for concurrency in settings.concurrencies:
        key = ("latency", concurrency, *sizes)
        if key not in records:
            log(f"latency at concurrency {concurrency}")
            records.add(key, measure(decoder, sizes, batch=concurrency, repeats=settings.repeats, log=log))
        points[concurrency, 1] = records[key]["plain_ms"]
        points |= {(concurrency, b["block_size"]): b["round_ms"] for b in records[key]["blocks"]}
    policy = Policy(about, workloads, LatencyModel(points))
    policy.save(settings.out / "policy.json")
    return policy


def _log_acceptance(
    settings: TuneSettings,
    loaded: LoadedTarget,
    decoder: Decoder,
    workload: str,
    texts: list[str],
    records: Records,
) -> list[list[int]]:
    """Accepted drafts of every round of every answer, decoded at the drafter's own size."""
    prompts = [encode_prompt(loaded, text, settings.thinking) for text in texts]
    kept = [i for i, prompt in enumerate(prompts) if len(prompt) <= settings.max_prompt_tokens]
    missing = [i for i in kept if (workload, i) not in records]
    missing.sort(key=lambda i: len(prompts[i]))
    for start in range(0, len(missing), settings.rows):
        part = missing[start : start + settings.rows]
        answers = decoder.generate(
            [prompts[i] for i in part], settings.max_new_tokens, rows=min(settings.rows, len(kept))
        )
        for i, answer in zip(part, answers, strict=True):
            records.add((workload, i), {"accepted": answer.accepted})
    return [records[workload, i]["accepted"] for i in kept]


def check_policy(policy: Policy, loaded: LoadedTarget, decoder: Decoder, dtype: str) -> list[str]:
    """What makes the policy's latencies doubtful here: another machine. Empty: nothing.

    Raises:
        UserError: the policy is another drafter's, another target's or another dtype's.
    """
    mine = {"target": loaded.fingerprint, "drafter": fingerprint(decoder.weights.drafter), "dtype": dtype}
    if odd := [name for name, value in mine.items() if policy.about.get(name) != value]:
        raise UserError(f"the policy was measured with another {' and '.join(odd)}; run `dscout tune` again")
    here, there = describe(), policy.about.get("machine", {})
    return [f"{k}: {there.get(k)!r} then, {here[k]!r} now" for k in here if here[k] != there.get(k)]


def table(policy: Policy) -> str:
    """Markdown: predicted tokens/s of each block size, the chosen one in bold."""
    sizes = policy.latency.block_sizes
    lines = ["| workload | concurrency | " + " | ".join(f"B={b}" for b in sizes) + " |"]
    lines.append("|---" * (2 + len(sizes)) + "|")
    rows: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in policy.table():
        rows.setdefault((row["workload"], row["concurrency"]), {})[row["block_size"]] = row
    for (workload, concurrency), cells in rows.items():
        texts = []
        for size in sizes:
            cell = cells.get(size)
            text = f"{cell['tokens_per_s_predicted']:.1f}" if cell else ""
            texts.append(f"**{text}**" if cell and cell["chosen"] else text)
        lines.append(f"| {workload} | {concurrency} | " + " | ".join(texts) + " |")
    return "\n".join(
        [*lines, "", "Predicted tokens/s, all rows together; bold: chosen. B=1 is plain decoding."]
    )
