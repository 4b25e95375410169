"""Maths without parameters."""

from dscout_jax.ops.argmax import argmax
from dscout_jax.ops.attention import block_attention, cached_attention, map_chunks
from dscout_jax.ops.dot import dot, embed_rows, head_logits
from dscout_jax.ops.norm import rms_norm
from dscout_jax.ops.rope import apply_rope, rope_angles

__all__ = [
    "apply_rope",
    "argmax",
    "block_attention",
    "cached_attention",
    "dot",
    "embed_rows",
    "head_logits",
    "map_chunks",
    "rms_norm",
    "rope_angles",
]
