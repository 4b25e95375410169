"""Packed files train as the lines they hold; mixtures keep their weights and resume exactly."""

import json
from collections import Counter

import numpy as np
import pytest

from dscout_jax.errors import UserError
from train.dataset import batches, load_rows, pack
from train.paths import place

S = 24


def write(path, first, count):
    rng = np.random.default_rng(first)
    with open(path, "w") as file:
        for i in range(first, first + count):
            # The row of number i is known by its first token.
            row = {"prompt_tokens": [i, 5], "answer_tokens": rng.integers(2, 46, 2 + i % 30).tolist()}
            file.write(json.dumps({"id": f"{i}"} | row) + "\n")
    return path


@pytest.fixture
def files(tmp_path):
    return write(tmp_path / "a.jsonl", 0, 20), write(tmp_path / "b.jsonl", 100, 12)


def test_a_packed_file_gives_the_rows_and_the_digest_of_its_lines(files, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        # Packing is for files that memory does not hold.
        for name in ("read_bytes", "read_text"):
            patch.setattr(type(place(files[0])), name, None)
        packed = pack(files[:1], tmp_path / "deep" / "a.array_record")
    plain, found = (load_rows(path, S, heldout=4) for path in (files[0], packed))
    assert plain.digest == found.digest and len(found.train) == len(plain.train) == 16
    for part in ("train", "heldout"):
        for one, other in zip(getattr(plain, part), getattr(found, part), strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)
    joined = load_rows(pack(files, tmp_path / "all.array_record"), S, heldout=0)
    assert sorted(int(row.tokens[0]) for row in joined.train) == [*range(20), *range(100, 112)]
    assert len({int(row.row_ids) for row in joined.train}) == 32


def test_rows_without_an_anchor_are_left_out_and_counted(tmp_path):
    sizes = ((3, 5), (3, 1), (23, 9), (22, 9))
    rows = [{"prompt_tokens": [7] * p, "answer_tokens": [8] * a} for p, a in sizes]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_rows(tmp_path / "a.jsonl", S, heldout=0)
    assert found.left_out == 2 and sorted(row.answer.sum() for row in found.train) == [2, 5]


def test_packing_refuses_before_it_writes(files, tmp_path):
    (tmp_path / "bad.jsonl").write_text('\n{"id": "1"}\n')
    packed = pack(files, tmp_path / "all.array_record")
    for answers, out, said in (
        (files, tmp_path / "all.array_record", "exists"),
        (files, tmp_path / "all.bin", "ends with"),
        ([*files, tmp_path / "bad.jsonl"], tmp_path / "new.array_record", "bad.jsonl:2 lacks"),
        ([tmp_path / "none.jsonl"], tmp_path / "new.array_record", "is no file"),
    ):
        with pytest.raises(UserError, match=said):
            pack(answers, out)
    assert {p.name for p in tmp_path.iterdir()} == {
        "a.jsonl",
        "b.jsonl",
        "bad.jsonl",
        "all.array_record",
        "all.array_record.json",
    }
    packed.write_bytes(b"")
    with pytest.raises((UserError, RuntimeError)):
        load_rows(packed, S, heldout=0)


def test_a_mixture_keeps_its_weights_and_resumes_exactly(files, tmp_path):
    packed = pack(files[1:], tmp_path / "b.array_record")
    data = ((str(files[0]), 3.0), (str(packed), 1.0))
    rows = load_rows(data, S, heldout=4)
    assert rows.digest != load_rows(((str(files[0]), 1.0), (str(packed), 1.0)), S, heldout=4).digest
    assert len(rows.train) == 28 and len(rows.heldout) == 4
    iterator = batches(rows.train, 8, seed=3, shares=rows.shares)
    seen = [next(iterator) for _ in range(20)]
    tokens = np.concatenate([batch.tokens[:, 0] for batch in seen])
    assert (tokens >= 100).sum() == 40
    # Within a file all rows come before one comes again.
    few = Counter(tokens[tokens < 100][: len(rows.shares[0][1])].tolist())
    assert set(few.values()) == {1}
    state, ahead = iterator.get_state(), [next(iterator).row_ids for _ in range(5)]
    again = batches(rows.train, 8, seed=3, shares=rows.shares)
    again.set_state(json.loads(json.dumps(state)))
    np.testing.assert_array_equal(ahead, [next(again).row_ids for _ in range(5)])
    # A process that holds some of a batch's rows reads those of the whole batch.
    some = batches(rows.train, 8, seed=3, own=np.array([1, 6]), shares=rows.shares)
    np.testing.assert_array_equal(next(some).row_ids, seen[0].row_ids[[1, 6]])
    with pytest.raises(UserError, match=r"a.jsonl has 20 usable rows"):
        load_rows(((str(files[0]), 1.0), (str(packed), 1.0)), S, heldout=32)
