"""What depends on the backend, each choice by its name; docs/performance.md has the reasons."""

import jax


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def sums_beat_products() -> bool:
    """One query a row attends faster by sums: XLA:CPU packs the keys anew for every few rows of queries."""
    return _on_cpu()


def single_updates_copy() -> bool:
    """A write at a single index copies its buffer: XLA:CPU fuses a slice's update into its readers."""
    return _on_cpu()


def single_bf16_rows_are_slow() -> bool:
    """A bf16 product of one row takes longer than one of two: XLA:CPU has no good form of it."""
    return _on_cpu()
