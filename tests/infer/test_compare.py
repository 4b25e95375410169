"""Comparing benchmarks prompt by prompt, and the gate."""

import json

import pytest

from dscout_jax.errors import UserError
from infer.compare import compare, failures, load_cells, table


def write(folder, accepted, seconds, setup="s", prompt_tokens=7, drafter="mine"):
    """Records of one dataset at B = 4; plain decoding takes 1 s a token."""
    folder.mkdir(exist_ok=True)
    with open(folder / "records.jsonl", "a") as file:
        for i, (a, s) in enumerate(zip(accepted, seconds, strict=True)):
            tokens = list(range(sum(a) + len(a) + 1))
            shared = {"setup": setup, "tokens": tokens, "prompt_tokens": prompt_tokens + i}
            plain = {"key": ["maths", i, "plain"], "accepted": [], "decode_seconds": len(tokens) - 1.0}
            spec = {
                "key": ["maths", i, "speculative", f"{drafter}@{setup}", 4],
                "accepted": a,
                "decode_seconds": s,
            }
            file.writelines(json.dumps(shared | row) + "\n" for row in (plain, spec))
    return folder


def test_ratios_are_of_totals_and_pair_the_prompts(tmp_path):
    a = write(tmp_path / "a", [[0, 1], [3, 2, 1]], [2.0, 5.0])
    b = write(tmp_path / "b", [[1, 1], [3, 3, 3], [0]], [2.0, 4.0, 9.0], drafter="a later one")
    (row,) = compare(a, b / "rows.json")
    assert (row["dataset"], row["drafter"], row["block_size"], row["n"]) == ("maths", "mine", 4, 2)
    assert row["mat"]["first"] == pytest.approx(12 / 5) and row["mat"]["second"] == pytest.approx(16 / 5)
    assert row["tokens_per_s"]["ratio"] == pytest.approx((16 / 6) / (12 / 7))
    assert row["speedup"]["second"] == pytest.approx(16 / 6)
    # Each resampled ratio is one of the pairs drawn: (0, 0), (0, 1), (1, 1).
    assert row["mat"]["low"] == pytest.approx((12 / 3) / (9 / 3))
    assert row["mat"]["high"] == pytest.approx((4 / 2) / (3 / 2))
    (same,) = compare(a, a)
    assert all(same[name][k] == 1 for name in ("mat", "speedup") for k in ("ratio", "low", "high"))
    assert "x1.000, 1.000 to 1.000" in table([same])


def test_only_the_last_setup_counts(tmp_path):
    folder = write(tmp_path / "a", [[3]], [1.0], setup="old")
    write(folder, [[0]], [1.0], setup="new")
    assert load_cells(folder)["maths", "mine", 4][0]["accepted"] == [0]


def test_what_cannot_be_compared_is_named(tmp_path):
    a = write(tmp_path / "a", [[0]], [1.0])
    other = write(tmp_path / "b", [[0]], [1.0], prompt_tokens=9)
    with pytest.raises(UserError, match="prompt 0 of 'maths' is another"):
        compare(a, other)
    with pytest.raises(UserError, match="none holds no records"):
        compare(a, tmp_path / "none")
    text = (a / "records.jsonl").read_text().replace("maths", "chat")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "records.jsonl").write_text(text)
    with pytest.raises(UserError, match="no dataset"):
        compare(a, tmp_path / "c")
    # Among several drafters only names pair them.
    both = write(write(tmp_path / "d", [[0]], [1.0], drafter="x"), [[3]], [1.0], drafter="mine")
    (row,) = compare(a, both)
    assert row["mat"]["second"] == 4.0


def test_the_gate_names_what_fails(tmp_path):
    rows = [
        {
            "dataset": d,
            "drafter": "mine",
            "dtype": "float32",
            "block_size": b,
            "n": 5,
            "speedup": s,
            "mat": m,
            "identical": i,
        }
        for d, b, s, m, i in (("maths", 4, 1.8, 2.2, 5), ("maths", 8, 1.1, 2.5, 4), ("chat", 4, 1.2, 1.4, 5))
    ]
    rows[1]["identical_same_program"] = 5
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": rows}))
    assert failures(tmp_path, min_speedup=1.2, min_mat=1.4, identical=True) == []
    (slow,) = failures(path, min_speedup=1.5)
    assert slow == "mine on chat in float32 at B=4: speedup 1.200 is below 1.5"
    (low,) = failures(path, min_mat=2.0)
    assert low.startswith("mine on chat") and "mat 1.400" in low
    rows[1]["identical_same_program"] = 3
    path.write_text(json.dumps({"rows": rows}))
    (odd,) = failures(path, identical=True)
    assert odd == "mine on maths in float32 at B=8: 3 of 5 answers identical"
    path.write_text('{"rows": []}')
    assert failures(path, identical=True) == ["it holds no rows"]
    for text in ("x", "[]", '{"rows": [{"dtype": 1}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="no result"):
            failures(path, identical=True)
    with pytest.raises(UserError, match="nothing to check"):
        failures(path)
