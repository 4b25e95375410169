"""Drafters and block sizes as contestants: what each is called, and what tells its records from another's."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dscout_jax.decode import Decoder
from dscout_jax.interop import LoadedTarget, load_provenance
from infer.apply import PolicyUse
from infer.fingerprint import digest, fingerprint, fingerprint_ids
from infer.load import LOOKUP, load_decoder

Contestant = tuple[str, int]
"""A drafter's name with a digest of its weights and options behind an @, and a block size."""

_TAIL = f"+{LOOKUP}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """decoder: what answers. drafter: as it was given. policy: what is followed (`PolicyUse.said`)."""

    decoder: Decoder
    drafter: str
    policy: dict[str, Any] | None = None

    def provenance(self) -> dict[str, Any]:
        """What the drafter was made from; empty where nothing says so."""
        folder = Path(self.drafter.removesuffix(_TAIL))
        return load_provenance(folder) if folder.is_dir() else {}


def called(at: Contestant) -> str:
    """A contestant's name for people."""
    return f"{drafter_of(at)} B={at[1]}"


def drafter_of(at: Contestant) -> str:
    """The drafter's name alone."""
    return at[0].rpartition("@")[0]


def names_of(drafters: Sequence[str]) -> list[str]:
    """What drafters are called: the fewest last parts of each path that no other drafter's path ends in.

    `drafter` and `exported/STEP` are what a run calls its drafters, every run alike: there the run's name
    counts. Where two are of one run, those parts stand behind it. One path given twice has one name.
    """
    paths = [_parts(drafter) for drafter in drafters]
    shown = {path: _run(path) for path in paths}
    alike = [run for run in shown.values() if list(shown.values()).count(run) > 1]
    least = {path: len(path) - len(run) + 1 if run in alike else 1 for path, run in shown.items()}
    shown = {path: path if run in alike else run for path, run in shown.items()}
    names = []
    for drafter, path in zip(drafters, paths, strict=True):
        own, others = shown[path], [parts for other, parts in shown.items() if other != path]
        count = least[path]
        while count < len(own) and any(parts[-count:] == own[-count:] for parts in others):
            count += 1
        names.append("/".join(own[-count:]) + (_TAIL if drafter.endswith(_TAIL) else ""))
    return names


def _parts(drafter: str) -> tuple[str, ...]:
    folder = drafter.removesuffix(_TAIL)
    return (folder,) if folder == LOOKUP else Path(os.path.abspath(folder)).parts


def _run(path: tuple[str, ...]) -> tuple[str, ...]:
    """Without what every run calls alike."""
    if path[-1] == "drafter" and len(path) > 2:
        return path[:-1]
    return path[:-2] if path[-2:-1] == ("exported",) and len(path) > 3 else path


def load_contestants(
    target: str,
    drafters: Sequence[str],
    *,
    block_sizes: Sequence[int] = (),
    policy: PolicyUse | None = None,
    concurrency: int = 1,
    dtype: str = "bfloat16",
    cache_dir: Path | None = None,
    bucket: int = 64,
    **options: Any,
) -> tuple[LoadedTarget, dict[Contestant, Entry]]:
    """The target, and an entry for every drafter and block size, or for every drafter by the policy.

    Further options go to the Decoder, and into the digest: with others, answers are measured anew.
    """
    loaded: Any = target
    entries: dict[Contestant, Entry] = {}
    for drafter, name in zip(drafters, names_of(drafters), strict=True):
        loaded, full = load_decoder(
            loaded, drafter, dtype=dtype, cache_dir=cache_dir, bucket=bucket, **options
        )
        made_of = [fingerprint(full.weights.drafter), fingerprint_ids(full.draft_ids), options]
        if policy:
            decoder, size = policy.follow(loaded, full, drafter, dtype, concurrency)
            said = policy.said(decoder, size)
            entries[f"{name}@{digest([*made_of, said])}", size] = Entry(decoder, drafter, said)
            continue
        for size in block_sizes or (full.block_size,):
            decoder = full if size == full.block_size else full.resize(size)
            entries[f"{name}@{digest(made_of)}", size] = Entry(decoder, drafter)
    return loaded, entries
