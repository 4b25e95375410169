"""DFlash's recipe for SmolLM2-135M-Instruct: the rival of configs/smollm2_135m.py, on equal terms.

Reproduces: the drafter `dflash` of docs/results/suite.md.
Hardware: a CPU with 2 cores, bf16 instructions and 16 GB of memory.
Cost: as configs/smollm2_135m.py, whose answers it takes; features are made anew.
Command (after those of configs/smollm2_135m.py): dscout train configs/smollm2_dflash.py
Data, steps, seed, query slots, depth and block size are the same; the loss alone differs.
"""

import dataclasses

from configs.smollm2_135m import config as dscout
from dscout_jax.objective import dflash

config = dataclasses.replace(dscout, objective=dflash(dscout.block_size), run="runs/smollm2_dflash")
