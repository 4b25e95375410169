"""What a run tells: metrics.jsonl always, TensorBoard and wandb where asked, a trace of a few steps."""

import importlib
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath

from dscout_jax.errors import UserError
from train.hosts import barrier, first
from train.paths import is_remote, write_whole

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Writer(Protocol):
    """Takes numbers by name at a step."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def need(logger: str) -> ModuleType:
    """The package of a logger.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(PACKAGES[logger])
    except ImportError:
        raise UserError(
            f"logging to {logger} needs the package {PACKAGES[logger]}: pip install 'dscout-jax[logging]'"
        ) from None


class TensorBoard:
    """Event files in RUN/tensorboard; steps after `at` will come again and are dropped."""

    def __init__(self, run: epath.Path, at: int) -> None:
        self._writer = need("tensorboard").SummaryWriter(str(run / "tensorboard"), purge_step=at + 1)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Adds the numbers of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class Wandb:
    """A run of wandb's, named as the run's folder, taken up again when the run is; WANDB_* settings hold."""

    def __init__(self, run: epath.Path, at: int) -> None:
        name = run.name
        self._run = need("wandb").init(
            project="dscout", name=name, id=name, resume="allow", dir=None if is_remote(run) else str(run)
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Adds the numbers of a step."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


_WRITERS: dict[str, type[TensorBoard] | type[Wandb]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record by name; entry k of a list is NAME/k."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            yield from scalars({str(k): x for k, x in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("step", "time"):
            yield prefix + name, float(value)


def _finite(value: Any) -> Any:
    """The same with null for numbers that are none, which JSON cannot write."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Log:
    """metrics.jsonl of a run at step `at`; lines of later steps are forgotten, since they come again.

    Only the first process writes; all of them know the evaluations. A bucket's objects cannot be added to:
    there the file is written anew by `flush` and at the end.
    """

    def __init__(self, run: epath.Path, at: int, loggers: tuple[str, ...] = ()) -> None:
        path = run / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        self._lines = [line for line in lines if json.loads(line)["step"] <= at]
        # Every process has read before the first one writes.
        barrier("log")
        self._path, self._file = path, None
        self._writers: list[Writer] = []
        if first():
            write_whole(path, "".join(line + "\n" for line in self._lines))
            if not is_remote(path):
                self._file = path.open("a", encoding="utf-8")
            self._writers = [_WRITERS[name](run, at) for name in loggers]
        self.scores: dict[int, dict[str, Any]] = {}
        """Step -> evaluation."""
        for line in self._lines:
            self._note(json.loads(line))

    def _note(self, record: dict[str, Any]) -> None:
        if "eval" in record:
            self.scores[record["step"]] = record["eval"]

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, at once where that is possible."""
        self._note(record)
        line = json.dumps(_finite(record), allow_nan=False)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()
        elif first():
            self._lines.append(line)
        for writer in self._writers:
            writer.write(record["step"], dict(scalars(record)))

    def flush(self) -> None:
        """Brings a bucket's file up to date; elsewhere it is."""
        if first() and self._file is None:
            write_whole(self._path, "".join(line + "\n" for line in self._lines))

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
        for writer in self._writers:
            writer.close()


class Speed:
    """Tokens a second, MFU and memory, from one step's end to the next.

    Args:
        tokens: of a step, padding included. flops: that a step needs. peak: bf16 operations a second of all
            devices together, None where it is not known: there is no MFU then.
    """

    def __init__(self, tokens: int, flops: float, peak: float | None) -> None:
        self._tokens, self._flops, self._peak = tokens, flops, peak
        self._last: float | None = None

    def pause(self) -> None:
        """What comes until the next step is no step's time: an evaluation."""
        self._last = None

    def after_step(self) -> dict[str, float]:
        """Of the step that has just ended; no rate for the first one and after a pause."""
        now, found = time.monotonic(), {"host_memory_peak": _host_peak()}
        stats = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
        if None not in stats:
            found["device_memory_peak"] = max(stats)
        if self._last is not None:
            seconds = max(now - self._last, 1e-9)
            found |= {"seconds": seconds, "tokens_per_second": self._tokens / seconds}
            if self._peak is not None:
                found["mfu"] = self._flops / seconds / self._peak
        self._last = now
        return found


def _host_peak() -> int:
    """Bytes; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Profile:
    """A trace of the steps first..last, both counted from 1, in RUN/profile; None: of none."""

    def __init__(self, run: epath.Path, window: tuple[int, int] | None) -> None:
        self._folder, self._window, self._on = str(run / "profile"), window, False

    def before(self, step: int) -> None:
        """Starts the trace where the window does, or where a resumed run enters it."""
        if self._window is not None and not self._on and self._window[0] <= step <= self._window[1]:
            jax.profiler.start_trace(self._folder)
            self._on = True

    def after(self, step: int, state: Any) -> None:
        """Ends the trace once the window's last step has been computed."""
        if self._on and step >= self._window[1]:
            jax.block_until_ready(state)
            self.stop()

    def stop(self) -> None:
        """Ends a trace that is still running."""
        if self._on:
            jax.profiler.stop_trace()
            self._on = False


def record(step: int, metrics: dict[str, jax.Array], speed: Speed) -> dict[str, Any]:
    """A step's line of metrics.jsonl; waits for the step."""
    host = jax.device_get(metrics)
    count, reach = np.maximum(host["included"], 1), np.maximum(host["reach"], 1)
    return {
        "step": step,
        "time": round(time.time(), 3),
        "loss": float(host["loss"]),
        "learning_rate": float(host["learning_rate"]),
        "grad_norm": float(host["grad_norm"]),
        "blocks": int(host["blocks"]),
        "queries": int(host["queries"]),
        "skipped_steps": int(host["skipped"]),
        "included": host["included"].tolist(),
        "weight": (host["weight"] / count).tolist(),
        "slot_loss": (host["slot_loss"] / count).tolist(),
        "gradient_share": (host["gradient"] / max(host["gradient"].sum(), 1e-30)).tolist(),
        "accuracy": (host["hits"] / count).tolist(),
        "bare_accuracy": (host["bare_hits"] / reach).tolist(),
        "survival": (host["survived"] / reach).tolist(),
        **speed.after_step(),
    }
