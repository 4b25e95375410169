"""The command `dscout`: parses, then calls. It alone imports train, infer and tyro."""

import sys
from collections.abc import Callable

import tyro

from dscout_jax.cli.benchmarks import Bench, BenchCheck, BenchCompare, BenchLatency, Report
from dscout_jax.cli.decoding import Generate
from dscout_jax.cli.folders import Convert, Export, Import
from dscout_jax.cli.memory import keep_memory
from dscout_jax.cli.training import (
    Explain,
    FeaturesOf,
    Lab,
    LadderOf,
    Pack,
    Plan,
    Quickstart,
    Regenerate,
    Train,
)
from dscout_jax.cli.tuning import Tune, TuneDepth, TuneReport, TuneTaps
from dscout_jax.errors import UserError

COMMANDS: dict[str, type[Callable[[], None]]] = {
    "quickstart": Quickstart,
    "regenerate": Regenerate,
    "train": Train,
    "pack": Pack,
    "features": FeaturesOf,
    "plan": Plan,
    "lab": Lab,
    "ladder": LadderOf,
    "explain": Explain,
    "export": Export,
    "import": Import,
    "convert": Convert,
    "generate": Generate,
    "bench": Bench,
    "bench-latency": BenchLatency,
    "bench-compare": BenchCompare,
    "bench-check": BenchCheck,
    "tune": Tune,
    "tune-depth": TuneDepth,
    "tune-taps": TuneTaps,
    "tune-report": TuneReport,
    "report": Report,
}


def main(arguments: list[str] | None = None) -> None:
    """Exit code 2 and one line for a user's mistake; tracebacks are for ours."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "-".join(words[:2]) in COMMANDS:
        words[:2] = ["-".join(words[:2])]  # `dscout bench latency` is bench-latency
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="dscout", description="Block-diffusion drafters in JAX.", args=words
    )
    if arguments is None:
        keep_memory()
    try:
        command()
    except UserError as error:
        print(f"dscout: {error}", file=sys.stderr)
        raise SystemExit(2) from None
