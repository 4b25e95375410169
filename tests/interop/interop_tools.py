"""Small Hugging Face folders and tokenizers, made on the spot."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.interop import names
from dscout_jax.interop.safetensors import write_tensors

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and ChatML's control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def target_config(**changes: Any) -> TargetConfig:
    sizes = {
        "vocab_size": 272,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e4),
        "max_position": 128,
        "qk_norm": True,
        "tie_embeddings": True,
        "eos_ids": (258,),
    }
    return TargetConfig(**sizes | changes)


def drafter_config(**changes: Any) -> DrafterConfig:
    target = target_config(num_layers=6)
    config = DrafterConfig.for_target(
        target, num_layers=2, block_size=4, mask_token_id=261, target_layer_ids=(1, 3)
    )
    return DrafterConfig(**{**config.__dict__, **changes})


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {path: rng.normal(0, 0.2, shape).astype(dtype) for path, shape in shapes.items()}


def write_target(folder: Path, config: TargetConfig, dtype: Any = np.float32, **options: Any) -> dict:
    """A target folder with a byte tokenizer; returns its tensors by Hugging Face name."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = random_tensors(names.target_shapes(config), dtype)
    tensors = {names.to_hf(path): value for path, value in flat.items()}
    write_tensors(folder, tensors, **options)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    write_tokenizer(folder)
    return tensors


def write_tokenizer(folder: Path, template: str | None = CHATML) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
