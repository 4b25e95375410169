"""The laboratory's documents and its target."""

import json
from itertools import islice

import jax.numpy as jnp
import pytest

from dscout_jax.errors import UserError
from dscout_jax.interop import default_mask_id, load_target
from train.lab.records import NOTATIONS, records
from train.lab.target import SEQ, make_lab, make_tokenizer


def test_documents_repeat_by_seed_and_follow_their_header():
    first = list(islice(records(7), 50))
    assert first == list(islice(records(7), 50)) != list(islice(records(8), 50))
    for record in first:
        for value in (record.name, record.city, str(record.age), str(record.score), *record.tags):
            assert value in record.header and value in record.body
        assert f"order={','.join(record.order)}" in record.header
    assert {notation for record in first for notation in record.order} == set(NOTATIONS)
    assert len({record.body for record in first}) == 50


def test_documents_fit_the_sequence():
    texts = [f"{r.header}\n{r.body}" for r in islice(records(3), 400)]
    tokenizer = make_tokenizer(texts)
    lengths = [len(tokenizer.encode(text).ids) for text in texts]
    assert tokenizer.get_vocab_size() == 512
    assert max(lengths) < SEQ and sum(lengths) / len(lengths) > 100
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in texts[:20])


def test_lab_makes_a_target_that_loads_and_is_kept(tmp_path):
    make_lab(tmp_path / "lab", steps=2, batch=2, prompts=5, heldout=3)
    target = load_target(tmp_path / "lab" / "target", jnp.float32)
    assert default_mask_id(target) == target.tokenizer.special_ids["mask_token"]
    assert target.tokenizer.stop_ids == (target.tokenizer.special_ids["eos_token"],)
    rows = [json.loads(line) for line in (tmp_path / "lab" / "prompts.jsonl").read_text().splitlines()]
    heldout = (tmp_path / "lab" / "heldout.jsonl").read_text()
    answers = [json.loads(line) for line in (tmp_path / "lab" / "answers.jsonl").read_text().splitlines()]
    assert {row["id"] for row in answers} == {row["id"] for row in rows}
    assert len(rows) == 5 and not any(row["turns"][0] in heldout for row in rows)
    text = target.tokenizer.decode(target.tokenizer.chat([{"role": "user", "content": rows[0]["turns"][0]}]))
    assert text == rows[0]["turns"][0] + "\n"
    make_lab(tmp_path / "lab", steps=50, prompts=5, heldout=3)
    assert load_target(tmp_path / "lab" / "target", jnp.float32).fingerprint == target.fingerprint
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        make_lab(tmp_path / "file")
