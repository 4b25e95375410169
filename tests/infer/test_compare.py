"""Comparing benchmarks prompt by prompt, and the gate."""

import json

import pytest

from dscout_jax.errors import UserError
from infer.compare import compare, failures, load_cells, table

ABOUT = {"dtype": "float32", "temperature": 0.0, "concurrency": 1}


def write(folder, accepted, seconds, setup="s", prompt="p", drafter="mine", turn=0, **about):
    """Records of one dataset at B = 4; plain decoding takes 1 s a token."""
    folder.mkdir(exist_ok=True)
    with open(folder / "records.jsonl", "a") as file:
        head = {"setup": setup, "key": ["setup"], "about": ABOUT | about}
        file.write(json.dumps(head) + "\n")
        for i, (a, s) in enumerate(zip(accepted, seconds, strict=True)):
            tokens = list(range(sum(a) + len(a) + 1))
            shared = {"setup": setup, "tokens": tokens, "prompt": f"{prompt}{i}"}
            plain = {"key": ["maths", i, turn, "plain"], "accepted": [], "decode_seconds": len(tokens) - 1.0}
            spec = {
                "key": ["maths", i, turn, "speculative", f"{drafter}@{setup}", 4],
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
    about, cells = load_cells(folder)
    assert about == ABOUT and cells["maths", "mine", 4][0][0]["accepted"] == [0]


def test_later_turns_count_while_both_were_asked_the_same(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, second in ((a, "q"), (b, "another answer before it")):
        write(folder, [[3], [1]], [1.0, 1.0], prompt="p")
        write(folder, [[3], [3]], [1.0, 1.0], prompt=second, turn=1)
    (row,) = compare(a, a)
    assert row["n"] == 4 and row["mat"]["first"] == pytest.approx(14 / 4)
    (row,) = compare(a, b)
    assert row["n"] == 2 and row["mat"]["first"] == pytest.approx(6 / 2)


def test_unlike_settings_are_named_and_unlike_queues_refused(tmp_path):
    a = write(tmp_path / "a", [[0]], [1.0])
    (row,) = compare(a, write(tmp_path / "b", [[0]], [1.0], temperature=0.7))
    assert row["differs"] == {"temperature": [0.0, 0.7]}
    assert "Not alike: temperature 0.0 -> 0.7." in table([row])
    with pytest.raises(UserError, match="concurrency 1 and 4"):
        compare(a, write(tmp_path / "c", [[0]], [1.0], concurrency=4))


def test_what_cannot_be_compared_is_named(tmp_path):
    a = write(tmp_path / "a", [[0]], [1.0])
    other = write(tmp_path / "b", [[0]], [1.0], prompt="q")
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
            "temperature": 0.0,
            "concurrency": 1,
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
    # Each temperature and concurrency answers for itself.
    hot = rows[0] | {"temperature": 0.7, "speedup": 0.9}
    queued = rows[0] | {"concurrency": 4, "speedup": 0.8}
    path.write_text(json.dumps({"rows": [*rows, hot, queued]}))
    reasons = failures(path, min_speedup=1.0)
    assert [reason.split(" at B")[0] for reason in reasons] == [
        "mine on maths in float32, temperature 0.7",
        "mine on maths in float32, concurrency 4",
    ]
    path.write_text('{"rows": []}')
    assert failures(path, identical=True) == ["it holds no rows"]
    for text in ("x", "[]", '{"rows": [{"dtype": 1}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="no result"):
            failures(path, identical=True)
    with pytest.raises(UserError, match="nothing to check"):
        failures(path)
