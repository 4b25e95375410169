"""Interrupted work goes on exactly: answers without a hole or a duplicate, training bit by bit."""

import dataclasses
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import load_draft_ids, load_drafter, load_provenance
from dscout_jax.models import Target
from dscout_jax.objective import published_dscout
from dscout_jax.sharding import make_mesh
from train.dataset import load_rows
from train.loop import train
from train.regenerate import regenerate
from train.settings import TrainSettings

CONFIG = TargetConfig(48, 32, 64, 5, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, False, True, (1,))


@pytest.fixture(scope="module")
def target():
    """A tiny loaded target whose chat template is the bytes of the text."""
    params = Target(CONFIG).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    tokenizer = SimpleNamespace(
        stop_ids=(1,),
        special_ids={},
        chat=lambda turns, thinking=None: [2 + b % 44 for t in turns for b in t["content"].encode()],
        decode=lambda ids: " ".join(map(str, ids)),
        show_mask=lambda ids, mask: str((ids, mask)),
    )
    return SimpleNamespace(config=CONFIG, params=params, tokenizer=tokenizer, name="tiny", fingerprint="f00d")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "turns": ["word " * (1 + i % 5) + str(i)]} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_resume_without_hole_or_duplicate(target, prompts, tmp_path, temperature):
    options = {"max_new_tokens": 6, "batch": 4, "temperature": temperature}
    whole = regenerate(target, prompts, tmp_path / "whole.jsonl", **options).read_text()
    lines = whole.splitlines(keepends=True)
    assert sorted(json.loads(line)["id"] for line in lines) == sorted(map(str, range(10)))
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines[:3]) + lines[3][:20])
    again = regenerate(target, prompts, torn, **options).read_text().splitlines(keepends=True)
    assert sorted(again) == sorted(lines)
    with pytest.raises(UserError, match="max_new_tokens"):
        regenerate(target, prompts, torn, **options | {"max_new_tokens": 7})
    with pytest.raises(UserError, match=r"'dtype': 'float32'.*bfloat16"):
        regenerate(target, prompts, torn, **options, dtype=jnp.bfloat16)
    # Rows from before dtypes were recorded are kept as they are.
    old = [json.dumps({k: v for k, v in json.loads(line).items() if k != "dtype"}) + "\n" for line in again]
    torn.write_text("".join(old[:5]))
    mended = regenerate(target, prompts, torn, **options).read_text().splitlines(keepends=True)
    assert mended[:5] == old[:5] and sorted(mended[5:]) == sorted(again[5:])
    torn.write_text("".join(again))
    if temperature == 0:
        shards = [
            regenerate(target, prompts, tmp_path / "s.jsonl", shard=(i, 3), **options) for i in range(3)
        ]
        assert [path.name for path in shards] == [f"s.{i}-of-3.jsonl" for i in range(3)]
        assert sorted("".join(path.read_text() for path in shards).splitlines(keepends=True)) == sorted(lines)
        spread = regenerate(target, prompts, tmp_path / "spread.jsonl", mesh=make_mesh(2, 2, 2), **options)
        assert sorted(spread.read_text().splitlines(keepends=True)) == sorted(lines)
        with pytest.raises(UserError, match="shard 3/3"):
            regenerate(target, prompts, tmp_path / "s.jsonl", shard=(3, 3), **options)
    assert torn.read_text() == "".join(again)


def test_later_turns_follow_the_targets_own_answers(target, tmp_path):
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked.write_text('{"id": "a", "turns": ["one", "two", "three"]}\n{"id": "b", "turns": ["four"]}\n')
    options = {"max_new_tokens": 4, "batch": 2}
    text = regenerate(target, asked, out, **options).read_text()
    rows = {row["id"]: row for row in map(json.loads, text.splitlines())}
    assert set(rows) == {"a", "b", "a#2", "a#3"}
    said = target.tokenizer.decode(rows["a"]["answer_tokens"])
    turns = [{"content": part} for part in ("one", said, "two")]
    assert rows["a#2"]["prompt_tokens"] == target.tokenizer.chat(turns)
    out.write_text("".join(line for line in text.splitlines(keepends=True) if '"a#2"' not in line))
    again = regenerate(target, asked, out, **options).read_text()
    assert sorted(again.splitlines()) == sorted(text.splitlines())
    # No room is left for the second turn: it is left out, the first is not lost.
    asked.write_text(json.dumps({"id": "long", "turns": ["x" * 150, "y" * 150]}))
    only = regenerate(target, asked, tmp_path / "long.jsonl", **options).read_text()
    assert [json.loads(line)["id"] for line in only.splitlines()] == ["long"]
    asked.write_text(json.dumps({"id": "long", "turns": ["x" * 300]}))
    with pytest.raises(UserError, match="has room"):
        regenerate(target, asked, tmp_path / "no.jsonl", **options)


