"""The ladder in the laboratory: DFlash, + mixed horizons, + unmasking, + AWL; beside it D-PACE, AUF and more.

Reproduces: docs/results/ladder.md, once that is measured.
Hardware: a CPU with 2 cores and 4 GB of memory.
Cost: not yet measured.
Command (after those of configs/lab.py): dscout ladder configs/ladder/lab.py
"""

import dataclasses

from configs.lab import config as base
from dscout_jax.objective import auf, dflash, dpace, dscout, published_dscout
from dscout_jax.objective.weighting import awl, decay
from train.ladder import Ladder

mixed = dataclasses.replace(dflash(16), name="mixed", horizon=dscout(16).horizon)
unmasked = dataclasses.replace(mixed, name="unmasked", unmask=published_dscout(16).unmask)

ladder = Ladder(
    base=base,
    recipes={
        "dflash": {"objective": dflash(16)},
        "+ mixed horizons": {"objective": mixed},
        "+ unmasking": {"objective": unmasked},
        "+ awl = published dscout": {"objective": published_dscout(16)},
        "dscout = mixed + awl": {"objective": dscout(16)},
        "dpace": {"objective": dpace(16)},
        "auf": {"objective": auf(16)},
        "awl alone": {
            "objective": dataclasses.replace(dflash(16), name="awl", weighting=awl()),
            "seeds": (0,),
        },
        "mixed + dpace": {
            "objective": dataclasses.replace(dpace(16), name="mixed-dpace", horizon=mixed.horizon),
            "seeds": (0,),
        },
        "dflash at 8": {"objective": dflash(8), "block_size": 8, "seeds": (0,)},
        "dflash at 4": {
            "objective": dataclasses.replace(dflash(4), weighting=decay(2.0)),
            "block_size": 4,
            "seeds": (0,),
        },
        "dflash, fresh start": {"objective": dflash(16), "init": "fresh", "seeds": (0,)},
        "dscout, fresh start": {"objective": dscout(16), "init": "fresh", "seeds": (0,)},
    },
    seeds=(0, 1, 2, 3, 4),
    datasets={"lab": "runs/lab/heldout.jsonl"},
    block_sizes=(16, 8, 4),
    limit=64,
    max_new_tokens=256,
    out="runs/ladder_lab",
    target_name="lab",
)
