"""Weights by a name: what was measured with others is told apart."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def fingerprint(params: Any) -> str:
    """Of a drafter's weights: the sums of every tensor, in fp32."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = jnp.asarray(leaf, jnp.float32)
        figures = np.asarray(jnp.stack([leaf.sum(), jnp.abs(leaf).sum(), jnp.square(leaf).sum()]))
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.shape}".encode() + figures.tobytes())
    return digest.hexdigest()[:16]


def digest(what: Any) -> str:
    """A name of whatever JSON can say."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def fingerprint_ids(ids: Sequence[int] | None) -> str | None:
    """Of a set of ids, in any order; None for none."""
    if ids is None:
        return None
    return hashlib.sha256(np.unique(np.asarray(ids, np.int64)).tobytes()).hexdigest()[:16]
