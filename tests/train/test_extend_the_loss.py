"""The example of docs/extend-the-loss.md runs, and its weights reach the loss."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.objective import factorized_loss, sample_blocks


def test_the_example_trains():
    text = (Path(__file__).parents[2] / "docs" / "extend-the-loss.md").read_text()
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S).group(1), scope)
    objective = scope["objective"]
    blocks = sample_blocks(
        jax.random.key(0),
        jnp.arange(60).reshape(2, 30),
        jnp.ones((2, 30), bool),
        jnp.arange(2),
        num_anchors=4,
        block_size=8,
        mask_token_id=63,
        horizon=objective.horizon,
        unmask=objective.unmask,
    )
    hidden = jax.random.normal(jax.random.key(1), (2, 4, 8, 16))
    sums = factorized_loss(objective, hidden, jax.random.normal(jax.random.key(2), (64, 16)), blocks)
    assert np.isfinite(sums.numerator)
    assert 0 < sums.denominator < blocks.mask.sum()
