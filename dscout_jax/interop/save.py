"""Targets written as Hugging Face folders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dscout_jax.config import TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.interop.folders import whole_folder
from dscout_jax.interop.safetensors import listing, write_json, write_tensors


def save_target(
    folder: str | Path,
    config: TargetConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    tokenizer_config: Mapping[str, Any],
    token_ids: Mapping[str, int] | None = None,
) -> Path:
    """Writes a target as a Hugging Face folder; it appears when it is whole, and never over another.

    Args:
        params: the target's tree, stored in its own dtype.
        tokenizer_config: special tokens and chat template, as in tokenizer_config.json.
        token_ids: further entries of config.json and generation_config.json, such as "bos_token_id".
    Raises:
        UserError: tensors that do not fit `config`.
    """
    flat = {path: np.asarray(value) for path, value in names.flatten(params).items()}
    expected = names.target_shapes(config)
    odd = {path for path in flat.keys() | expected if np.shape(flat.get(path)) != expected.get(path)}
    if odd:
        raise UserError(f"the parameters do not fit the target's config at {listing(odd)}")
    ids = dict(token_ids or {})
    with whole_folder(folder, replace=False) as part:
        dtype = flat["embed_tokens/weight"].dtype.name
        write_json(part / "config.json", config.to_hf() | ids | {"dtype": dtype})
        write_json(part / "generation_config.json", {"eos_token_id": list(config.eos_ids)} | ids)
        write_json(
            part / "tokenizer_config.json",
            {
                # The class that takes tokenizer.json as it stands.
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "model_max_length": config.max_position,
                **tokenizer_config,
            },
        )
        tokenizer.save(str(part / "tokenizer.json"))
        write_tensors(part, {names.to_hf(path): value for path, value in flat.items()})
    return Path(folder)
