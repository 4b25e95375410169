"""A DFlash drafter in plain PyTorch, written from the format's description alone: the oracle of ours.

It reads a drafter's folder as an engine would (config.json, safetensors) and decodes beside a transformers
target. Clarity over speed: nothing is cached but the target's keys and values.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


def rotary(positions: torch.Tensor, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, dim] of half-rotation RoPE at absolute positions [T], in fp32."""
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [heads, T, dim] turned by the angles, in the type it came in."""
    half = x.shape[-1] // 2
    return (x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        width, self.dim = c["hidden_size"], c["head_dim"]
        self.heads, self.groups = c["num_attention_heads"], c["num_key_value_heads"]
        self.theta = c["rope_theta"]
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)
        self.q_norm = RMSNorm(self.dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, c["rms_norm_eps"])

    def forward(self, h, ctx, start: int):
        """h [W, D] at start..start+W-1 sees ctx [start, D] at 0..start-1 and all of itself."""
        W = len(h)
        both = torch.cat([ctx, h])
        cos, sin = rotary(torch.arange(start + W), self.dim, self.theta)
        q = self.q_norm(self.q_proj(h).view(W, self.heads, self.dim)).transpose(0, 1)
        k = self.k_norm(self.k_proj(both).view(start + W, self.groups, self.dim)).transpose(0, 1)
        v = self.v_proj(both).view(start + W, self.groups, self.dim).transpose(0, 1)
        q, k = rotate(q, cos[start:], sin[start:]), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=0) for t in (k, v))
        weights = torch.softmax(q @ k.transpose(1, 2) * self.dim**-0.5, dim=-1)
        return self.o_proj((weights @ v).transpose(0, 1).reshape(W, -1))


class MLP(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        width, inner = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, ctx, start):
        x = x + self.self_attn(self.input_layernorm(x), ctx, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """A drafter out of its folder; every stored tensor has its place, and every place its tensor."""

    def __init__(self, folder: Path):
        super().__init__()
        c = json.loads((folder / "config.json").read_text())
        width, special = c["hidden_size"], c["dflash_config"]
        self.block_size, self.mask = c["block_size"], special["mask_token_id"]
        self.taps = special["target_layer_ids"]
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(width, c["rms_norm_eps"]) for _ in range(2))
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        self.float().eval()

    def forward(self, features, embedded):
        """features [start, C * D] of positions 0..start-1; embedded [W, D] of [anchor, MASK, ...]."""
        ctx = self.hidden_norm(self.fc(features))
        x = embedded
        for layer in self.layers:
            x = layer(x, ctx, len(features))
        return self.norm(x)


def tapped(out, taps) -> torch.Tensor:
    """The outputs of the tapped layers [T, C * D]; hidden_states[0] is the embedding."""
    return torch.cat([out.hidden_states[i + 1][0] for i in taps], dim=-1)


@torch.no_grad()
def draft(target, drafter: DFlash, features, anchor: int, head=None):
    """Hidden states and logits [W, ...] of a block after the positions of `features`; head None: all rows."""
    ids = torch.tensor([anchor] + [drafter.mask] * (drafter.block_size - 1))
    hidden = drafter(features, target.get_input_embeddings()(ids))
    return hidden, F.linear(hidden, target.get_output_embeddings().weight if head is None else head)


@torch.no_grad()
def decode(target, drafter: DFlash, prompt: list[int], max_new_tokens: int, ids=None, head=None):
    """Greedy speculative decoding. Returns the tokens and the drafts accepted in each round.

    ids [R]: what drafts are chosen from, and head [R, D] the head's rows for them; None: the vocabulary.
    """
    out = target(torch.tensor([prompt]), output_hidden_states=True, use_cache=True)
    cache, features = out.past_key_values, tapped(out, drafter.taps)
    tokens, accepted = [int(out.logits[0, -1].argmax())], []
    while len(tokens) < max_new_tokens:
        best = draft(target, drafter, features, tokens[-1], head)[1][1:].argmax(-1)
        drafts = (best if ids is None else ids[best]).tolist()
        block = torch.tensor([[tokens[-1], *drafts]])
        out = target(block, past_key_values=cache, output_hidden_states=True, use_cache=True)
        choices = out.logits[0].argmax(-1).tolist()
        count = 0
        while count < len(drafts) and drafts[count] == choices[count]:
            count += 1
        # The bonus is the target's own; like every emitted token it counts against the budget.
        count = min(count, max_new_tokens - len(tokens) - 1)
        tokens += choices[: count + 1]
        accepted.append(count)
        features = torch.cat([features, tapped(out, drafter.taps)[: count + 1]])
        if rejected := len(block[0]) - count - 1:
            cache.crop(-rejected)
    return tokens, accepted
