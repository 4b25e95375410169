"""The factorised loss: inclusion x weighting x prediction, each a pure function of its own."""

from dscout_jax.objective.factorized import factorized_loss
from dscout_jax.objective.inclusion import Blocks, sample_blocks
from dscout_jax.objective.presets import Objective, auf, dflash, dpace, dscout, published_dscout

__all__ = [
    "Blocks",
    "Objective",
    "auf",
    "dflash",
    "dpace",
    "dscout",
    "factorized_loss",
    "published_dscout",
    "sample_blocks",
]
