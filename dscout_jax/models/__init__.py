"""Target and drafter as thin Linen modules, and the KV cache they share."""

from dscout_jax.models.cache import KVCache, init_cache, write_cache
from dscout_jax.models.drafter import Drafter
from dscout_jax.models.target import Target, TargetOutput, embed, target_head

__all__ = [
    "Drafter",
    "KVCache",
    "Target",
    "TargetOutput",
    "embed",
    "init_cache",
    "target_head",
    "write_cache",
]
