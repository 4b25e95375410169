"""The ladder in the laboratory: DFlash, + mixed horizons, + unmasking, + AWL (DScout); beside it D-PACE, AUF.

Reproduces: docs/results/ladder.md, once that is measured.
Hardware: a CPU with 2 cores and 4 GB of memory.
Cost: not yet measured.
Command (after those of configs/lab.py): dscout ladder configs/ladder/lab.py
"""

import dataclasses

from configs.lab import config as base
from dscout_jax.objective import auf, dflash, dpace, dscout
from dscout_jax.objective.weighting import awl, decay
from train.ladder import Ladder

full = dscout(16)
mixed = dataclasses.replace(dflash(16), name="mixed", horizon=full.horizon)
unmasked = dataclasses.replace(mixed, name="unmasked", unmask=full.unmask)
assert dataclasses.replace(unmasked, name="dscout", weighting=full.weighting) == full

ladder = Ladder(
    base=base,
    recipes={
        "dflash": {"objective": dflash(16)},
        "+ mixed horizons": {"objective": mixed},
        "+ unmasking": {"objective": unmasked},
        "+ awl = dscout": {"objective": full},
        "dpace": {"objective": dpace(16)},
        "auf": {"objective": auf(16)},
        "awl alone": {
            "objective": dataclasses.replace(dflash(16), name="awl", weighting=awl()),
            "seeds": (0,),
        },
        "mixed + awl": {"objective": dataclasses.replace(mixed, name="mixed-awl", weighting=awl())},
        "dflash at 8": {"objective": dflash(8), "block_size": 8, "seeds": (0,)},
        "dflash at 4": {
            "objective": dataclasses.replace(dflash(4), weighting=decay(2.0)),
            "block_size": 4,
            "seeds": (0,),
        },
        "dflash, fresh start": {"objective": dflash(16), "init": "fresh", "seeds": (0,)},
    },
    seeds=(0, 1, 2, 3, 4),
    datasets={"lab": "runs/lab/heldout.jsonl"},
    block_sizes=(16, 8, 4),
    limit=64,
    max_new_tokens=256,
    out="runs/ladder_lab",
    target_name="lab",
)
