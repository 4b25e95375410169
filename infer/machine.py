"""What a measurement ran on: written beside every figure, since absolute times hold for one machine."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def describe() -> dict[str, Any]:
    """Processor, accelerator and versions."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "bf16_units": _bf16_units(),
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.is_file() else ""


def _cpu() -> str:
    for line in _cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _bf16_units() -> list[str]:
    """Instructions that multiply bf16; without them a bf16 product is computed in fp32."""
    flags = set(_cpuinfo().split())
    return sorted(flags & {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"})
