"""The search for a peak."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dscout_jax.errors import UserError
from infer.search import peak


@given(st.integers(1, 60), st.data())
def test_finds_the_peak_of_any_curve_with_one(n, data):
    top = data.draw(st.integers(0, n - 1))
    rises = data.draw(st.lists(st.floats(0.01, 5), min_size=n, max_size=n))
    curve = np.cumsum([r if i <= top else -r for i, r in enumerate(rises)])
    asked = []

    def measure(point):
        asked.append(point)
        return float(curve[point - 1])

    found = peak(measure, range(1, n + 1))
    assert found.best == top + 1 and found.values[found.best] == curve[top]
    assert len(asked) == len(set(asked)) == len(found.values)
    assert len(asked) <= np.log(n + 2) / np.log((1 + 5**0.5) / 2) + 1
    assert str(found.best) in found.reason


@given(st.integers(1, 40), st.integers(1, 3), st.data())
def test_a_point_beside_the_peak_takes_fewer(n, within, data):
    top = data.draw(st.integers(0, n - 1))
    rises = data.draw(st.lists(st.floats(0.01, 5), min_size=n, max_size=n))
    curve = np.cumsum([r if i <= top else -r for i, r in enumerate(rises)])
    found = peak(lambda point: float(curve[point - 1]), range(1, n + 1), within)
    assert abs(found.best - (top + 1)) <= within
    assert len(found.values) <= np.log(n / (within + 1) + 2) / np.log((1 + 5**0.5) / 2) + 1
    assert f"of {n}" in found.reason


def throughput(depth, mat, saturation, step):
    """As drafters behave: MAT saturates with depth, the time of a round grows by a step a layer."""
    return (1 + mat * (1 - np.exp(-depth / saturation))) / (1 + step * depth)


@pytest.mark.parametrize("seed", range(20))
def test_noise_costs_one_step_at_the_most_and_half_of_the_depths_are_spared(seed):
    rng = np.random.default_rng(seed)
    depths = range(1, 13)
    shape = rng.uniform(2, 5), rng.uniform(1, 3), rng.uniform(0.05, 0.15)
    curve = {d: throughput(d, *shape) for d in depths}
    noise = {d: rng.normal(0, 0.002) for d in depths}
    found = peak(lambda d: curve[d] * (1 + noise[d]), depths)
    best = max(curve, key=curve.get)
    assert len(found.values) < len(depths) / 2
    assert abs(found.best - best) <= 1
    assert curve[found.best] > 0.98 * curve[best]


def test_eight_depths_and_three_percent_of_noise():
    """As `dscout tune depth` searches by default: three are trained.

    Where the curve's top is flatter than the noise the depth found may lie farther off, and is as good.
    """
    rng = np.random.default_rng(0)
    depths, steps = range(1, 9), []
    for _ in range(200):
        shape = rng.uniform(2, 5), rng.uniform(1, 3), rng.uniform(0.05, 0.15)
        curve = {d: throughput(d, *shape) for d in depths}
        noise = {d: rng.normal(0, 0.025) for d in depths}
        found = peak(lambda d, c=curve, e=noise: c[d] * (1 + e[d]), depths, within=1)
        best = max(curve, key=curve.get)
        assert len(found.values) < len(depths) / 2
        steps.append(abs(found.best - best))
        assert curve[found.best] > 0.9 * curve[best]
    assert np.mean(np.array(steps) <= 1) > 0.8


def test_no_points_and_unordered_ones_are_refused():
    for points in ([], [2, 1], [1, 1]):
        with pytest.raises(UserError, match="ascend"):
            peak(float, points)
    with pytest.raises(UserError, match="within -1"):
        peak(float, [1], -1)
