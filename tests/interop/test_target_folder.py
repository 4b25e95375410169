"""Target folders: what is stored is what is loaded, and what is wrong is named before any work."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interop_tools import edit_json, target_config, write_target
from safetensors.numpy import save_file

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import default_mask_id, load_target, names, onto
from dscout_jax.interop.huggingface import _same_bits
from dscout_jax.interop.safetensors import INDEX, SINGLE, TensorFolder
from dscout_jax.models import Target
from dscout_jax.ops import rope_angles
from dscout_jax.sharding import make_mesh, shardings


def _flat(loaded):
    return {names.to_hf(path): np.asarray(v) for path, v in names.flatten(loaded.params).items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_loads_what_is_stored(tmp_path, tied, dtype):
    config = target_config(tie_embeddings=tied)
    stored = write_target(tmp_path, config, dtype)
    loaded = load_target(tmp_path, dtype=jnp.float32)
    assert loaded.config == config
    assert ("lm_head" in loaded.params) is not tied
    flat = _flat(loaded)
    assert flat.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(flat[name], value.astype(np.float32))
    assert load_target(tmp_path).params["norm"]["weight"].dtype == jnp.bfloat16


def test_shards_equal_one_file(tmp_path):
    config = target_config()
    write_target(tmp_path / "one", config)
    write_target(tmp_path / "many", config, shard_bytes=8000)
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    one, many = (load_target(tmp_path / name, jnp.float32) for name in ("one", "many"))
    assert one.fingerprint == many.fingerprint
    for name, value in _flat(one).items():
        np.testing.assert_array_equal(value, _flat(many)[name])


def test_fingerprint_tells_weights_and_shapes_apart(tmp_path):
    stored = write_target(tmp_path, target_config())
    before = load_target(tmp_path).fingerprint
    edit_json(tmp_path / "config.json", eos_token_id=[258, 256])
    assert load_target(tmp_path).fingerprint == before
    changed = stored | {"model.norm.weight": stored["model.norm.weight"] + 1e-3}
    save_file(changed, tmp_path / SINGLE)
    assert load_target(tmp_path).fingerprint != before
    save_file(stored, tmp_path / SINGLE)
    edit_json(tmp_path / "config.json", rms_norm_eps=1e-5)
    assert load_target(tmp_path).fingerprint != before


def test_place_gets_every_tensor_in_the_asked_dtype(tmp_path):
    write_target(tmp_path, target_config())
    seen = {}

    def place(path, value, dtype):
        seen[path] = dtype
        return jnp.asarray(np.array(value, dtype))

    load_target(tmp_path, place=place)
    assert seen.keys() == names.target_shapes(target_config()).keys()
    assert set(seen.values()) == {jnp.dtype(jnp.bfloat16)}


def test_stop_tokens_are_the_union_with_the_turns_end_first(tmp_path):
    write_target(tmp_path, target_config(eos_ids=(256,)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257]}))
    loaded = load_target(tmp_path)
    assert loaded.tokenizer.stop_ids == loaded.config.eos_ids == (258, 256, 257)


def test_mask_id_is_the_first_spare_row(tmp_path):
    write_target(tmp_path, target_config())
    assert default_mask_id(load_target(tmp_path)) == 261
    write_target(tmp_path, target_config(vocab_size=261))
    with pytest.raises(UserError, match="no spare embedding row"):
        default_mask_id(load_target(tmp_path))


@pytest.mark.parametrize("keep", [10, 200, -4])
def test_truncated_file_is_named(tmp_path, keep):
    write_target(tmp_path, target_config())
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated"):
        load_target(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    stored = write_target(tmp_path, target_config())
    lost = stored.pop("model.layers.1.mlp.up_proj.weight")
    stored["model.layers.0.self_attn.q_proj.bias"] = lost
    stored["model.norm.weight"] = np.zeros(7, np.float32)
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(UserError) as caught:
        load_target(tmp_path)
    text = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in text
    assert "unknown tensors: model.layers.0.self_attn.q_proj.bias" in text
    assert "model.norm.weight is [7], config.json asks for [16]" in text


def test_missing_shard_and_broken_index_are_named(tmp_path):
    write_target(tmp_path, target_config(), shard_bytes=8000)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"no shard holds model\.extra"):
        load_target(tmp_path)
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    first.unlink()
    with pytest.raises(UserError, match=first.name):
        load_target(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(UserError, match="not readable JSON"):
        load_target(tmp_path)


def test_the_first_token_is_config_jsons_where_the_tokenizer_names_none(tmp_path):
    write_target(tmp_path, target_config())
    assert "bos_token" not in load_target(tmp_path).tokenizer.special_ids
    edit_json(tmp_path / "config.json", bos_token_id=256)
    assert load_target(tmp_path).tokenizer.special_ids["bos_token"] == 256
    edit_json(tmp_path / "tokenizer_config.json", bos_token="<|im_start|>")
    assert load_target(tmp_path).tokenizer.special_ids["bos_token"] == 257


def test_integer_tensors_are_refused(tmp_path):
    stored = write_target(tmp_path, target_config())
    save_file(stored | {"model.norm.weight": np.ones(16, np.int8)}, tmp_path / SINGLE)
    with pytest.raises(UserError, match=r"model\.norm\.weight \(I8\)"):
        load_target(tmp_path)
    with pytest.raises(UserError, match=r"model\.norm\.weight \(I8\)"):
        TensorFolder(tmp_path).view("model.norm.weight")


def test_harmless_extras_of_old_exporters(tmp_path):
    stored = write_target(tmp_path, target_config())
    head = {"lm_head.weight": stored["model.embed_tokens.weight"]}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(stored | head | old, tmp_path / SINGLE)
    assert "lm_head" not in load_target(tmp_path).params
    save_file(stored | {"lm_head.weight": head["lm_head.weight"] + 1}, tmp_path / SINGLE)
    with pytest.raises(UserError, match="tie_word_embeddings is true but"):
        load_target(tmp_path)


def test_tensors_are_compared_a_few_bytes_at_a_time():
    one = np.arange(50, dtype=np.float32).reshape(5, 10)
    assert _same_bits(one, one.copy(), block=16)
    for other in (one.T, one.astype(np.float16), np.where(one == 49, -one, one), one[:4]):
        assert not _same_bits(one, np.ascontiguousarray(other), block=16)
    assert not _same_bits(np.zeros(3), -np.zeros(3))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPELLINGS = {
    "default": [
        {"rope_theta": 1e6},
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}},
    ],
    "linear": [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}},
    ],
    "llama3": [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3}},
    ],
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_rope_spellings_give_equal_angles(kind):
    raw = {k: v for k, v in target_config().to_hf().items() if not k.startswith("rope")}
    positions = jnp.array([0, 1, 77, 4000])
    plain = rope_angles(RopeConfig(1e6), 8, positions)
    for spelling in SPELLINGS[kind]:
        rope = TargetConfig.from_hf(raw | spelling).rope
        assert rope == TargetConfig.from_hf(raw | SPELLINGS[kind][0]).rope and rope.kind == kind
        angles = rope_angles(rope, 8, positions)
        assert (np.asarray(angles) == np.asarray(plain)).all() == (kind == "default")
        # What is written out again holds every spelling, and reads back.
        written = rope.to_hf()
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e6
        for part in ("rope_parameters", "rope_scaling"):
            assert TargetConfig.from_hf(raw | {"rope_theta": 1e6, part: written[part]}).rope == rope


@pytest.mark.parametrize(
    "spelling, reason",
    [
        ({}, "names no rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "names no rope_theta"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta twice and differently"),
        (
            {
                "rope_theta": 1e6,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "factor twice and differently",
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_parameters": {"rope_type": "default"},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "rope_type twice and differently",
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", "type": "linear"}}, "keep one"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not implemented"),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' is not implemented"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "longrope"}}, "'longrope' is not implemented"),
        ({"rope_theta": 1e6, "rope_scaling": {"factor": 4.0}}, "names no rope_type"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_rope_that_is_missing_doubled_or_foreign_is_refused(spelling, reason):
    raw = {k: v for k, v in target_config().to_hf().items() if not k.startswith("rope")}
    with pytest.raises(UserError, match=reason):
        TargetConfig.from_hf(raw | spelling)


@pytest.mark.parametrize("axes", [(1, 2, 4), (2, 4, 1), (8, 1, 1)])
def test_a_mesh_gets_the_same_values_shard_by_shard(tmp_path, axes, monkeypatch):
    sizes = dict(num_heads=8, num_kv_heads=4, head_dim=4, vocab_size=264, tie_embeddings=False)
    stored = write_target(tmp_path, target_config(**sizes), ml_dtypes.bfloat16, shard_bytes=8000)
    made = []
    put = jax.device_put

    def counted(value, device):
        made.append(value.size)
        return put(value, device)

    monkeypatch.setattr(jax, "device_put", counted)
    mesh = make_mesh(*axes)
    loaded = load_target(tmp_path, jnp.float32, place=onto(mesh))
    monkeypatch.undo()
    assert loaded.fingerprint == load_target(tmp_path).fingerprint
    assert jax.tree.map(lambda a: a.sharding, loaded.params) == shardings(loaded.params, mesh)
    for name, value in _flat(loaded).items():
        np.testing.assert_array_equal(value, stored[name].astype(np.float32))
    # Never more than one device's slice at a time: of the largest tensor, what its axes leave of it.
    assert max(made) == stored["lm_head.weight"].size // (axes[1] * axes[2])
    assert len(made) == 8 * len(stored)


def test_an_axis_that_does_not_divide_is_named(tmp_path):
    write_target(tmp_path, target_config(vocab_size=265))
    with pytest.raises(UserError, match=r"embed_tokens.*265 is not divisible by the 8"):
        load_target(tmp_path, place=onto(make_mesh(fsdp=1, tensor=8, data=1)))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "mistral"}, "'mistral' is not implemented"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
    ],
)
def test_targets_that_are_not_implemented_are_refused_by_name(changes, reason):
    with pytest.raises(UserError, match=reason):
        TargetConfig.from_hf(target_config().to_hf() | changes)


def test_taps_outside_the_target_are_refused():
    config = target_config()
    for layer in (-1, 3):
        with pytest.raises(UserError, match=rf"\[{layer}\] lie outside the target's layers 0\.\.2"):
            jax.eval_shape(
                lambda tokens, at=layer: Target(config).init(jax.random.key(0), tokens, taps=(at,)),
                jnp.zeros((1, 2), jnp.int32),
            )
    for layer in (-1, 2):  # the last layer's output is only seen after the final norm
        with pytest.raises(UserError, match="target_layer_ids"):
            DrafterConfig.for_target(
                config, num_layers=1, block_size=2, mask_token_id=261, target_layer_ids=(layer,)
            )
    with pytest.raises(UserError, match="no 5 different default taps"):
        DrafterConfig.for_target(config, num_layers=5, block_size=2, mask_token_id=261)


def test_what_is_no_target(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        load_target(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_target(tmp_path)
    write_target(tmp_path, target_config(vocab_size=100))
    with pytest.raises(UserError, match="tokenizer knows 261 ids"):
        load_target(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a readable tokenizer"):
        load_target(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_target(tmp_path)
