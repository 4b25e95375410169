"""The ladder in the laboratory: DFlash, + mixed horizons, + unmasking, + AWL; beside it D-PACE, AUF and more.

Reproduces: docs/results/ladder.md.
Hardware: a CPU with 2 cores and 4 GB of memory.
Cost: 48 runs of 2.1 minutes on 2 cores of an AMD EPYC with AVX512-bf16, 1 hour 41 in all. It resumes.
Command (after those of configs/lab.py): dscout ladder configs/ladder/lab.py
"""

import dataclasses
from typing import Any

from configs.lab import config as base
from dscout_jax.objective import Objective, auf, dflash, dscout, presets, published_dscout
from dscout_jax.objective.weighting import awl, decay, dpace
from train.ladder import Ladder

published = published_dscout(16)
mixed = dataclasses.replace(dflash(16), name="mixed", horizon=published.horizon)
unmasked = dataclasses.replace(mixed, name="unmasked", unmask=published.unmask)
short = dataclasses.replace(dflash(16), name="short", horizon=dscout(16).horizon)


def once(objective: Objective, **changes: Any) -> dict[str, Any]:
    """A recipe of which one seed must do."""
    return {"objective": objective, "seeds": (0,), **changes}


def alone(block_size: int, gamma: float | None = None) -> dict[str, Any]:
    """DFlash's recipe for a drafter that knows one block size."""
    objective = dataclasses.replace(dflash(block_size), weighting=decay(gamma))
    return {"objective": objective, "block_size": block_size, "seeds": (0, 1, 2)}


ladder = Ladder(
    base=base,
    recipes={
        "dflash": {"objective": dflash(16)},
        "+ mixed horizons": {"objective": mixed},
        "+ unmasking": {"objective": unmasked},
        "+ awl = published dscout": {"objective": published},
        "dscout": {"objective": dscout(16)},
        "dpace": {"objective": presets.dpace(16)},
        "auf": {"objective": auf(16)},
        "dflash at 8": alone(8),
        "dflash at 4": alone(4, gamma=2.0),
        # What of dscout does it.
        "awl alone": once(dataclasses.replace(dflash(16), name="awl", weighting=awl())),
        "mixed horizons, awl": once(dataclasses.replace(mixed, name="mixed-awl", weighting=awl())),
        "mixed horizons, dpace": once(dataclasses.replace(mixed, name="mixed-dpace", weighting=dpace())),
        "short horizons": once(short),
        "short horizons, awl": once(dataclasses.replace(short, name="short-awl", weighting=awl(eps=0.25))),
        "dflash, fresh start": once(dflash(16), init="fresh"),
        "dscout, fresh start": once(dscout(16), init="fresh"),
    },
    seeds=(0, 1, 2, 3, 4),
    datasets={"lab": "runs/lab/heldout.jsonl"},
    block_sizes=(16, 8, 4),
    limit=64,
    max_new_tokens=256,
    out="runs/ladder_lab",
    target_name="lab",
)
