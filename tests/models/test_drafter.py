"""What a block of the drafter may see: its context strictly before the anchor, its own block both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config import DrafterConfig, RopeConfig
from dscout_jax.models import Drafter

CONFIG = DrafterConfig(32, 16, 24, 2, 2, 1, 8, 1e-6, RopeConfig(1e4), 64, 4, 31, (0, 1), 4)
S, W, D = 10, CONFIG.block_size, CONFIG.hidden_size
ANCHORS = jnp.array([[2, 5, 3, 9]])


@pytest.fixture(scope="module")
def params():
    shapes = (jnp.zeros((1, 2, 2 * D)), jnp.zeros((1, 1, W, D)), jnp.zeros((1, 1), jnp.int32))
    made = Drafter(CONFIG).init(jax.random.key(0), *shapes)["params"]
    # Ten times the initialiser's size: attention is then far from uniform.
    return jax.tree.map(lambda w: w * 10 if w.ndim == 2 else w, made)


@pytest.fixture(scope="module")
def inputs():
    taps, x = jax.random.split(jax.random.key(1))
    return jax.random.normal(taps, (1, S, 2 * D)), jax.random.normal(x, (1, ANCHORS.shape[1], W, D))


def draft(params, taps, x, anchors=ANCHORS, horizons=None, chunk=None):
    return Drafter(CONFIG).apply({"params": params}, taps, x, anchors, horizons, chunk)


@pytest.mark.parametrize("chunk", [None, 2])
def test_no_gradient_reaches_features_at_or_after_the_anchor(params, inputs, chunk):
    taps, x = inputs
    jacobian = jax.jacrev(lambda t: jnp.square(draft(params, t, x, chunk=chunk)).sum((0, 2, 3)))(taps)
    felt = np.abs(np.asarray(jacobian)).sum((1, 3))  # [blocks, S]
    before = np.arange(S) < np.asarray(ANCHORS)[0][:, None]
    np.testing.assert_array_equal(felt > 0, before)


def test_blocks_do_not_see_one_another(params, inputs):
    taps, x = inputs
    together = draft(params, taps, x)
    for n in range(ANCHORS.shape[1]):
        alone = draft(params, taps, x[:, n : n + 1], ANCHORS[:, n : n + 1])
        np.testing.assert_allclose(together[:, n : n + 1], alone, atol=1e-5)


def test_a_block_sees_itself_in_both_directions(params, inputs):
    taps, x = inputs
    before, after = draft(params, taps, x), draft(params, taps, x.at[:, 0, W - 1].add(1.0))
    moved = np.abs(np.asarray(after - before)).max(-1)[0]  # [blocks, W]
    assert (moved[0] > 1e-3).all() and (moved[1:] == 0).all()


@pytest.mark.parametrize("horizon", range(2, W + 1))
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_horizon_is_a_true_block_of_that_size(params, inputs, horizon, chunk):
    taps, x = inputs
    # Other blocks of the batch keep other horizons.
    horizons = jnp.array([[horizon, W, horizon, 2]])
    inside = draft(params, taps, x, horizons=horizons, chunk=chunk)
    for n in (0, 2):
        block = x[:, n : n + 1, :horizon]
        true = draft(params, taps, block, ANCHORS[:, n : n + 1])
        np.testing.assert_allclose(inside[:, n : n + 1, :horizon], true, atol=1e-6)
    full = draft(params, taps, x)
    assert horizon == W or np.abs(np.asarray(full - inside)[0, 0, :horizon]).max() > 1e-3


def test_context_computed_ahead_equals_context_computed_along(params, inputs):
    taps, x = inputs
    drafter, variables = Drafter(CONFIG), {"params": params}
    ctx = drafter.apply(variables, taps, method="context")
    # In two pieces, as decoding extends it.
    pieces = [
        drafter.apply(variables, ctx[:, a:b], jnp.arange(a, b)[None], method="context_kv")
        for a, b in ((0, 4), (4, S))
    ]
    cache = jax.tree.map(lambda *p: jnp.concatenate(p, axis=2), *pieces)
    ahead = drafter.apply(variables, x, ANCHORS, cache, method="block")
    np.testing.assert_allclose(ahead, draft(params, taps, x), atol=1e-5)
