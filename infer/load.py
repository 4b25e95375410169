"""A target and a drafter from their folders, as a decoder."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dscout_jax.decode import Decoder, block_draft, lookup_draft, lookup_or
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, check_pair, load_draft_ids, load_drafter, load_target
from dscout_jax.models import Drafter, Target

LOOKUP = "lookup"
"""Stands for a drafter's folder: prompt lookup, which needs none. DIR+lookup is both together."""

_LOOKUP_BLOCK = 8
# Tokens that must agree before a text is copied in a drafter's stead: with fewer the drafter knows better.
_AGREE = 4

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def dtype_of(name: str) -> Any:
    """The jax dtype of a name. Raises UserError for another than those of DTYPES."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_decoder(
    target: str | Path | LoadedTarget,
    drafter: str | Path | None = None,
    *,
    dtype: str = "bfloat16",
    block_size: int | None = None,
    cache_dir: str | Path | None = None,
    **options: Any,
) -> tuple[LoadedTarget, Decoder]:
    """Loads both models in one dtype. Further options go to the Decoder.

    Args:
        target: a folder, the embedded default's name, or a target that is loaded already.
        drafter: a folder; "lookup", which is none; or a folder with "+lookup" behind it: what the text
            repeats is copied, the rest drafted.
    """
    kind = dtype_of(dtype)
    loaded = target
    if not isinstance(target, LoadedTarget):
        loaded = load_target(target, dtype=kind, cache_dir=cache_dir)
    module = params = None
    copies = drafter is not None and str(drafter).endswith(f"+{LOOKUP}")
    if copies:
        drafter = str(drafter).removesuffix(f"+{LOOKUP}")
    if drafter is not None and str(drafter) == LOOKUP:
        drafter, block_size = None, block_size or _LOOKUP_BLOCK
        # Where the text holds nothing alike, a round verifies two slots.
        smaller = (2,) if block_size > 2 else ()
        options = dict(draft=lookup_draft, smaller=smaller, min_confidence=0.5) | options
    if drafter is not None:
        config, params = load_drafter(drafter, dtype=kind)
        check_pair(config, loaded.config, loaded.tokenizer.special_ids)
        module = Drafter(config, kind)
        options = {"draft_ids": load_draft_ids(drafter)} | options
    if copies:
        options["draft"] = lookup_or(partial(block_draft, module), _AGREE)
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
