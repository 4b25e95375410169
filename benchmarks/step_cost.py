"""What a training step costs: time and memory by sequence, anchors, block size and vocabulary.

    python benchmarks/step_cost.py --out docs/results/step-cost.json

One axis grows at a time, at the shapes of a small drafter that fit a CPU; memory is the compiler's
(temporaries and results), time the median of whole steps that take turns. `--pytorch` (extra `parity`) adds
the same maths written with one dense mask over all blocks and all logits at once, at equal shapes and
weights, in a process of its own each: seconds a step, and the peak of resident memory over that before it.
"""

import argparse
import ctypes
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from loss_cost import drafter_of, shapes
from step_in_pytorch import make_torch_step

from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.objective import dflash, sample_blocks
from infer.machine import describe
from train.settings import TrainSettings
from train.step import TrainState, make_optimizer, make_step

AXES = {
    "seq_len": (512, 1024, 2048, 4096),
    "num_anchors": (64, 128, 256, 512),
    "block_size": (4, 8, 16),
    "vocab": (4096, 8192, 16384, 32768),
}

BESIDE = {"seq_len": 2048, "num_anchors": 512}
"""Where PyTorch's dense mask is compared: as many blocks as a real recipe has."""


def target_of(vocab: int) -> TargetConfig:
    """Shapes of a small target; only what its drafter inherits matters."""
    return TargetConfig(vocab, 256, 768, 12, 4, 2, 64, 1e-5, RopeConfig(1e5), 8192, True, True, (2,))


def settings_of(
    seq_len: int = 1024, num_anchors: int = 128, block_size: int = 8, **more: Any
) -> TrainSettings:
    """A recipe in chunks: 32 anchors through the layers, 256 rows through the head at a time."""
    return TrainSettings(
        objective=dflash(block_size),
        data="",
        run="",
        num_layers=2,
        block_size=block_size,
        mask_token_id=16,
        seq_len=seq_len,
        batch=1,
        num_anchors=num_anchors,
        chunk=256,
        anchor_chunk=32,
        **more,
    )


class Case:
    """A compiled step with its arrays; every call takes one step."""

    def __init__(self, settings: TrainSettings, vocab: int) -> None:
        rng = np.random.default_rng(0)

        def filled(like):
            if like.dtype == jnp.bool_:
                return jnp.broadcast_to(jnp.arange(like.shape[1]) >= 64, like.shape)
            if like.dtype == jnp.int32:
                return jnp.asarray(rng.integers(0, vocab, like.shape), jnp.int32)
            return jnp.asarray(rng.standard_normal(like.shape) * 0.05, like.dtype)

        self.drafter = drafter_of(settings, target_of(vocab))
        self.parts = jax.tree.map(filled, shapes(self.drafter, settings, settings.batch, vocab))
        optimizer = make_optimizer(settings)
        params = jax.tree.map(jnp.copy, self.parts[0])
        self.state = TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))
        step = make_step(self.drafter, settings, optimizer)
        self._step = step.lower(self.state, self.parts[1], 0, 0.5, *self.parts[2:]).compile()
        memory = self._step.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.bytes = memory.temp_size_in_bytes + results

    def __call__(self) -> float:
        """The loss."""
        self.state, metrics = self._step(self.state, self.parts[1], 0, 0.5, *self.parts[2:])
        return float(metrics["loss"])


def seconds_of(cases: dict[Any, Callable[[], float]], repeats: int) -> dict[Any, float]:
    """Median seconds of a call, taking turns."""
    taken: dict[Any, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            begun = time.perf_counter()
            case()
            if turn:  # the first one warms up
                taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in taken.items()}


def along(axis: str, repeats: int) -> list[dict[str, Any]]:
    """Cost at each value of an axis, the others at their defaults."""
    cases = {}
    for value in AXES[axis]:
        vocab = value if axis == "vocab" else 8192
        cases[value] = Case(settings_of(**({} if axis == "vocab" else {axis: value})), vocab)
    seconds = seconds_of(cases, repeats)
    return [{axis: v, "seconds": seconds[v], "bytes": case.bytes} for v, case in cases.items()]


def linearity(rows: list[dict[str, Any]], axis: str) -> float:
    """R squared of a straight line through seconds against the axis."""
    x, y = (np.array([row[name] for row in rows], float) for name in (axis, "seconds"))
    line = np.polyval(np.polyfit(x, y, 1), x)
    return float(1 - ((y - line) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def one(which: str, repeats: int) -> dict[str, Any]:
    """Seconds, peak resident bytes over those before, and first loss of a step, in this process."""
    settings, vocab = settings_of(**BESIDE, learning_rate=1e-3), 8192
    case: Any = Case(settings, vocab)
    if which == "pytorch":
        params, frozen, features, tokens, answer, row_ids = case.parts
        blocks = sample_blocks(
            jax.random.fold_in(jax.random.key(settings.seed), 0),
            tokens,
            answer,
            row_ids,
            num_anchors=settings.num_anchors,
            block_size=settings.block_size,
            mask_token_id=case.drafter.config.mask_token_id,
            horizon=settings.objective.horizon,
        )
        case = make_torch_step(case.drafter.config, params, frozen, features.taps, blocks, settings)
    loss = case()
    ctypes.CDLL(None).malloc_trim(0)  # what the first step freed must not hide what the second takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    case()
    peak = _resident("VmHWM") - before
    return {"loss": loss, "peak_bytes": peak, "seconds": seconds_of({0: case}, repeats)[0]}


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    """Prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--axes", nargs="*", default=list(AXES), choices=list(AXES))
    parser.add_argument("--pytorch", action="store_true")
    parser.add_argument("--one", choices=["ours", "pytorch"], help="for the program's own use")
    parser.add_argument("--out", type=Path, default=Path("runs/step-cost.json"))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.repeats)))
        return
    shape = dataclasses.asdict(target_of(8192)) | {"layers": settings_of().num_layers}
    found: dict[str, Any] = {"machine": describe(), "shape": shape, "axes": {}}
    for axis in options.axes:
        found["axes"][axis] = along(axis, options.repeats)
        print(axis, *found["axes"][axis], sep="\n  ", flush=True)
    if "num_anchors" in found["axes"]:
        found["anchors_r_squared"] = linearity(found["axes"]["num_anchors"], "num_anchors")
    if options.pytorch:
        words = [sys.executable, __file__, "--repeats", str(options.repeats), "--one"]
        for which in ("ours", "pytorch"):
            said = subprocess.run([*words, which], check=True, capture_output=True, text=True).stdout
            found[which] = BESIDE | json.loads(said.splitlines()[-1])
            print(which, found[which], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
