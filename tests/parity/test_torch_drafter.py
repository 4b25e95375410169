"""An exported drafter means the same in PyTorch: hidden states, logits, and every round of decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config import DrafterConfig
from dscout_jax.decode import Decoder
from dscout_jax.interop import load_drafter, load_target, names, save_drafter
from dscout_jax.models import Drafter, Target, embed, target_head
from dscout_jax.ops import head_logits

torch = pytest.importorskip("torch", reason="the oracle is PyTorch: install the parity extra")
reference = pytest.importorskip("torch_dflash")
tiny = pytest.importorskip("torch_tiny")

# So few words that a drafter of random weights is right now and then.
VOCAB, MASK, BLOCK = 8, 7, 5


def _random_drafter(config: DrafterConfig) -> dict:
    """Weights of a size at which attention is far from uniform, and norms that are not ones."""
    rng = np.random.default_rng(0)
    flat = {
        path: rng.normal(0, 0.2, shape) if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)
        for path, shape in names.drafter_shapes(config).items()
    }
    return names.nest(flat)


def _pair(root, kind, spread):
    """A target and a drafter on both sides, ours loaded from what each side saved."""
    model = tiny.target(kind, tied=kind == "qwen3", vocab_size=VOCAB, spread=spread)
    model.save_pretrained(root / "target")
    tiny.write_tokenizer(root / "target")
    target = load_target(root / "target", jnp.float32)
    config = DrafterConfig.for_target(
        target.config, num_layers=2, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=(2, 0)
    )
    save_drafter(root / "drafter", config, _random_drafter(config), dtype=jnp.float32)
    return model, reference.DFlash(root / "drafter"), target, *load_drafter(root / "drafter")


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_block_has_the_same_hidden_states_and_logits(tmp_path, kind):
    model, drafter, target, config, params = _pair(tmp_path, kind, spread=0.2)
    ids = np.random.default_rng(1).integers(0, VOCAB - 1, 24).tolist()
    with torch.no_grad():
        features = reference.tapped(model(torch.tensor([ids]), output_hidden_states=True), drafter.taps)
    anchors = [1, 9, 23]

    @jax.jit
    def ours(params, target_params, tokens, x):
        taps = (
            Target(target.config).apply({"params": target_params}, tokens, taps=config.target_layer_ids).taps
        )
        hidden = Drafter(config).apply({"params": params}, taps, x, jnp.array([anchors]))
        return taps[0], hidden[0], head_logits(hidden[0], target_head(target_params))

    blocks = np.full((1, len(anchors), BLOCK), MASK)
    blocks[0, :, 0] = [ids[at] for at in anchors]
    taps, hidden, logits = ours(
        params, target.params, jnp.array([ids]), embed(target.params, jnp.asarray(blocks))
    )
    np.testing.assert_allclose(taps, features, atol=1e-4)
    for block, at in enumerate(anchors):
        want_hidden, want_logits = reference.draft(model, drafter, features[:at], ids[at])
        np.testing.assert_allclose(hidden[block], want_hidden, atol=1e-4)
        np.testing.assert_allclose(logits[block], want_logits, atol=1e-4)
        # The same measure on the block one token later: an anchor off by one could not pass.
        assert (
            np.abs(
                hidden[block] - reference.draft(model, drafter, features[: at + 1], ids[at])[0].numpy()
            ).max()
            > 1e-2
        )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_every_round_of_decoding_accepts_the_same(tmp_path, kind):
    # Such weights keep the argmax wandering; smaller ones settle on one token.
    model, drafter, target, config, params = _pair(tmp_path, kind, spread=1.0)
    prompt = [3, 1, 4, 1, 5]
    tokens, accepted = reference.decode(model, drafter, prompt, 200)
    decoder = Decoder(Target(target.config), target.params, Drafter(config), params)
    (ours,) = decoder.generate([prompt], 200)
    assert ours.tokens == tokens and ours.accepted == accepted
    assert len(tokens) == 200 and len(set(accepted)) > 2, "rounds must differ for this to show anything"
