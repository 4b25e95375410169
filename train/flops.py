"""Floating-point operations of a training step, from shapes, and the time that a chip's limits allow it.

XLA's own count takes a scanned layer once, hence the formulas. A product of [M, I] and [I, O] counts 2 M I O;
the products of a backward pass count twice the forward's, once where one side is frozen.
"""

from typing import NamedTuple

from dscout_jax.config import DrafterConfig, TargetConfig
from train.settings import TrainSettings


class Chip(NamedTuple):
    """Published limits of one chip: bytes, bf16 operations/s, bytes/s of memory, bytes/s that it sends."""

    hbm_bytes: int
    flops: float
    hbm_rate: float
    ici_rate: float


CHIPS: dict[str, Chip] = {
    "v5e": Chip(16 * 2**30, 197e12, 819e9, 200e9),
    "v5p": Chip(95 * 2**30, 459e12, 2765e9, 600e9),
    "v6e": Chip(32 * 2**30, 918e12, 1638e9, 400e9),
}

# bf16 operations a second, without sparsity, by the name that jax gives a device.
PEAKS: dict[str, float] = {
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), CHIPS["v5e"].flops),
    **dict.fromkeys(("TPU v5", "TPU v5p"), CHIPS["v5p"].flops),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), CHIPS["v6e"].flops),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
}

# Bytes of memory traffic for each fp32 score or logit: written, read for the maximum and the sum, read again
# for the probabilities, which are written and read in bf16; backward, the same once more and the cotangents.
_FORWARD, _BACKWARD = 16, 24


class Flops(NamedTuple):
    """Of a whole step over the global batch.

    needed: what the maths asks for, masked scores and recomputation left out: the basis of MFU.
    executed: what the program does. traffic: bytes of scores and logits through the chips' memories.
    parts: needed, by part.
    """

    needed: float
    executed: float
    traffic: float
    parts: dict[str, float]


def layer_weights(c: TargetConfig | DrafterConfig) -> int:
    """Matrix elements of one decoder layer."""
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return c.hidden_size * (heads + 3 * c.intermediate_size)


def step_flops(settings: TrainSettings, target: TargetConfig, drafter: DrafterConfig, used: int) -> Flops:
    """Operations of one step.

    Args:
        used: layers of the target that are run.
    """
    c, S, L = drafter, settings.seq_len, drafter.num_layers
    law, N = settings.objective.horizon, settings.anchors
    groups = [(width, (blocks.stop - blocks.start) * width) for width, blocks in law.groups(N)]
    T = sum(slots for _, slots in groups)
    width = c.num_heads * c.head_dim
    rows = int((law.spread(N) - 1).sum())
    sees = settings.objective.sees_target

    target_layers = 2.0 * S * used * layer_weights(target)
    blocks = 2.0 * T * L * layer_weights(c)
    fc = 2.0 * S * len(c.target_layer_ids) * c.hidden_size**2 if c.fusion == "fc" else 0.0
    context = 2.0 * S * L * 2 * c.hidden_size * c.num_kv_heads * c.head_dim
    head = 2.0 * rows * c.hidden_size * c.vocab_size
    # Dense; of a causal square half is needed, and a block's anchor stands in the middle on average.
    causal = 4.0 * S * S * target.num_heads * target.head_dim * used
    attention, needed_attention = (
        sum(4.0 * slots * L * width * (s + own) for own, slots in groups) for s in (S, S / 2)
    )

    parts = {
        "target": target_layers + causal / 2,
        "drafter": 3 * blocks + 2 * fc + 3 * context,
        "block attention": 3 * needed_attention,
        "head": (3 if sees else 2) * head,
    }
    layer_again, all_again = settings.remat != "none", settings.anchor_chunk is not None
    again = layer_again + all_again
    attention_forwards = 1 + (settings.attention_chunk is not None or layer_again) + all_again
    attention_forwards += settings.remat == "all"
    executed = target_layers + causal + (3 + again) * blocks + 2 * fc + 3 * context
    executed += (attention_forwards + 2) * attention + (3 if sees else 2) * head
    scores = attention / (4 * c.head_dim)
    traffic = causal / (4 * target.head_dim) * _FORWARD
    traffic += scores * (_FORWARD * attention_forwards + _BACKWARD)
    traffic += rows * c.vocab_size * (_BACKWARD + (_FORWARD if sees else 0))
    B = settings.batch
    return Flops(B * sum(parts.values()), B * executed, B * traffic, {k: B * v for k, v in parts.items()})


class Roofline(NamedTuple):
    """Seconds of a step: products at peak, scores through memory, collectives; and what follows.

    step: products and scores after each other, or the collectives where those take longer.
    """

    products: float
    scores: float
    network: float
    step: float
    mfu: float
    tokens_a_day: float


def roofline(flops: Flops, chip: Chip, chips: int, ici_bytes: float, tokens: int) -> Roofline:
    """The least time that a step of `tokens` can take; `ici_bytes` is what one chip sends."""
    products, scores = flops.executed / chips / chip.flops, flops.traffic / chips / chip.hbm_rate
    network = ici_bytes / chip.ici_rate
    step = max(products + scores, network)
    mfu = flops.needed / chips / chip.flops / step
    return Roofline(products, scores, network, step, mfu, tokens / step * 86400)
