"""The accept and cut rule against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.decode import accept, mat, prefix_survival, tau

WIDTH, ROWS, STOPS = 5, 3, 2
_accept = jax.jit(accept)


def naive(proposals, choices, slots, stops, room, live):
    """Emits token by token until something says no."""
    if not live:
        return 0, False
    for emitted, choice in enumerate(choices, start=1):
        if choice in stops:
            return emitted, True
        if emitted in (room, slots, len(choices)) or proposals[emitted - 1] != choice:
            return emitted, False
    raise AssertionError("the last slot always ends the round")


ids = st.integers(0, 3)
row = st.tuples(
    st.lists(st.integers(-1, 3), min_size=WIDTH - 1, max_size=WIDTH - 1),
    st.lists(ids, min_size=WIDTH, max_size=WIDTH),
    st.integers(1, WIDTH),
    st.lists(st.integers(-1, 3).filter(lambda i: i != 0), min_size=STOPS, max_size=STOPS),
    st.integers(1, WIDTH + 2),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(row, min_size=ROWS, max_size=ROWS))
def test_accept_equals_emitting_token_by_token(rows):
    columns = [jnp.array(c) for c in zip(*rows, strict=True)]
    commit = _accept(*columns)
    expected = [naive(*r) for r in rows]
    assert list(zip(commit.count.tolist(), commit.stopped.tolist(), strict=True)) == expected


def test_no_proposal_is_ever_accepted_without_slots():
    choices = jnp.array([[1, 2, 3]])
    one, room, live = jnp.array([1]), jnp.array([9]), jnp.array([True])
    assert accept(choices[:, :-1], choices, one, jnp.array([[-1]]), room, live).count.tolist() == [1]


def test_figures_of_acceptance():
    answers = [[2, 0], [3], []]
    assert mat(answers) == 1 + 5 / 3
    assert tau(answers) == np.mean([2.0, 4.0])
    survival = prefix_survival(answers, 5)
    np.testing.assert_allclose(survival, [2 / 3, 2 / 3, 1 / 3, 0])
    assert np.isclose(1 + sum(survival), mat(answers))
    assert mat([]) == tau([]) == 1.0
