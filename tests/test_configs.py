"""Every config file runs, and the Qwen3 presets make the drafters that engines expect."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from dscout_jax.config import TargetConfig
from dscout_jax.interop import names
from train.ladder import load_ladder
from train.prepare import drafter_config
from train.settings import load_settings

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("[!_]*.py")), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_it_runs_and_says_what_it_is(path):
    load_ladder(path) if path.parent.name == "ladder" else load_settings(path)
    text = path.read_text()
    for word in ("Reproduces:", "Hardware:", "Cost:", "Command"):
        assert word in text


# Published sizes: width, feed-forward, layers, query heads, KV heads, tied; then the default taps.
QWEN3 = {
    "qwen3_0_6b": (1024, 3072, 28, 16, 8, True, (1, 7, 13, 19, 25)),
    "qwen3_1_7b": (2048, 6144, 28, 16, 8, True, (1, 7, 13, 19, 25)),
    "qwen3_4b": (2560, 9728, 36, 32, 8, True, (1, 9, 17, 25, 33)),
    "qwen3_8b": (4096, 12288, 36, 32, 8, False, (1, 9, 17, 25, 33)),
}


@pytest.mark.parametrize("name", QWEN3)
def test_qwen3_drafters_have_dflashs_shapes(name):
    width, inner, layers, heads, groups, tied, taps = QWEN3[name]
    target = TargetConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": tied,
            "eos_token_id": 151645,
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
        }
    )
    special = SimpleNamespace(special_ids={"eos_token": 151645, "pad_token": 151643})
    config = drafter_config(
        load_settings(CONFIGS / f"{name}.py"), SimpleNamespace(config=target, tokenizer=special)
    )
    raw = config.to_hf()
    assert raw["dflash_config"] == {"mask_token_id": 151669, "target_layer_ids": list(taps), "block_size": 16}
    want = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 5,
        "num_target_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * 5,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "block_size": 16,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    assert {key: raw[key] for key in want} == want
    shapes = names.drafter_shapes(config)
    assert len(shapes) == 11 * 5 + 3
    assert shapes["fc/weight"] == (width, 5 * width)
    assert shapes["layers_4/self_attn/q_proj/weight"] == (heads * 128, width)
    assert shapes["layers_4/mlp/down_proj/weight"] == (width, inner)
