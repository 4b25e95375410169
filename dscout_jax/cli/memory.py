"""How a process takes memory from a Linux kernel: in large pages, and once."""

import os
import sys

# XLA:CPU takes the temporaries of every step anew. Blocks of that size glibc hands back to the kernel as soon
# as they are free, so each step faults them in again, cleared 4 KiB at a time: a quarter of a training step
# and more (docs/performance.md). Here large pages are asked for, and what was taken once is kept.
TUNABLES = {
    "hugetlb": 1,
    "mmap_max": 0,
    "arena_max": 1,
    "trim_threshold": 2**40,
    "top_pad": 2**28,
}


def keep_memory() -> None:
    """Starts this process anew under `TUNABLES`; returns where it need not, or where there is no glibc.

    glibc reads them once, before Python runs. The process keeps its id and its arguments. Whoever has set
    GLIBC_TUNABLES is left alone.
    """
    if "GLIBC_TUNABLES" in os.environ or "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}):
        return
    settings = [f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items()]
    os.environ["GLIBC_TUNABLES"] = ":".join(settings)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
