"""DFlash folders: the round trip is bit-equal, and everything that would draft wrongly is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interop_tools import drafter_config, edit_json, random_tensors, target_config
from safetensors.numpy import load_file, save_file

from dscout_jax.config import DrafterConfig, RopeConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import check_pair, load_draft_ids, load_drafter, load_provenance, names, save_drafter
from dscout_jax.interop.safetensors import SINGLE

FILES = {"config.json", SINGLE, "README.md", "dscout.json"}


def _export(folder, config=None, dtype=np.float32, **options):
    config = config or drafter_config()
    flat = random_tensors(names.drafter_shapes(config), dtype)
    save_drafter(folder, config, names.nest(flat), dtype=dtype, **options)
    return config, flat


def _rewrite(folder, change):
    """Another project's folder: no checksums of ours, `change` applied to its tensors."""
    (folder / "dscout.json").unlink(missing_ok=True)
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_round_trip_is_bit_equal(tmp_path, dtype):
    rope = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    config, flat = _export(tmp_path / "d", drafter_config(rope=rope), dtype)
    loaded_config, params = load_drafter(tmp_path / "d")
    assert loaded_config == config
    loaded = names.flatten(params)
    assert loaded.keys() == flat.keys()
    for path, value in flat.items():
        assert loaded[path].dtype == dtype
        assert np.asarray(loaded[path]).tobytes() == value.tobytes()
    assert {file.name for file in (tmp_path / "d").iterdir()} == FILES


def test_draft_ids_are_kept_beside_the_weights(tmp_path):
    _export(tmp_path / "all")
    assert load_draft_ids(tmp_path / "all") is None
    _export(tmp_path / "some", draft_ids=np.array([3, 5]))
    assert load_draft_ids(tmp_path / "some") == [3, 5]
    (tmp_path / "some" / "draft_ids.json").write_text('["a"]')
    with pytest.raises(UserError, match=r"draft_ids\.json"):
        load_draft_ids(tmp_path / "some")


def test_config_in_both_spellings_and_exact_tensors(tmp_path):
    config, _ = _export(tmp_path / "d", special_ids={"eos_token": 258, "pad_token": 256, "unk_token": 0})
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1e4
    assert raw["dtype"] == raw["torch_dtype"] == "float32"
    assert (raw["eos_token_id"], raw["pad_token_id"]) == (258, 256) and "unk_token_id" not in raw
    stored = load_file(tmp_path / "d" / SINGLE)
    assert len(stored) == 11 * config.num_layers + 3
    assert not [name for name in stored if "embed" in name or "lm_head" in name or name.startswith("model.")]


def test_readme_counts_slots_for_one_engine_and_drafts_for_the_other(tmp_path):
    _export(tmp_path / "d", drafter_config(block_size=8), provenance={"target": "Qwen/Qwen3-4B"})
    text = (tmp_path / "d" / "README.md").read_text()
    assert '"num_speculative_tokens": 7}' in text and "vllm serve Qwen/Qwen3-4B" in text
    assert "--speculative-num-draft-tokens 8\n" in text


def test_provenance_and_replacing_an_earlier_export(tmp_path):
    folder = tmp_path / "d"
    _export(folder, provenance={"step": 1})
    _export(folder, provenance={"step": 2, "target": "t"})
    assert load_provenance(folder) == {"step": 2, "target": "t"}
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="no earlier export"):
        _export(tmp_path / "mine")


