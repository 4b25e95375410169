"""What the factorised loss costs: memory at the shapes of Qwen3-4B, and a step's time by weighting.

    python benchmarks/loss_cost.py

Memory: loss and gradient of one sequence of 3,072 tokens, 512 blocks of 16 slots, 5 draft layers, the head of
2,560 x 151,936, compiled from shapes alone; nothing of that size is allocated. Time: whole training steps
of two recipes that differ in the weighting only, taking turns, at the shapes of a drafter for SmolLM2-135M.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from configs.pods.qwen3_4b import config as qwen3_4b
from configs.smollm2_135m import config as smollm2
from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.interop.safetensors import read_json
from dscout_jax.models import Drafter
from dscout_jax.objective.weighting import awl, decay
from infer.machine import describe
from train.plan import abstract_devices
from train.settings import TrainSettings
from train.step import Features, Frozen, TrainState, make_optimizer, make_step, make_sums

# One device that holds the weights whole; the pod recipe splits them and scans the layers.
ONE_DEVICE = dataclasses.replace(
    qwen3_4b, scan_layers=False, remat="none", anchor_chunk=32, attention_chunk=16, chunk=128
)
SMOLLM2 = TargetConfig(49152, 576, 1536, 30, 9, 3, 64, 1e-5, RopeConfig(1e5), 8192, False, True, (2,))


def drafter_of(settings: TrainSettings, target: TargetConfig) -> Drafter:
    """The drafter that the settings train."""
    config = DrafterConfig.for_target(
        target,
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id or 16,
        target_layer_ids=settings.target_layer_ids,
    )
    return Drafter(config, jnp.dtype(settings.dtype), settings.remat, settings.scan_layers)


def shapes(drafter: Drafter, settings: TrainSettings, rows: int, vocab: int) -> tuple[Any, ...]:
    """Abstract (params, frozen, features, tokens, answer, row_ids) of a batch, `vocab` ids being scored."""
    c, S = drafter.config, settings.seq_len
    taps = jax.ShapeDtypeStruct((rows, S, len(c.target_layer_ids) * c.hidden_size), drafter.dtype)
    hidden = jax.ShapeDtypeStruct((rows, S, c.hidden_size), drafter.dtype)
    block = jax.ShapeDtypeStruct((1, 1, c.block_size, c.hidden_size), drafter.dtype)
    one = (jax.ShapeDtypeStruct((1, 2, taps.shape[-1]), drafter.dtype), block)
    anchors = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = jax.eval_shape(drafter.init, jax.random.key(0), *one, anchors)["params"]
    table = jax.ShapeDtypeStruct((vocab, c.hidden_size), drafter.dtype)
    return (
        params,
        Frozen({"weight": table}, table),
        Features(taps, hidden if settings.objective.sees_target else None),
        jax.ShapeDtypeStruct((rows, S), jnp.int32),
        jax.ShapeDtypeStruct((rows, S), jnp.bool_),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def memory(topology: str) -> dict[str, Any]:
    """Bytes of arguments, results (the gradients) and temporaries of loss and gradient of one sequence."""
    place = SingleDeviceSharding(abstract_devices(topology)[0])
    settings = ONE_DEVICE
    target = TargetConfig.from_hf(read_json(Path(settings.target) / "config.json"))
    drafter = drafter_of(settings, target)
    abstract = (*shapes(drafter, settings, 1, target.vocab_size), jax.eval_shape(lambda: jax.random.key(0)))
    params, frozen, *parts, key = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract
    )
    grad = jax.jit(jax.value_and_grad(make_sums(drafter, settings), has_aux=True))
    found = grad.lower(params, frozen, key, *parts).compile().memory_analysis()
    return {
        "topology": topology,
        "tokens": settings.seq_len,
        "anchors": settings.anchors,
        "block_size": settings.block_size,
        "anchor_chunk": settings.anchor_chunk,
        "attention_chunk": settings.attention_chunk,
        "head_chunk": settings.chunk,
        "temporary_bytes": found.temp_size_in_bytes,
        "argument_bytes": found.argument_size_in_bytes,
        "output_bytes": found.output_size_in_bytes,
    }


def step_times(repeats: int, vocab: int) -> dict[str, Any]:
    """Seconds of a training step with `decay` and with `awl`, medians over turns, and their ratio."""
    rng = np.random.default_rng(0)

    def filled(like):
        if like.dtype == jnp.bool_:
            return jnp.arange(like.shape[1])[None] >= jnp.full((like.shape[0], 1), 64)
        if like.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, vocab, like.shape), jnp.int32)
        return jnp.asarray(rng.standard_normal(like.shape) * 0.05, like.dtype)

    timers = {}
    for name, weighting in (("decay", decay(3.0)), ("awl", awl())):
        objective = dataclasses.replace(smollm2.objective, weighting=weighting)
        settings = dataclasses.replace(smollm2, objective=objective)
        drafter, optimizer = drafter_of(settings, SMOLLM2), make_optimizer(settings)
        params, frozen, *parts = jax.tree.map(filled, shapes(drafter, settings, settings.batch, vocab))
        step = make_step(drafter, settings, optimizer)
        zero = jnp.zeros((), jnp.int32)
        held = [TrainState(params, optimizer.init(params), zero, jnp.zeros((), jnp.int32))]

        def timed(step=step, held=held, frozen=frozen, parts=parts) -> float:
            begun = time.perf_counter()
            held[0], metrics = step(held[0], frozen, 0, 0.5, *parts)
            jax.block_until_ready((held[0], metrics))
            return time.perf_counter() - begun

        timed()
        timers[name] = timed
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(repeats):
        for name in list(timers)[:: 1 if turn % 2 else -1]:
            seconds[name].append(timers[name]())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {"repeats": repeats, "seconds": median, "awl_over_decay": median["awl"] / median["decay"]}


def main() -> None:
    """Prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vocab", type=int, default=8192, help="ids scored while timing")
    parser.add_argument("--topology", default="cpu:1", help="whose compiler says the memory, as v5p:2x2x1")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/loss-cost.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe(), "memory": memory(options.topology)}
    print(f"temporaries {found['memory']['temporary_bytes'] / 1e9:.2f} GB", flush=True)
    if not options.skip_times:
        found["time"] = step_times(options.repeats, options.vocab)
        print(f"awl / decay {found['time']['awl_over_decay']:.3f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
