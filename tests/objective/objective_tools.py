"""Blocks, scores and a small loss to try objectives on, and weights by naive loops."""

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.objective import factorized_loss, inclusion
from dscout_jax.objective.inclusion import sample_blocks
from dscout_jax.objective.weighting import Scores

MASK = 63


def blocks_of(tokens, answer, *, W=8, N=4, horizon=None, unmask=inclusion.no_unmasking, seed=0, **options):
    return sample_blocks(
        jax.random.key(seed),
        jnp.asarray(tokens),
        jnp.asarray(answer),
        options.pop("row_ids", jnp.arange(len(tokens))),
        num_anchors=N,
        block_size=W,
        mask_token_id=MASK,
        horizon=horizon or inclusion.fixed(W),
        unmask=unmask,
        **options,
    )


def random_scores(seed, shape=(2, 3, 8)):
    rng = np.random.default_rng(seed)
    W = shape[-1]
    horizons = rng.integers(2, W + 1, shape[:-1])
    revealed_to = np.where(horizons > 2, rng.integers(0, np.maximum(horizons - 1, 1)), 0)
    slots = np.arange(W)
    mask = (slots > revealed_to[..., None]) & (slots < horizons[..., None])
    revealed = (slots >= 1) & (slots <= revealed_to[..., None])
    p = rng.uniform(0.05, 1, shape).astype(np.float32)
    hit = rng.random(shape) < 0.6
    overlap, target_p = rng.uniform(0.05, 1, (2, *shape)).astype(np.float32)
    return Scores(*map(jnp.asarray, (np.log(p), hit, mask, revealed, overlap, np.log(target_p))))


def naive_weights(scores, kind, eps, score="probability"):
    p = {"probability": np.exp(scores.logp), "hit": scores.hit, "overlap": scores.overlap}[score]
    p, hit, mask = np.asarray(p, float), np.asarray(scores.hit), np.asarray(scores.mask)
    out = np.zeros(p.shape)
    for b, n in np.ndindex(p.shape[:2]):
        for k in range(p.shape[2]):
            if kind == "auf":
                out[b, n, k] = float(all(hit[b, n, j] for j in range(k) if mask[b, n, j]))
                continue

            def a(j, b=b, n=n):
                return (1 - eps) * p[b, n, j] + eps if mask[b, n, j] else 1.0

            if kind == "exclusive":
                out[b, n, k] = np.prod([a(j) for j in range(k)])
            elif kind == "inclusive":
                out[b, n, k] = np.prod([a(j) for j in range(k + 1)])
            else:
                out[b, n, k] = sum(
                    np.prod([a(j) for j in range(m + 1)]) for m in range(k, p.shape[2]) if mask[b, n, m]
                )
    return out * mask


def setup_loss(seed=0, B=2, N=4, W=8, D=16, V=50, **options):
    keys = jax.random.split(jax.random.key(seed), 4)
    tokens = jax.random.randint(keys[0], (B, 30), 0, V)
    answer = jnp.arange(30)[None] >= jnp.array([5, 12])[:, None]
    blocks = blocks_of(tokens, answer, W=W, N=N, **options)
    hidden = jax.random.normal(keys[1], (B, N, W, D))
    return hidden, jax.random.normal(keys[2], (V, D)), blocks, jax.random.normal(keys[3], (B, 30, D))


def ratio(objective, hidden, head, blocks, target_hidden=None, **options):
    sums = factorized_loss(objective, hidden, head, blocks, target_hidden, **options)
    return sums.numerator / sums.denominator
