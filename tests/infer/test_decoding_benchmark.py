"""`benchmarks/decoding.py`: what it compares is the same work on both sides."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "decoding.py"


def test_it_measures_loops_rounds_and_batches(folders, tmp_path, capsys):
    target, drafter = folders
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("Hi", "Why?", "x" * 300)))
    command = ["--drafter", str(drafter), "--target", str(target), "--dtypes", "float32", "--batches", "3"]
    command += [
        "--prompts",
        str(prompts),
        "--new-tokens",
        "9",
        "--repeats",
        "1",
        "--out",
        str(tmp_path / "d"),
    ]
    runpy.run_path(str(SCRIPT))["main"](command)
    found = json.loads((tmp_path / "d.json").read_text())["dtypes"]["float32"]
    [block] = found["parts"]["blocks"]
    assert block["block_size"] == 4 and block["round_over_parts"] > 0
    assert set(found["rounds"]) == {
        *(f"{kind}_{side}_ms" for kind in ("plain", "speculative") for side in ("fused", "driven")),
        *(f"{kind}_driven_over_fused" for kind in ("plain", "speculative")),
    }
    [row] = found["batches"]
    # Two of the three prompts are short enough.
    assert row["batch"] == 3 and 1 <= row["mat"] <= 4
    assert row["speedup"] == row["speculative_tokens_per_s"] / row["plain_tokens_per_s"]
    assert capsys.readouterr().out.strip().endswith((tmp_path / "d.md").read_text().strip())
