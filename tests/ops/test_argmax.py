"""The two-pass argmax is argmax, ties included."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax import ops


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=6, max_size=6))
def test_first_of_equals(values):
    x = np.array(values, np.float32).reshape(2, 3)
    np.testing.assert_array_equal(ops.argmax(jnp.asarray(x)), x.argmax(-1))


def test_infinities_and_nan_stay_inside():
    rows = jnp.array([[-jnp.inf, -jnp.inf], [jnp.inf, 0.0], [jnp.nan, 1.0]])
    assert ops.argmax(rows).tolist()[:2] == [0, 0] and 0 <= int(ops.argmax(rows)[2]) < 2
