"""Expected inclusion and weights of a recipe, against what they must be by hand."""

import numpy as np

from dscout_jax.objective import Objective, dflash, dpace, inclusion, weighting
from dscout_jax.objective.expect import expected_slots


def test_fixed_horizons_and_decay_by_hand():
    got = expected_slots(dflash(4), block_size=4, num_anchors=8, answer_tokens=200, draws=4000)
    # A block loses slot k when its anchor is one of the last k positions but the last, of 199 legal ones.
    np.testing.assert_allclose(got.included, [0, 8, 8 * 198 / 199, 8 * 197 / 199], rtol=1e-3)
    weights = np.exp(-np.arange(3) / weighting_gamma())
    np.testing.assert_allclose(got.weight[1:], weights, rtol=1e-5)
    np.testing.assert_allclose(got.share.sum(), 1.0, rtol=1e-6)


def weighting_gamma() -> float:
    return max(1.0, 7.0 * 4 / 16)


def test_the_horizons_share_the_blocks():
    law = inclusion.mixed((2, 4))
    objective = Objective("mixed", law, weighting=weighting.awl(eps=0.0))
    options = dict(block_size=4, num_anchors=20, draws=2000, acceptance=0.5)
    got = expected_slots(objective, **options)
    # Half of the blocks have a slot 3, and few of them stand too near the answer's end.
    assert got.included[1] == 20 and 9.7 < got.included[3] < 10
    np.testing.assert_allclose(got.weight[1:], [1.0, 0.5, 0.25], rtol=1e-5)


def test_dpace_weights_fall_by_the_chance_to_get_there():
    got = expected_slots(dpace(3), block_size=3, num_anchors=4, answer_tokens=300, acceptance=0.6)
    a = 0.5 * 0.6 + 0.5
    np.testing.assert_allclose(got.weight[1:], [a + a * a, a * a], rtol=0.02)