def test_bad_prompt_files_are_refused(target, tmp_path):
    for text, said in (('{"turns": []}', "turns"), ("nonsense", "no JSON"), ("", "no prompts")):
        (tmp_path / "p.jsonl").write_text(text)
        with pytest.raises(UserError, match=said):
            regenerate(target, tmp_path / "p.jsonl", tmp_path / "out.jsonl")
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"something": 1}\n')
    (tmp_path / "p.jsonl").write_text('{"turns": ["hello"]}')
    with pytest.raises(UserError, match="no file of answers"):
        regenerate(target, tmp_path / "p.jsonl", foreign)
    assert foreign.read_text() == '{"something": 1}\n'


def test_training_resumes_bit_by_bit_and_refuses_another_contract(target, tmp_path):
    rng = np.random.default_rng(0)
    with open(tmp_path / "answers.jsonl", "w") as file:
        for i in range(24):
            row = {"id": i, "prompt_tokens": [3, 4, 5], "answer_tokens": rng.integers(2, 46, 20).tolist()}
            file.write(json.dumps(row) + "\n")
    settings = TrainSettings(
        objective=published_dscout(4),
        data=str(tmp_path / "answers.jsonl"),
        run=str(tmp_path / "straight"),
        num_layers=1,
        block_size=4,
        target_layer_ids=(1, 3),
        mask_token_id=47,
        seq_len=32,
        batch=8,
        num_anchors=4,
        steps=6,
        heldout=4,
        eval_every=3,
        save_every=6,
        chunk=64,
    )
    _, straight = load_drafter(train(settings, target))
    broken = dataclasses.replace(settings, run=str(tmp_path / "broken"))
    # No time at all: stops before the first step, and saves.
    train(broken, target, minutes=0.0)
    kept = (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert '"loss"' not in kept
    # The halfway checkpoint is what a kill between steps 3 and 6 would leave.
    train(broken, target)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "6")
    _, resumed = load_drafter(train(broken, target))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    assert "mat" in load_provenance(train(broken, target))["heldout"]  # finished: nothing is done again
    logged = [json.loads(line) for line in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in logged if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in logged if "eval" in r] == [0, 3, 6]
    changed = dataclasses.replace(broken, learning_rate=1e-5)
    with pytest.raises(UserError, match="--accept learning_rate"):
        train(changed, target)
    with pytest.raises(UserError, match="rate_of_learning"):
        train(changed, target, accept=("rate_of_learning",))
    for wrong in ({"block_size": 5}, {"mask_token_id": 46}, {"target_layer_ids": (1, 2)}, {"num_layers": 2}):
        (name,) = wrong
        with pytest.raises(
            UserError, match=rf"contract \({name}: [^;]*\); name another run folder, with init="
        ):
            train(dataclasses.replace(broken, **wrong), target)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "6")
    _, other = load_drafter(train(changed, target, accept=("learning_rate",)))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(resumed), strict=True))
    with pytest.raises(UserError, match="learning_rate"):  # the newest checkpoint holds the new contract
        train(broken, target)
    # A run may start from what another one ended with; no step moves it, so it comes out as it went in.
    warm = dataclasses.replace(settings, run=str(tmp_path / "warm"), init=str(tmp_path / "straight/drafter"))
    folder = train(warm, target, minutes=0.0)
    jax.tree.map(np.testing.assert_array_equal, straight, load_drafter(folder)[1])
    assert load_provenance(folder)["started_from"]["steps"] == 6 and load_draft_ids(folder) is None
    few = dataclasses.replace(warm, run=str(tmp_path / "few"), train_vocab="seen", draft_vocab=7)
    kept = load_draft_ids(train(few, target, minutes=0.0))
    rows = load_rows(settings.data, settings.seq_len, settings.heldout).train
    counts = Counter(t for row in rows for t in row.tokens[row.answer].tolist())
    assert len(kept) == 7 and min(counts[i] for i in kept) >= max(counts[i] for i in counts if i not in kept)
    with pytest.raises(UserError, match="mask_token_id"):
        train(dataclasses.replace(warm, run=str(tmp_path / "other"), mask_token_id=46), target)
    with pytest.raises(UserError, match=r"nowhere/config\.json"):
        train(dataclasses.replace(warm, run=str(tmp_path / "none"), init="nowhere"), target)
