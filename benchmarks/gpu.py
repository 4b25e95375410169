"""Latencies at the shapes of large targets, random weights, bf16: plain step, draft, verify, whole loop.

    benchmarks/gpu.sh

Each figure is written as soon as it is there, small batches first, and none is begun after --seconds, of
which each target has its share: what is still left out is named in the JSON. Random drafters accept next to
nothing, so tokens a second mean nothing here; what speculation gains is MAT x plain step / round, with a
MAT measured elsewhere.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.decode import Decoder
from dscout_jax.interop import names
from dscout_jax.models import Drafter, Target
from infer.latency import draft_step, forward_step, made_up, take_turns, timer, whole
from infer.machine import describe

ROPE = RopeConfig(1e6)
# Vocabulary, width, feed-forward, layers, query heads, KV heads, head width; then tied or not.
SHAPES = {
    "qwen3-4b": TargetConfig(151936, 2560, 9728, 36, 32, 8, 128, 1e-6, ROPE, 40960, True, True, (151645,)),
    "qwen3-8b": TargetConfig(151936, 4096, 12288, 36, 32, 8, 128, 1e-6, ROPE, 40960, True, False, (151645,)),
}
TINY = {"tiny": TargetConfig(64, 16, 24, 3, 4, 2, 8, 1e-6, ROPE, 1024, True, True, (1,))}
BATCHES, SIZES, CALLS = (1, 8, 32), (1, 4, 8, 16), 16


def random_weights(shapes: dict[str, tuple[int, ...]], key: jax.Array) -> dict[str, Any]:
    """Parameters on the device in bf16: matrices of a usual size, norms of one."""

    @partial(jax.jit, static_argnums=1)
    def matrix(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)

    def one(at: int, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.bfloat16)
        return matrix(jax.random.fold_in(key, at), shape)

    return names.nest({path: one(at, shape) for at, (path, shape) in enumerate(shapes.items())})


def make_decoder(config: TargetConfig, layers: int, block_size: int) -> Decoder:
    """A random target and a random drafter of its width."""
    shape = DrafterConfig.for_target(
        config,
        num_layers=layers,
        block_size=block_size,
        mask_token_id=config.vocab_size - 1,
    )
    keys = jax.random.split(jax.random.key(0))
    return Decoder(
        Target(config, jnp.bfloat16),
        random_weights(names.target_shapes(config), keys[0]),
        Drafter(shape, jnp.bfloat16),
        random_weights(names.drafter_shapes(shape), keys[1]),
    )


def part_steps(decoder: Decoder, sizes: Sequence[int]) -> dict[str, Callable]:
    """Steps by name: the plain forward, and for every block size draft and verify."""
    taps = decoder.drafter.config.target_layer_ids
    steps = {"plain step": forward_step(decoder.target, 1)}
    for size in sizes:
        steps[f"verify {size}"] = forward_step(decoder.target, size, taps)
        if size > 1:
            steps[f"draft {size}"] = draft_step(decoder.resize(size))
    return steps


def parts(
    decoder: Decoder, sizes: Sequence[int], batch: int, prompt_tokens: int, calls: int, repeats: int
) -> dict[str, float]:
    """Milliseconds of every part at this batch; programs are compiled side by side."""
    prompts = made_up(decoder, batch, prompt_tokens)
    state, _ = decoder.prefill(decoder.requests(prompts, calls + 1))
    steps = part_steps(decoder, sizes)
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda step: timer(step, decoder.weights, state, calls), steps.values())
        timers = dict(zip(steps, made, strict=True))
    return {name: statistics.median(values) for name, values in take_turns(timers, repeats).items()}


def loops(decoder: Decoder, batch: int, prompt_tokens: int, calls: int, repeats: int) -> dict[str, float]:
    """Milliseconds a round of `Decoder.generate`, plain and at the drafter's own block size."""
    prompts = made_up(decoder, batch, prompt_tokens)
    sides = {"plain loop": decoder.plain(1), f"loop {decoder.block_size}": decoder}
    timers = {name: whole(side, prompts, calls) for name, side in sides.items()}
    return {name: statistics.median(values) for name, values in take_turns(timers, repeats).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures until the time is up, writes OUT after every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu/gpu.json"))
    parser.add_argument("--seconds", type=float, default=450.0, help="nothing is begun later")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it works")
    o = parser.parse_args(arguments)
    begun = time.monotonic()
    shapes = TINY if o.tiny else SHAPES
    batches, sizes, layers, repeats, tokens, calls = BATCHES, SIZES, 5, o.repeats, o.prompt_tokens, CALLS
    if o.tiny:
        batches, sizes, layers, repeats, tokens, calls = (2,), (1, 4), 1, 1, 8, 2
    document: dict[str, Any] = {
        "machine": describe(),
        "dtype": "bfloat16",
        "prompt_tokens": tokens,
        "weights": "random",
        "figures": [],
        "left_out": [
            {"shape": name, "batch": batch, "what": what}
            for name in shapes
            for batch in batches
            for what in ("parts", "loops")
        ],
    }
    o.out.parent.mkdir(parents=True, exist_ok=True)
    _write(o.out, document)
    for share, (name, config) in enumerate(shapes.items(), start=1):
        deadline = o.seconds * share / len(shapes)
        # One target at a time lies on the device.
        decoder = make_decoder(config, layers, max(sizes))
        runs = {"parts": partial(parts, decoder, sizes), "loops": partial(loops, decoder)}
        for one in [one for one in document["left_out"] if one["shape"] == name]:
            if time.monotonic() - begun > deadline:
                break
            ms = runs[one["what"]](one["batch"], tokens, calls, repeats)
            document["figures"].append(one | {"ms": ms})
            document["left_out"].remove(one)
            document["seconds"] = time.monotonic() - begun
            print(name, f"batch {one['batch']}:", {k: round(v, 2) for k, v in ms.items()}, flush=True)
            _write(o.out, document)
        del decoder, runs


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
