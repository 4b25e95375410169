"""Target and drafter as thin Linen modules, and the KV cache they share."""

from dscout_jax.models.cache import KVCache, init_cache, write_cache
from dscout_jax.models.drafter import Drafter
from dscout_jax.models.stacked import StackedTarget, stack_layers
from dscout_jax.models.target import Target, TargetOutput, embed, target_head

__all__ = [
    "Drafter",
    "KVCache",
    "StackedTarget",
    "Target",
    "TargetOutput",
    "embed",
    "init_cache",
    "stack_layers",
    "target_head",
    "write_cache",
]
