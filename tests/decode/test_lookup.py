"""Prompt lookup against a search by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dscout_jax.decode import NO_TOKEN, lookup_draft

W, LONGEST, S = 5, 3, 24


@jax.jit
def lookup(tokens_BxS, lengths_B):
    return lookup_draft(W, LONGEST)(None, SimpleNamespace(tokens=tokens_BxS, lengths=lengths_B))


def naive(text):
    """The longest match of the text's end, the latest of equals; then the text grows by what it proposes."""
    for n in range(LONGEST, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for k in range(W - 1):
                    grown.append(grown[end + k])
                return grown[len(text) :]
    return [NO_TOKEN] * (W - 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=S), min_size=2, max_size=2))
def test_lookup_equals_searching_by_hand(texts):
    tokens = np.full((2, S), 1, np.int32)  # what lies behind the anchor must not be seen
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    proposals = lookup(tokens, jnp.array([len(text) - 1 for text in texts]))
    assert proposals.ids.tolist() == [naive(text) for text in texts]
    np.testing.assert_array_equal(proposals.confidence, proposals.ids != NO_TOKEN)
