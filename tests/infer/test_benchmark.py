"""The benchmark's rows, its resuming, and what its report makes of them."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.errors import UserError
from infer.benchmark import BenchmarkSettings, benchmark, make_gap
from infer.load import load_decoder
from infer.records import Records
from infer.report import report

ISSUE_ROW = {
    *(
        "dataset",
        "dtype",
        "n",
        "temperature",
        "block_size",
        "drafter",
        "plain_tokens_per_s",
        "speculative_tokens_per_s",
    ),
    *("speedup", "mat", "tau", "identical", "max_new_tokens", "survival", "plain_rows"),
}


@pytest.fixture
def settings(folders, prompt_file, tmp_path):
    target, drafter = folders
    return BenchmarkSettings(
        prompts=(prompt_file,),
        drafters=(str(drafter),),
        target=str(target),
        dtype="float32",
        block_sizes=(2, 4),
        max_new_tokens=8,
        max_prompt_tokens=200,
        plain_rows=1,
        same_program="none",
        out=tmp_path / "out",
    )


def test_rows_resume_and_report(settings, tmp_path):
    log = []
    rows = benchmark(settings, log.append)
    assert [row["block_size"] for row in rows] == [2, 4]
    for row in rows:
        assert set(row) >= ISSUE_ROW
        assert (row["dataset"], row["n"], row["skipped"], row["identical"]) == ("questions", 3, 1, 3)
        assert row["divergence_rate"] == 0 and row["logit_gap_max"] is None
        assert np.isclose(row["mat"], 1 + sum(row["survival"]))
        assert np.isclose(row["speedup"], row["speculative_tokens_per_s"] / row["plain_tokens_per_s"])
    assert len(log) == 3

    # A kill in the middle of the last line: what was whole is kept, what was not is measured again.
    path = settings.out / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    again = benchmark(settings, log.append)
    lines = path.read_text().split("\n")[:-1]
    assert lines[:-1] == whole.split("\n")[:-2]
    keys = [tuple(json.loads(line)["key"]) for line in lines]
    assert len(keys) == len(set(keys)) == 3 * 3
    assert [row["mat"] for row in again] == [row["mat"] for row in rows]

    text = report([settings.out, settings.out], tmp_path / "both")
    assert text.count("\n| questions |") == 4 and "3/3" in text
    assert (tmp_path / "both.png").stat().st_size > 1000
    document = json.loads((tmp_path / "both.json").read_text())
    assert [row["block_size"] for row in document["rows"]] == [2, 4, 2, 4]

    other = settings.out.with_name("other")
    other.mkdir()
    document["machine"]["cpu"] = "another"
    (other / "rows.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="unlike machines"):
        report([settings.out, other], tmp_path / "no")
    assert json.loads((settings.out / "rows.json").read_text())["machine"]["backend"] == "cpu"


def test_records_of_another_setup_are_kept_but_not_seen(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    Records(path, "a").add(("gsm8k", 0, "plain", 0), {"tokens": [1]})
    other = Records(path, "b")
    assert ("gsm8k", 0, "plain", 0) not in other
    other.add(("gsm8k", 0, "plain", 0), {"tokens": [2]})
    assert Records(path, "a")["gsm8k", 0, "plain", 0]["tokens"] == [1]
    assert Records(path, "b")["gsm8k", 0, "plain", 0]["tokens"] == [2]


def test_bf16_is_identical_through_the_same_program(settings):
    options = dict(dtype="bfloat16", plain_rows=None, limit=2, same_program="all")
    for row in benchmark(dataclasses.replace(settings, **options), str):
        assert row["identical_same_program"] == row["n"] == 2
        assert row["identical"] + round(row["divergence_rate"] * row["n"]) == row["n"]
        assert row["plain_rows"] in (1, 2)


def test_drafters_compete_beside_one_baseline_and_may_come_later(settings):
    (folder,) = settings.drafters
    first = benchmark(dataclasses.replace(settings, limit=1), str)
    all_of_them = dataclasses.replace(settings, limit=1, drafters=(folder, "lookup", f"{folder}+lookup"))
    rows = benchmark(all_of_them, str)
    names = [(row["drafter"], row["block_size"]) for row in rows]
    assert names == [(n, b) for n in ("drafter", "lookup", "drafter+lookup") for b in (2, 4)]
    assert all(row["identical"] == row["n"] == 1 for row in rows)
    assert len({row["plain_tokens_per_s"] for row in rows}) == 1 and rows[:2] == first
    assert rows[4]["provenance"] == rows[0]["provenance"] != {} == rows[2]["provenance"]
    with pytest.raises(UserError, match="each once"):
        benchmark(dataclasses.replace(settings, drafters=(folder, folder)), str)


def test_gap_is_between_the_two_best_logits(folders):
    _, decoder = load_decoder(folders[0], dtype="float32")
    ids = [5, 9, 2, 7]
    params = decoder.weights.target
    hidden = decoder.target.apply({"params": params}, jnp.array([ids])).hidden[0, -1]
    second, first = np.sort(np.asarray(params["embed_tokens"]["weight"] @ hidden))[-2:]
    assert np.isclose(make_gap(decoder.target)(params, ids), first - second, atol=1e-4)


def test_wrong_inputs_are_named(settings, tmp_path):
    missing = dataclasses.replace(settings, prompts=(tmp_path / "none.jsonl",))
    with pytest.raises(UserError, match=r"none\.jsonl is no file"):
        benchmark(missing, str)
    with pytest.raises(UserError, match="dtype 'float16'"):
        benchmark(dataclasses.replace(settings, dtype="float16"), str)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="turns"):
        benchmark(dataclasses.replace(settings, prompts=(bad,)), str)
    with pytest.raises(UserError, match=r"rows\.json"):
        report([tmp_path], tmp_path / "no")
