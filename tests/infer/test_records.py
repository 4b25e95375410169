"""Records of measurements: another setup's are kept, a torn line is cut off."""

from infer.records import Records


def test_records_of_another_setup_are_kept_but_not_seen(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    Records(path, "a").add(("gsm8k", 0, "plain", 0), {"tokens": [1]})
    other = Records(path, "b")
    assert ("gsm8k", 0, "plain", 0) not in other
    other.add(("gsm8k", 0, "plain", 0), {"tokens": [2]})
    assert Records(path, "a")["gsm8k", 0, "plain", 0]["tokens"] == [1]
    assert Records(path, "b")["gsm8k", 0, "plain", 0]["tokens"] == [2]


def test_only_a_torn_last_line_is_cut_off_and_in_place(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    records = Records(path, "a")
    records.add(("x",), {"n": 1})
    records.add(("y",), {"n": 2})
    whole = path.read_bytes()
    cuts = []
    monkeypatch.setattr("infer.records.os.truncate", lambda *at: cuts.append(at))
    monkeypatch.setattr(type(path), "write_bytes", None)
    assert Records(path, "a")["y",]["n"] == 2 and not cuts
    monkeypatch.undo()
    with path.open("ab") as file:
        file.write(whole[: len(whole) // 2 - 3])
    kept = Records(path, "a")
    assert path.read_bytes() == whole and ("x",) in kept and ("y",) in kept
