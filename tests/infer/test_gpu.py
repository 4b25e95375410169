"""The script for a GPU machine, with small shapes on what is here."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


def test_every_part_is_measured_and_written(tmp_path):
    surroundings = os.environ | {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "XLA_FLAGS": ""}
    subprocess.run([SCRIPT, "--tiny"], env=surroundings, check=True)
    document = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert document["left_out"] == [] and document["machine"]["backend"] == "cpu"
    found = {(row["shape"], row["batch"], row["what"]): row["ms"] for row in document["figures"]}
    assert set(found) == {("tiny", 2, "parts"), ("tiny", 2, "loops")}
    assert set(found["tiny", 2, "parts"]) == {"plain step", "verify 1", "verify 4", "draft 4"}
    assert set(found["tiny", 2, "loops"]) == {"plain loop", "loop 4"}
    assert min(value for ms in found.values() for value in ms.values()) > 0


def test_no_measurement_outlasts_the_limit(tmp_path):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho measuring\nexec sleep 60\n")
    slow.chmod(0o755)
    surroundings = os.environ | {"OUT": str(tmp_path), "PYTHON": str(slow), "LIMIT": "1"}
    done = subprocess.run([SCRIPT, "--tiny"], env=surroundings, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (124, "measuring\n")


def test_what_there_was_no_time_for_is_named(tmp_path):
    out = tmp_path / "gpu.json"
    main = runpy.run_path(str(SCRIPT.with_suffix(".py")))["main"]
    main(["--tiny", "--seconds", "-1", "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["figures"] == [] and len(document["left_out"]) == 2
