"""Workloads from files, folders and (a stand-in for) Hugging Face's hub."""

import json
import sys
from types import ModuleType

import pytest

from dscout_jax.errors import UserError
from infer.workload import first_turns, load_workloads, order


def write(path, *conversations):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in conversations))
    return path


def test_files_and_folders(tmp_path):
    chat = write(tmp_path / "sets" / "chat.jsonl", ["Hi", "And?"], ["Why?"])
    write(tmp_path / "sets" / "maths.jsonl", ["1 + 1"])
    found = {"chat": [("Hi", "And?"), ("Why?",)], "maths": [("1 + 1",)]}
    assert load_workloads([tmp_path / "sets"]) == found
    assert load_workloads([chat]) == {"chat": found["chat"]}
    assert first_turns(chat) == ["Hi", "Why?"]
    with pytest.raises(UserError, match="two workloads are called 'chat'"):
        load_workloads([tmp_path / "sets", chat])


def test_what_cannot_be_read_is_named(tmp_path):
    for sources, message in (
        ([], "one or more"),
        ([tmp_path / "none.jsonl"], "no file"),
        ([tmp_path], r"holds no \*.jsonl"),
        ([write(tmp_path / "a" / "odd.jsonl", ["Hi"], "Hi")], "row 1 lacks"),
        ([write(tmp_path / "a" / "empty.jsonl")], "no conversation"),
        (["hf:a:b:c:d"], "is not hf:NAME"),
        (["hf:"], "is not hf:NAME"),
    ):
        with pytest.raises(UserError, match=message):
            load_workloads(sources)


def test_a_sample_is_the_same_each_time_and_grows(tmp_path):
    assert order(4, None) == [0, 1, 2, 3]
    assert order(50, 7) == order(50, 7) != order(50, 8)
    assert sorted(order(50, 7)) == list(range(50))


class Rows(dict):
    column_names = property(list)


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`; returns what it was asked for."""
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        if names[0] == "nobody/nothing":
            raise ConnectionError("no network")
        return Rows(turns=[["Hi", "And?"]], question=["1 + 1"], number=[3])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_datasets_by_name(hub):
    assert load_workloads(["hf:who/chat"]) == {"chat": [("Hi", "And?")]}
    assert load_workloads(["hf:who/gsm8k/main:train:question"]) == {"gsm8k": [("1 + 1",)]}
    assert load_workloads(["hf:plain::question"]) == {"plain": [("1 + 1",)]}
    assert hub == [("who/chat", "test"), ("who/gsm8k", "main", "train"), ("plain", "test")]
    with pytest.raises(UserError, match="columns turns, question, number; name one: hf:who/chat:test:COLUMN"):
        load_workloads(["hf:who/chat:test:text"])
    with pytest.raises(UserError, match="number of row 0 lacks"):
        load_workloads(["hf:who/chat:test:number"])
    with pytest.raises(UserError, match="no network"):
        load_workloads(["hf:nobody/nothing"])


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"dscout-jax\[datasets\]"):
        load_workloads(["hf:who/chat"])
