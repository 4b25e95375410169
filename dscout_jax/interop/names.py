"""Tensor names: parameter paths of this library, Hugging Face names, and the shapes behind them.

A path is the keys of a nested parameter dict joined by slashes. The one rule: the Hugging Face name is the
path with dots for slashes and `layers_3` spelt `layers.3`, behind `model.` except for the output head.
Weights are [out, in] on both sides, so nothing is ever transposed.
"""

import re
from collections.abc import Mapping
from typing import Any

from dscout_jax.config import DrafterConfig, TargetConfig

Shape = tuple[int, ...]

TARGET_PREFIX = "model."
DRAFTER_PREFIX = ""
_UNPREFIXED = ("lm_head.",)


def to_hf(path: str, prefix: str = TARGET_PREFIX) -> str:
    """`layers_3/mlp/up_proj/weight` -> `model.layers.3.mlp.up_proj.weight`."""
    name = re.sub(r"^layers_(\d+)/", r"layers/\1/", path).replace("/", ".")
    return name if name.startswith(_UNPREFIXED) else prefix + name


def from_hf(name: str, prefix: str = TARGET_PREFIX) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `layers_3/mlp/up_proj/weight`; the inverse of `to_hf`."""
    path = name.removeprefix(prefix).replace(".", "/")
    return re.sub(r"^layers/(\d+)/", r"layers_\1/", path)


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Paths to a nested dict."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def flatten(tree: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """A nested dict to paths; the inverse of `nest`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{parent}/{key}" if parent else key
        flat |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def _layers(config: TargetConfig | DrafterConfig, qk_norm: bool) -> dict[str, Shape]:
    """Paths and shapes of every decoder layer."""
    width, ffn = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm": (width,),
        "self_attn/q_proj": (queries, width),
        "self_attn/k_proj": (keys, width),
        "self_attn/v_proj": (keys, width),
        "self_attn/o_proj": (width, queries),
        "post_attention_layernorm": (width,),
        "mlp/gate_proj": (ffn, width),
        "mlp/up_proj": (ffn, width),
        "mlp/down_proj": (width, ffn),
    }
    if qk_norm:
        layer |= {"self_attn/q_norm": (config.head_dim,), "self_attn/k_norm": (config.head_dim,)}
    return {
        f"layers_{i}/{name}/weight": shape for i in range(config.num_layers) for name, shape in layer.items()
    }


def target_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Path and shape of every tensor of a target; a head of its own only where it is untied."""
    table = (config.vocab_size, config.hidden_size)
    shapes = {"embed_tokens/weight": table, "norm/weight": (config.hidden_size,)}
    shapes |= _layers(config, config.qk_norm)
    return shapes if config.tie_embeddings else shapes | {"lm_head/weight": table}


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Path and shape of a drafter's tensors: no embedding, no head.

    A DFlash drafter has 11 L + 3; with softmax fusion, C weights a layer stand for the `fc`: 12 L + 2.
    """
    width, taps = config.hidden_size, len(config.target_layer_ids)
    if config.fusion == "fc":
        shapes = {"fc/weight": (width, taps * width)}
    else:
        shapes = {f"layers_{i}/fusion/weight": (taps,) for i in range(config.num_layers)}
    shapes |= {"hidden_norm/weight": (width,), "norm/weight": (width,)}
    return shapes | _layers(config, qk_norm=True)
