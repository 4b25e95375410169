"""The target for training on large shapes: its layers stacked and scanned, for features only."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.config import TargetConfig
from dscout_jax.models.layers import RMSNorm
from dscout_jax.models.target import Block, Embedding, TargetOutput


class StackedTarget(nn.Module):
    """The features of `Target`, without its cache, from parameters that `stack_layers` made.

    One layer is compiled in place of all, and only one layer's weights are gathered at a time. For decoding
    on a CPU it would be slower: a scan copies each layer's weights.
    """

    config: TargetConfig
    num_layers: int
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, *, taps: Sequence[int]) -> TargetOutput:
        """Hidden state and taps as `Target` gives them; `hidden` is None where layers were left out.

        The taps are kept in the scan's carry: a scan's stacked outputs would hold every layer's.
        """
        c, C = self.config, len(taps)
        positions = jnp.broadcast_to(jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32), tokens_BxT.shape)
        angles = ops.rope_angles(c.rope, c.head_dim, positions)
        x = Embedding(c.vocab_size, c.hidden_size, name="embed_tokens")(tokens_BxT).astype(self.dtype)
        # Layer -> its place among the taps; an untapped layer's lies outside and is dropped.
        places = [taps.index(i) if i in taps else C for i in range(self.num_layers)]
        kept = jnp.zeros((C, *x.shape), x.dtype)

        def layer(block, carry, place):
            x, kept = carry
            x, _ = block(x, angles, positions, None)
            return (x, kept.at[place].set(x, mode="drop")), None

        scan = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers
        )
        (x, kept), _ = scan(Block(c, self.dtype, name="layers"), (x, kept), jnp.array(places, jnp.int32))
        hidden = None
        if self.num_layers == c.num_layers:
            hidden = RMSNorm(c.rms_norm_eps, name="norm")(x)
        return TargetOutput(hidden, kept.transpose(1, 2, 0, 3).reshape(*x.shape[:-1], -1), None)


def stack_layers(params: dict[str, Any], count: int) -> dict[str, Any]:
    """Parameters of `StackedTarget` from those of `Target`: the first `count` layers, along a new axis."""
    layers = [params[f"layers_{i}"] for i in range(count)]
    rest = {name: params[name] for name in ("embed_tokens", "norm")}
    return rest | {"layers": jax.tree.map(lambda *w: jnp.stack(w), *layers)}
