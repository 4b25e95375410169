"""A training step as plain PyTorch writes it: one dense mask over all blocks, all logits at once."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dscout_jax.config import DrafterConfig
from dscout_jax.interop import names
from dscout_jax.objective.inclusion import Blocks
from train.settings import TrainSettings
from train.step import Frozen


def make_torch_step(
    config: DrafterConfig,
    params: dict[str, Any],
    frozen: Frozen,
    taps: Any,
    blocks: Blocks,
    settings: TrainSettings,
) -> Callable[[], float]:
    """A function that takes one step and returns its loss: DFlash's, hard cross-entropy with its decay.

    Args:
        params, frozen, taps, blocks: jax arrays of one sequence; the weights are copied.
    """
    import torch
    import torch.nn.functional as F

    c = config
    weights = {
        path: torch.tensor(np.array(value), requires_grad=True)
        for path, value in names.flatten(params).items()
    }
    table, head, taps = (
        torch.tensor(np.array(x)) for x in (frozen.embed_tokens["weight"], frozen.head, taps[0])
    )
    anchors, inputs, labels, mask = (
        torch.tensor(np.array(x[0])) for x in (blocks.anchors, blocks.inputs, blocks.labels, blocks.mask)
    )
    S, (N, W) = len(taps), inputs.shape
    optimizer = torch.optim.Adam(weights.values(), lr=settings.learning_rate)
    # DFlash's decay at the block size, as `objective.weighting.decay` has it.
    gamma = {16: 7.0, 10: 5.0, 8: 4.0}.get(W, max(1.0, 7.0 * W / 16))
    decay = torch.exp(-(torch.arange(W) - 1.0) / gamma)
    block = torch.arange(N * W) // W
    sees_context = torch.arange(S)[None] < anchors.repeat_interleave(W)[:, None]
    sees = torch.cat([sees_context, block[:, None] == block[None]], dim=1)
    positions = (anchors[:, None] + torch.arange(W)).reshape(-1)

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * weights[name]

    def turned(x, at):
        """x [T, heads, K] by half-rotation RoPE."""
        K = c.head_dim
        angles = torch.outer(at.float(), c.rope.theta ** -(torch.arange(0, K, 2).float() / K))
        cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., K // 2 :], x[..., : K // 2]], -1) * sin

    def attention(h, ctx, name):
        def heads(x, which, count):
            return F.linear(x, weights[f"{name}/{which}/weight"]).view(len(x), count, c.head_dim)

        both, at = torch.cat([ctx, h]), torch.cat([torch.arange(S), positions])
        q = turned(norm(heads(h, "q_proj", c.num_heads), f"{name}/q_norm/weight"), positions)
        k = turned(norm(heads(both, "k_proj", c.num_kv_heads), f"{name}/k_norm/weight"), at)
        v = heads(both, "v_proj", c.num_kv_heads)
        repeat = c.num_heads // c.num_kv_heads
        k, v = (x.repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (k, v))
        scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * c.head_dim**-0.5
        out = torch.softmax(scores.masked_fill(~sees, float("-inf")), dim=-1) @ v
        return F.linear(out.transpose(0, 1).reshape(len(h), -1), weights[f"{name}/o_proj/weight"])

    def loss():
        ctx = norm(F.linear(taps, weights["fc/weight"]), "hidden_norm/weight")
        x = table[inputs.reshape(-1)]
        for i in range(c.num_layers):
            name = f"layers_{i}"
            x = x + attention(norm(x, f"{name}/input_layernorm/weight"), ctx, f"{name}/self_attn")
            h = norm(x, f"{name}/post_attention_layernorm/weight")
            gate, up, down = (weights[f"{name}/mlp/{p}_proj/weight"] for p in ("gate", "up", "down"))
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        logits = F.linear(norm(x, "norm/weight"), head)
        each = F.cross_entropy(logits, labels.reshape(-1).long(), reduction="none").view(N, W)
        weight = mask * decay
        return (weight * each).sum() / weight.sum()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip)
        optimizer.step()
        return float(found.detach())

    return step
