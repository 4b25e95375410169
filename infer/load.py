"""A target and a drafter from their folders, as a decoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dscout_jax.decode import Decoder, lookup_draft
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, check_pair, load_draft_ids, load_drafter, load_target
from dscout_jax.models import Drafter, Target

LOOKUP = "lookup"
"""Stands for a drafter's folder: prompt lookup, which needs none."""

_LOOKUP_BLOCK = 8

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def dtype_of(name: str) -> Any:
    """The jax dtype of a name. Raises UserError for another than those of DTYPES."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_decoder(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str = "bfloat16",
    block_size: int | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> tuple[LoadedTarget, Decoder]:
    """Loads both models in one dtype; the drafter "lookup" is none. Further options go to the Decoder."""
    kind = dtype_of(dtype)
    loaded = load_target(target, dtype=kind, cache_dir=cache_dir)
    module = params = None
    if drafter is not None and str(drafter) == LOOKUP:
        drafter, block_size = None, block_size or _LOOKUP_BLOCK
        # Where the text holds nothing alike, a round verifies two slots.
        smaller = (2,) if block_size > 2 else ()
        options = dict(draft=lookup_draft, smaller=smaller, min_confidence=0.5) | options
    if drafter is not None and "draft_ids" not in options:
        options["draft_ids"] = load_draft_ids(drafter)
    if drafter is not None:
        config, params = load_drafter(drafter, dtype=kind)
        check_pair(config, loaded.config, loaded.tokenizer.special_ids)
        module = Drafter(config, kind)
    decoder = Decoder(
        Target(loaded.config, kind),
        loaded.params,
        module,
        params,
        stop_ids=loaded.tokenizer.stop_ids,
        block_size=block_size,
        detokenize=loaded.tokenizer.decode,
        **options,
    )
    return loaded, decoder


def encode_prompt(
    loaded: LoadedTarget, text: str, thinking: bool | None = None, history: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Ids of a user's turn in the target's chat format; of the bare text where it has no template.

    history: (user, assistant) turns before it.
    """
    if loaded.tokenizer.template is None:
        return loaded.tokenizer.encode("".join(said for pair in history for said in pair) + text)
    roles = ("user", "assistant")
    said = [{"role": r, "content": c} for pair in history for r, c in zip(roles, pair, strict=True)]
    return loaded.tokenizer.chat([*said, {"role": "user", "content": text}], thinking=thinking)
