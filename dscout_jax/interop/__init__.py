"""Weights, tokenizers and checkpoints of the outside world."""

from dscout_jax.interop.drafter import check_pair, load_draft_ids, load_drafter, load_provenance, save_drafter
from dscout_jax.interop.huggingface import LoadedTarget, default_mask_id, load_target, onto
from dscout_jax.interop.save import save_target
from dscout_jax.interop.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "LoadedTarget",
    "Tokenizer",
    "check_pair",
    "default_mask_id",
    "load_draft_ids",
    "load_drafter",
    "load_provenance",
    "load_target",
    "load_tokenizer",
    "onto",
    "save_drafter",
    "save_target",
]
