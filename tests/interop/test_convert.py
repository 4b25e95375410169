"""Targets to Orbax and back: the folder that comes out is the one that went in, file for file."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interop_tools import target_config, write_target
from safetensors.numpy import load_file, save_file

from dscout_jax.cli import main
from dscout_jax.errors import UserError
from dscout_jax.interop import gguf, load_target, names
from dscout_jax.sharding import make_mesh, shardings
from train.convert import convert, is_converted, open_target, open_words


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 8000])
def test_there_and_back_is_the_same_folder(tmp_path, dtype, shard_bytes):
    source = tmp_path / "source"
    write_target(source, target_config(tie_embeddings=False), dtype, shard_bytes=shard_bytes)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    convert(source, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    assert _files(tmp_path / "back") == _files(source)
    assert load_target(tmp_path / "back").fingerprint == load_target(source).fingerprint


def test_what_loading_drops_comes_back_too(tmp_path):
    source = tmp_path / "source"
    stored = write_target(source, target_config())
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(4, dtype=np.float32)
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    assert _files(tmp_path / "back") == _files(source)


def test_a_converted_target_opens_as_the_folder_does(tmp_path):
    write_target(tmp_path / "source", target_config(num_kv_heads=4), ml_dtypes.bfloat16)
    convert(tmp_path / "source", tmp_path / "orbax")
    mesh, one = make_mesh(2, 2, 2), make_mesh(1, 1, 1, jax.devices()[:1])
    want = load_target(tmp_path / "source", jnp.float32)
    for source in ("source", "orbax"):
        words = open_words(tmp_path / source)
        assert (words.config, words.name, words.params) == (want.config, want.name, {})
    for opened in (
        open_target(tmp_path / "source", jnp.float32),
        open_target(tmp_path / "orbax", jnp.float32),
        open_target(tmp_path / "orbax", jnp.float32, mesh=one),
        open_target(tmp_path / "source", jnp.float32, mesh=mesh),
        open_target(tmp_path / "orbax", jnp.float32, mesh=mesh),
    ):
        assert (opened.config, opened.fingerprint) == (want.config, want.fingerprint)
        assert opened.tokenizer.stop_ids == want.tokenizer.stop_ids
        jax.tree.map(np.testing.assert_array_equal, opened.params, want.params)
        assert {leaf.dtype for leaf in jax.tree.leaves(opened.params)} == {jnp.dtype(jnp.float32)}
    assert jax.tree.map(lambda a: a.sharding, opened.params) == shardings(opened.params, mesh)


def test_damage_is_named_and_nothing_is_overwritten(tmp_path):
    write_target(tmp_path / "source", target_config())
    convert(tmp_path / "source", tmp_path / "orbax")
    with pytest.raises(UserError, match="orbax exists"):
        convert(tmp_path / "source", tmp_path / "orbax")
    with pytest.raises(UserError, match="is an Orbax checkpoint"):
        load_target(tmp_path / "orbax")
    about = json.loads((tmp_path / "orbax" / "target.json").read_text())
    about["crc32"]["norm/weight"] ^= 1  # what another bit in the file would look like
    (tmp_path / "orbax" / "target.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"damaged at norm/weight \(checksum"):
        convert(tmp_path / "orbax", tmp_path / "back")
    with pytest.raises(UserError, match=r"damaged at norm/weight \(checksum"):
        open_target(tmp_path / "orbax", mesh=make_mesh(1, 1, 1, jax.devices()[:1]))
    for file in (tmp_path / "orbax" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(UserError, match="params is damaged"):
        open_target(tmp_path / "orbax")
    (tmp_path / "orbax" / "target.json").unlink()
    assert not is_converted(tmp_path / "orbax")
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        convert(tmp_path / "orbax", tmp_path / "back")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["orbax", "source"]


def test_relative_paths_and_the_home_folder(tmp_path, monkeypatch):
    write_target(tmp_path / "source", target_config())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    convert("source", "~/deep/orbax")
    assert open_target("~/deep/orbax").name == open_words("source").name == "source"
    monkeypatch.chdir(tmp_path / "home" / "deep")
    convert("orbax", "../back")
    assert _files(tmp_path / "home" / "back") == _files(tmp_path / "source")


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    write_target(tmp_path / "source", target_config())

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr("train.convert.json.dumps", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(tmp_path / "source", tmp_path / "orbax")
    assert [place.name for place in tmp_path.iterdir()] == ["source"]


def test_command(tmp_path):
    source = tmp_path / "source"
    write_target(source, target_config())
    main(["convert", str(source), str(tmp_path / "orbax")])
    main(["convert", str(tmp_path / "orbax"), str(tmp_path / "back")])
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == {
        names.to_hf(path) for path in names.target_shapes(target_config())
    }
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(tmp_path / "absent"), str(tmp_path / "other")])
    assert stop.value.code == 2


def test_the_embedded_target_is_a_folder_like_any(tmp_path, monkeypatch):
    write_target(tmp_path / "cached", target_config())
    monkeypatch.setattr(gguf, "embedded_folder", lambda cache_dir: tmp_path / "cached")
    convert(gguf.NAME, tmp_path / "orbax")
    assert open_target(tmp_path / "orbax").name == gguf.NAME
    convert(tmp_path / "orbax", tmp_path / "back")
    assert _files(tmp_path / "back") == _files(tmp_path / "cached")