def test_a_failed_export_leaves_the_old_one(tmp_path, monkeypatch):
    folder = tmp_path / "d"
    _export(folder, provenance={"step": 1})

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("dscout_jax.interop.drafter.write_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        _export(folder, provenance={"step": 2})
    assert load_provenance(folder) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_export_refuses_what_does_not_fit(tmp_path):
    config = drafter_config()
    flat = random_tensors(names.drafter_shapes(config))
    with pytest.raises(UserError, match="norm/weight"):
        save_drafter(tmp_path / "d", config, names.nest(flat | {"norm/weight": np.ones(3)}))
    with pytest.raises(UserError, match="extra/weight"):
        save_drafter(tmp_path / "d", config, names.nest(flat | {"extra/weight": np.ones(3)}))
    bad = flat | {"norm/weight": np.full(16, np.nan)}
    with pytest.raises(UserError, match="norm/weight holds values that are not finite"):
        save_drafter(tmp_path / "d", config, names.nest(bad))
    large = flat | {"norm/weight": np.full(16, 1e6, np.float32)}
    with pytest.raises(UserError, match="norm/weight holds values that float16 does not"):
        save_drafter(tmp_path / "d", config, names.nest(large), dtype=np.float16)
    for token in ("eos_token", "pad_token"):
        with pytest.raises(UserError, match=f"is also the {token}_id"):
            save_drafter(tmp_path / "d", config, names.nest(flat), special_ids={token: 261})
    assert not list(tmp_path.iterdir())


def test_published_spellings_load(tmp_path):
    folder = tmp_path / "d"
    config, _ = _export(folder)
    _rewrite(folder, lambda t: t.update({f"model.{name}": t.pop(name) for name in list(t)}))
    edit_json(folder / "config.json", rope_parameters=None, block_size=None)
    loaded, params = load_drafter(folder, dtype=jnp.bfloat16)
    assert loaded == config
    assert names.flatten(params)["fc/weight"].dtype == jnp.bfloat16
    edit_json(folder / "config.json", block_size=config.block_size, dflash_config=None)
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    edit_json(folder / "config.json", dflash_config=nested)
    assert load_drafter(folder)[0] == config


@pytest.mark.parametrize(
    "name, kind, reason",
    [
        ("layers.0.attention_conv.weight", np.float32, "DFlash2"),
        ("layers.0.mlp_conv.weight", np.float32, "DFlash2"),
        ("candidate_selector.weight", np.float32, "candidate selector"),
        ("d2t", np.int64, "reduced draft vocabulary"),
        ("t2d", np.bool_, "reduced draft vocabulary"),
        ("embed_tokens.weight", np.float32, "target's embedding"),
        ("lm_head.weight", np.float32, "target's output head"),
        ("layers.0.self_attn.q_proj.bias", np.int64, "unknown tensors"),
    ],
)
def test_foreign_tensors_are_refused_by_name(tmp_path, name, kind, reason):
    _export(tmp_path / "d")
    _rewrite(tmp_path / "d", lambda t: t.update({name: np.ones(4, kind)}))
    with pytest.raises(UserError, match=reason) as caught:
        load_drafter(tmp_path / "d")
    assert name in str(caught.value)


def test_missing_tensor_and_wrong_fc_are_refused(tmp_path):
    folder = tmp_path / "d"
    _export(folder)
    _rewrite(folder, lambda t: t.pop("layers.1.self_attn.k_norm.weight"))
    with pytest.raises(UserError, match=r"missing tensors: layers\.1\.self_attn\.k_norm\.weight"):
        load_drafter(folder)
    _rewrite(folder, lambda t: t.update({"fc.weight": np.ones((16, 48), np.float32)}))
    with pytest.raises(UserError, match=r"fc\.weight is \[16, 48\]; 2 target_layer_ids"):
        load_drafter(folder)


_NESTED = {"mask_token_id": 261, "target_layer_ids": [1, 3], "block_size": 4}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "another kind of drafter"),
        ({"draft_vocab_size": 100}, "reduced draft vocabulary"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding"),
        ({"use_sliding_window": True}, "sliding"),
        ({"is_causal": True}, "is_causal"),
        ({"dflash_config": _NESTED | {"causal": True}}, "causal"),
        ({"dflash_config": _NESTED | {"sample_from_anchor": True}}, "sample_from_anchor"),
        ({"dflash_config": _NESTED | {"block_size": 16}}, "one block_size"),
        (
            {"dflash_config": {"target_layer_ids": [1, 3], "block_size": 4}},
            "lacks dflash_config.mask_token_id",
        ),
        ({"dflash_config": _NESTED | {"mask_token_id": 272}}, "outside the embedding"),
        ({"dflash_config": _NESTED | {"target_layer_ids": [1, 5]}}, "target_layer_ids"),
        ({"eos_token_id": 261}, "is also the eos_token_id"),
        ({"eos_token_id": [3, 261]}, "is also the eos_token_id"),
        ({"pad_token_id": 261}, "is also the pad_token_id"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta"),
        ({"rope_theta": 1e6}, "differently"),
    ],
)
def test_configs_that_would_draft_wrongly_are_refused(tmp_path, changes, reason):
    _export(tmp_path / "d")
    edit_json(tmp_path / "d" / "config.json", **changes)
    with pytest.raises(UserError, match=reason):
        load_drafter(tmp_path / "d")


def test_damage_is_named(tmp_path):
    folder = tmp_path / "d"
    _export(folder)
    data = bytearray((folder / SINGLE).read_bytes())
    data[-5] ^= 1
    (folder / SINGLE).write_bytes(data)
    with pytest.raises(UserError, match="SHA-256 differs"):
        load_drafter(folder)
    (folder / SINGLE).write_bytes(data[:-5])
    with pytest.raises(UserError, match="truncated"):
        load_drafter(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors"):
        load_drafter(folder)


def test_a_drafter_fits_its_own_target_only():
    target = target_config(num_layers=6)
    drafter: DrafterConfig = drafter_config()
    check_pair(drafter, target, {"eos_token": 258, "pad_token": 256})
    with pytest.raises(UserError, match="number of target layers 7 against 6"):
        check_pair(drafter, target_config(num_layers=7), {})
    with pytest.raises(UserError, match="hidden_size 32 against 16; vocab_size 300 against 272"):
        check_pair(drafter, target_config(num_layers=6, hidden_size=32, vocab_size=300), {})
    with pytest.raises(UserError, match="is also the eos_token_id"):
        check_pair(drafter, target_config(num_layers=6, eos_ids=(258, 261)), {"eos_token": 258})
    with pytest.raises(UserError, match="is also the pad_token_id"):
        check_pair(drafter, target, {"pad_token": 261})
