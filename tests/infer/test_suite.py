"""The suite: every set of a folder by one command, resumed, with means in which each set counts alike."""

import json
import runpy
from pathlib import Path

import numpy as np

SUITE = Path(__file__).parents[2] / "benchmarks" / "suite.py"


def test_a_folder_of_sets_by_one_command(folders, tmp_path, capsys):
    target, drafter = folders
    sets = tmp_path / "sets"
    sets.mkdir()
    talks = {"chat": [["Hi", "And?"], ["Why?"], ["x" * 900]], "maths": [["1 + 1"], ["2 + 2"], ["3 + 3"]]}
    for name, rows in talks.items():
        lines = (json.dumps({"turns": turns}) + "\n" for turns in rows)
        (sets / f"{name}.jsonl").write_text("".join(lines))
    command = [str(sets), "--drafter", str(drafter), "lookup", "--target", str(target), "--dtype", "float32"]
    command += ["--block-sizes", "3", "--limit", "2", "--max-new-tokens", "6", "--seed", "3", "--no-parts"]
    command += ["--records", str(tmp_path / "records"), "--out", str(tmp_path / "docs" / "suite")]
    main = runpy.run_path(str(SUITE))["main"]
    main(command)
    printed = capsys.readouterr().out.splitlines()
    document = json.loads((tmp_path / "docs" / "suite.json").read_text())
    rows = document["rows"]
    names = (drafter.parent.name, "lookup")
    assert [(r["dataset"], r["drafter"]) for r in rows] == [
        (one, name) for one in ("chat", "maths") for name in names
    ]
    assert all(r["identical"] == r["n"] and r["conversations"] == 2 for r in rows)
    for mean, name in zip(document["means"], names, strict=True):
        own = [r for r in rows if r["drafter"] == name]
        assert (mean["drafter"], mean["sets"], mean["n"]) == (name, 2, sum(r["n"] for r in own))
        assert np.isclose(mean["mat"], np.mean([r["mat"] for r in own]))
        assert mean["slowest"] == min(r["speedup"] for r in own)
    text = (tmp_path / "docs" / "suite.md").read_text()
    assert printed[-1] in text and text.count("\n| chat |") == 2 * 2 and "by seed 3" in text
    assert (tmp_path / "docs" / "suite.png").stat().st_size > 1000
    assert (tmp_path / "docs" / "suite.html").stat().st_size > 1000

    lines = (tmp_path / "records" / "records.jsonl").read_text()
    main(command)
    assert (tmp_path / "records" / "records.jsonl").read_text() == lines, "nothing is measured again"
