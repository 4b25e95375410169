"""Loading a target onto a mesh of 8 simulated devices: MB/s, and the memory beside the weights themselves.

    python benchmarks/load_target.py --gigabytes 4 --out docs/results/load-target.json

Writes random bf16 weights of a Qwen3-like target in shards of half a gigabyte, forgets them from the page
cache, loads them (cold), loads them again (warm). Simulated devices keep their shards in the host's memory;
`staging` is what the peak holds beyond those: at the most a few slices, never a shard file. Held against the
largest shard group, the slices of one tensor on this host's devices, it exits with 1 beyond 1.5 times that.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, models

from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.interop import load_target, names, onto
from dscout_jax.interop.safetensors import write_json, write_tensors
from dscout_jax.sharding import make_mesh
from infer.machine import describe

SHARD_BYTES = 500_000_000
MOST = 1.5
"""Staging over the largest shard group."""


def config_of(gigabytes: float) -> TargetConfig:
    """As many layers of 100 MB as make the size, over an embedding of 134 MB."""
    layers = max(1, round((gigabytes * 1e9 - 134e6) / 100.7e6))
    rope = RopeConfig(1e6)
    return TargetConfig(32768, 2048, 6144, layers, 16, 8, 128, 1e-6, rope, 4096, True, True, (1,))


def make(folder: Path, config: TargetConfig) -> None:
    """Writes the folder; in a process of its own, so that its memory is nobody else's."""
    noise = np.random.default_rng(0).normal(0, 0.02, 2**24).astype(ml_dtypes.bfloat16)
    shapes = names.target_shapes(config)
    tensors = {names.to_hf(path): np.resize(noise, shape) for path, shape in shapes.items()}
    write_tensors(folder, tensors, shard_bytes=SHARD_BYTES)
    write_json(folder / "config.json", config.to_hf())
    write_json(folder / "tokenizer_config.json", {})
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))


def forget(folder: Path) -> None:
    """Drops the files from the page cache, as far as the system lets us."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous() -> int:
    """Bytes of this process's own memory; pages of mapped files are the system's to take back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell RssAnon; run on Linux")


class Peak:
    """The largest `anonymous` while it runs, looked at every millisecond."""

    def __enter__(self) -> "Peak":
        self.before = self.bytes = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.bytes = max(self.bytes, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def load(folder: Path, stored: int) -> dict[str, float]:
    """One load: seconds, MB/s, and memory in MB."""
    with Peak() as peak:
        begun = time.perf_counter()
        target = load_target(folder, jnp.bfloat16, place=onto(make_mesh(1, 4, 2)))
        seconds = time.perf_counter() - begun
    slices = [[s.data.nbytes for s in x.addressable_shards] for x in jax.tree.leaves(target.params)]
    held, group = sum(map(sum, slices)), max(map(sum, slices))
    grown = peak.bytes - peak.before
    return {
        "seconds": seconds,
        "mb_per_s": stored / seconds / 1e6,
        "peak_mb": grown / 1e6,
        "weights_mb": held / 1e6,
        "staging_mb": (grown - held) / 1e6,
        "largest_slice_mb": max(map(max, slices)) / 1e6,
        "largest_group_mb": group / 1e6,
        "staging_over_group": (grown - held) / group,
        "largest_file_mb": max(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6,
    }


def main() -> None:
    """Measures, prints, writes OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=None, help="where the weights lie for a while")
    parser.add_argument("--out", type=Path, default=Path("runs/load-target.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        maker = multiprocessing.get_context("spawn").Process(
            target=make, args=(folder, config_of(options.gigabytes))
        )
        maker.start()
        maker.join()
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        forget(folder)
        cold, warm = load(folder, stored), load(folder, stored)
    # The second load takes what the first gave back to the allocator: of it only the time means something.
    rows = {"cold": cold, "warm": {key: warm[key] for key in ("seconds", "mb_per_s")}}
    result = {"gigabytes": stored / 1e9, "devices": jax.device_count(), **rows, "machine": describe()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    ratio = cold["staging_over_group"]
    print(f"staging is {ratio:.2f} of the largest shard group, of at most {MOST}", file=sys.stderr)
    if ratio > MOST:
        sys.exit(1)


if __name__ == "__main__":
    main()
