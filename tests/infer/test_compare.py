"""Comparing benchmarks prompt by prompt, and the gate."""

import json

import pytest

from dscout_jax.errors import UserError
from infer.compare import compare, failures, load_cells, table
from infer.figures import COUNTS, counts

SETTINGS = {"target_fingerprint": "t", "dtype": "float32", "temperature": 0.0, "concurrency": 1}


def write(folder, accepted, seconds, prompt="p", drafter="mine", turn=0, machine="here", **settings):
    """A result of one dataset at B = 4; plain decoding takes 1 s a token. Later turns join the same row."""
    folder.mkdir(exist_ok=True)
    path = folder / "rows.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    if not rows or rows[-1]["drafter"] != drafter:
        columns = {name: [] for name in ("conversation", "turn", "prompt", *COUNTS)}
        head = {"dataset": "maths", "drafter": drafter, "block_size": 4, "answers": columns}
        rows.append(SETTINGS | settings | head)
    for i, (a, s) in enumerate(zip(accepted, seconds, strict=True)):
        tokens = list(range(sum(a) + len(a) + 1))
        plain = {"tokens": tokens, "accepted": [], "decode_seconds": len(tokens) - 1.0}
        spec = {"tokens": tokens, "accepted": a, "decode_seconds": s}
        [counted] = counts([plain], [spec])
        for column, value in zip(
            rows[-1]["answers"].values(), (i, turn, f"{prompt}{i}", *counted), strict=True
        ):
            column.append(value)
    path.write_text(json.dumps({"machine": {"cpu": machine}, "rows": rows}))
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
    # Differences likewise; tau is of the answers' own, 1.5 and 3, then 2 and 4.
    assert row["mat"]["difference"] == pytest.approx(16 / 5 - 12 / 5)
    assert row["mat"]["difference_low"] == pytest.approx(4 / 2 - 3 / 2)
    assert row["mat"]["difference_high"] == pytest.approx(12 / 3 - 9 / 3)
    assert (row["tau"]["first"], row["tau"]["second"]) == pytest.approx((2.25, 3))
    (same,) = compare(a, a)
    assert all(same[name][k] == 1 for name in ("mat", "speedup") for k in ("ratio", "low", "high"))
    text = table([row])
    assert (
        "| maths | mine | 4 | 2 | mat | 2.40 | 3.20 | x1.333 (1.333 to 1.333) | +0.80 (+0.50 to +1.00) |"
        in text
    )
    assert "| x1.000 (1.000 to 1.000) | +0.00 (+0.00 to +0.00) |" in table([same])


def test_the_file_that_is_named_is_read(tmp_path):
    folder = write(tmp_path / "a", [[3]], [1.0])
    merged = tmp_path / "report.json"
    (folder / "rows.json").rename(merged)
    write(folder, [[0]], [1.0])
    ((cell, found),) = load_cells(merged).items()
    assert cell == ("maths", "mine", 4) and found.answers[0][0].counts == (4, 1, 1.0, 4, 4.0)
    (row,) = compare(folder, merged)
    assert (row["mat"]["first"], row["mat"]["second"]) == (1, 4)


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
    (row,) = compare(a, write(tmp_path / "e", [[0]], [1.0], machine="there", plain_rows=2))
    assert row["differs"] == {"plain_rows": [None, 2], "machine's cpu": ["here", "there"]}
    with pytest.raises(UserError, match="concurrency 1 and 4"):
        compare(a, write(tmp_path / "c", [[0]], [1.0], concurrency=4))


def test_what_cannot_be_compared_is_named(tmp_path):
    a = write(tmp_path / "a", [[0]], [1.0])
    other = write(tmp_path / "b", [[0]], [1.0], prompt="q")
    with pytest.raises(UserError, match="prompt 0 of 'maths' is another"):
        compare(a, other)
    with pytest.raises(UserError, match="none is no result"):
        compare(a, tmp_path / "none")
    (tmp_path / "c").mkdir()
    for text, said in (
        ((a / "rows.json").read_text().replace("maths", "chat"), "no dataset"),
        ((a / "rows.json").read_text().replace("answers", "anything"), "holds no answers"),
        ('{"rows": 3}', "its rows are no list"),
        ("x", "run to its end"),
    ):
        (tmp_path / "c" / "rows.json").write_text(text)
        with pytest.raises(UserError, match=said):
            compare(a, tmp_path / "c")
    # A report of bf16 and fp32 holds each cell twice.
    document = json.loads((a / "rows.json").read_text())
    (tmp_path / "c" / "rows.json").write_text(json.dumps(document | {"rows": document["rows"] * 2}))
    with pytest.raises(UserError, match="mine B=4 on maths twice"):
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
    for text in ("x", "[]", '{"rows": [{"dtype": 1}]}', '{"rows": [3]}', '{"rows": {}}'):
        path.write_text(text)
        with pytest.raises(UserError, match="no result"):
            failures(path, identical=True)
    # What is not asked for need not be there; what is asked for is missed by its name.
    path.write_text(json.dumps({"rows": [hot, {k: v for k, v in hot.items() if k != "mat"}]}))
    assert failures(path, min_speedup=0.9) == []
    with pytest.raises(UserError, match="row 1 is no result of `dscout bench`: no mat"):
        failures(path, min_mat=2.0)
    path.write_text(json.dumps({"rows": [hot | {"speedup": None}]}))
    with pytest.raises(UserError, match="no speedup"):
        failures(path, identical=True)
    with pytest.raises(UserError, match="nothing to check"):
        failures(path)
