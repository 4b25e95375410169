"""The benchmark's rows, its resuming, and what its report makes of them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.decode import Decoder, serve
from dscout_jax.errors import UserError
from dscout_jax.interop import load_drafter, save_drafter
from infer import machine
from infer.benchmark import BenchmarkSettings, benchmark
from infer.compare import compare
from infer.contest import Contest, Terms, make_gap
from infer.load import encode_prompt, load_decoder
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
    *("speedup", "mat", "tau", "identical", "max_new_tokens", "survival", "plain_rows", "concurrency"),
    *("speedup_of_means", "speedup_spread", "mat_spread", "histogram", "prefill_ms", "identical_percent"),
    *("draft_ms", "verify_ms", "other_ms", "first_divergence_median", "conversations", "seed", "thinking"),
    *("plain_tokens_per_s_spread", "speculative_tokens_per_s_spread", "tau_spread", "plain_measured_beside"),
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
        max_turns=1,
        max_prompt_tokens=200,
        prompt_bucket=256,
        plain_rows=1,
        same_program="none",
        parts=False,
        out=tmp_path / "out",
    )


def test_rows_resume_and_report(settings, tmp_path):
    settings = dataclasses.replace(settings, parts=True)
    log = []
    rows = benchmark(settings, log.append)
    assert [row["block_size"] for row in rows] == [2, 4]
    for row in rows:
        assert set(row) >= ISSUE_ROW
        assert (row["dataset"], row["n"], row["skipped"], row["identical"]) == ("questions", 3, 1, 3)
        assert row["divergence_rate"] == 0 and row["logit_gap_max"] is row["first_divergence_min"] is None
        assert np.isclose(row["mat"], 1 + sum(row["survival"]))
        assert np.isclose(row["mat"], 1 + np.average(range(row["block_size"]), weights=row["histogram"]))
        assert min(row["draft_ms"], row["verify_ms"], row["prefill_ms"]) > 0
        assert row["speedup_spread"][0] <= row["speedup"] <= row["speedup_spread"][1]
        assert np.isclose(row["speedup"], row["speculative_tokens_per_s"] / row["plain_tokens_per_s"])
    assert len(log) == 3
    spoken = [r for r in recorded(settings) if r["key"][3:4] == ["speculative"] and r["key"][-1] == 4]
    tokens, rounds = sum(len(r["tokens"]) - 1 for r in spoken), sum(len(r["accepted"]) for r in spoken)
    assert np.isclose(rows[1]["mat"], tokens / rounds), "from tokens as from rounds"

    # A kill in the middle of the last line: what was whole is kept, what was not is measured again.
    path = settings.out / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    again = benchmark(settings, log.append)
    lines = path.read_text().split("\n")[:-1]
    assert lines[:-1] == whole.split("\n")[:-2]
    keys = [tuple(json.loads(line)["key"]) for line in lines]
    assert len(keys) == len(set(keys)) == 3 * 3 + 1 + 2  # the setup, and parts of two contestants
    assert [row["mat"] for row in again] == [row["mat"] for row in rows]

    text = report([settings.out, settings.out], tmp_path / "both")
    assert text.count("\n| questions |") == 2 * 4 and "3/3" in text
    first, second = (text.index(name) for name in ("draft + verify + other ms", "rounds by drafts committed"))
    histogram = " ".join(map(str, rows[1]["histogram"]))
    assert first < second and f"| 100.0 |  |  | {histogram} |" in text[second:]
    low, high = rows[1]["mat_spread"]
    assert f" | {low:.2f}-{high:.2f} | " in text[second:] and f" | {again[1]['prefill_ms']:.1f} | " in text
    assert (tmp_path / "both.png").stat().st_size > 1000
    document = json.loads((tmp_path / "both.json").read_text())
    assert [row["block_size"] for row in document["rows"]] == [2, 4, 2, 4]

    [*_, side] = compare(settings.out, settings.out / "rows.json")
    assert side["n"] == 3 and side["tau"]["first"] == pytest.approx(rows[1]["tau"])
    assert side["tokens_per_s"]["first"] == pytest.approx(again[1]["speculative_tokens_per_s"])

    html = (tmp_path / "both.html").read_text()
    assert all(f"<th>{name}</th>" in html for name in ("histogram", "prefill_ms", "survival"))

    other = settings.out.with_name("other")
    other.mkdir()
    document["machine"]["cpu"] = "another"
    (other / "rows.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="unlike machines"):
        report([settings.out, other], tmp_path / "no")
    assert json.loads((settings.out / "rows.json").read_text())["machine"]["backend"] == "cpu"


def recorded(settings):
    return [json.loads(line) for line in (settings.out / "records.jsonl").read_text().splitlines()]


def test_turns_follow_plain_decodings_answers(settings, tmp_path):
    path = tmp_path / "talks.jsonl"
    talks = [["Hi", "And?", "More"], ["Why?"], ["One", "x" * 400, "Two"], ["y" * 400, "z"]]
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in talks))
    options = dict(prompts=(path,), drafters=("lookup",), block_sizes=(3,), max_turns=None)
    settings = dataclasses.replace(settings, **options)
    [row] = benchmark(settings, str)
    # Too long: the last conversation, passed over whole, and the third after its first turn.
    assert (row["n"], row["conversations"], row["skipped"], row["identical"]) == (5, 3, 1 + 2, 5)
    found = {tuple(r["key"][:4]): r for r in recorded(settings) if len(r["key"]) > 3}
    assert {key[1:3] for key in found} == {(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)}
    loaded, decoder = load_decoder(settings.target, dtype="float32")
    history = []
    for turn, text in enumerate(talks[0]):
        ids = encode_prompt(loaded, text, history=history)
        [g] = decoder.generate([ids], 8)
        for mode in ("plain", "speculative"):
            record = found["talks", 0, turn, mode]
            assert (record["tokens"], record["prompt_tokens"]) == (g.tokens, len(ids))
        history.append((text, g.text))
    [side] = compare(settings.out, settings.out)
    assert side["n"] == 5 and side["speedup"]["ratio"] == 1 and side["differs"] == {}


def test_a_queue_gives_the_same_answers_as_one_by_one(settings, monkeypatch):
    """Drawn, with a seed a prompt; the speed counts all tokens of the queues and their whole time."""
    monkeypatch.setattr("infer.benchmark.QUEUE", 1)  # two conversations, then the third
    compiled = {}

    def watched(decoder, requests, slots, *options):
        before = decoder.compilations
        yield from serve(decoder, requests, slots, *options)
        rows = min(slots, len(requests))
        compiled.setdefault((id(decoder), rows), []).append(decoder.compilations - before)

    monkeypatch.setattr("infer.contest.serve", watched)
    drawn = dataclasses.replace(settings, block_sizes=(4,), temperature=0.9, top_k=40, seed=5, max_turns=2)
    [alone] = benchmark(drawn, str)
    first = recorded(drawn)
    queued = dataclasses.replace(drawn, concurrency=2, same_program="all", out=drawn.out.with_name("queue"))
    [row] = benchmark(queued, str)
    assert row["identical"] == row["identical_same_program"] == row["n"] == alone["n"] == 6
    assert (row["temperature"], row["concurrency"], row["mat"]) == (0.9, 2, alone["mat"])
    second = recorded(queued)

    def tokens(rows):
        return {tuple(r["key"][:4]): r["tokens"] for r in rows if "tokens" in r}

    assert tokens(first).items() <= tokens(second).items()
    assert len({str(t) for t in tokens(first).values()}) > 3
    queues = [r for r in second if r["key"][2:3] == ["queue"] and r["key"][4] == "plain"]
    count = sum(len(t) for key, t in tokens(second).items() if key[3] == "plain")
    assert np.isclose(row["plain_tokens_per_s"], count / sum(r["seconds"] for r in queues))
    assert row["speedup_spread"] is None
    # What is timed was compiled and run before: plain and speculative, two rows and one.
    assert len(compiled) == 4 and all(first > 0 == max(rest) for first, *rest in compiled.values())
    # Sides take turns by queue, every other time in the other order.
    order = [(r["key"][1], r["key"][3], r["key"][4]) for r in second if r["key"][2:3] == ["queue"]]
    sides = ("plain", "speculative")
    places = [(0, 0), (1, 0), (0, 2), (1, 2)]
    in_turns = [(*at, side) for n, at in enumerate(places) for side in sides[:: 1 - n % 2 * 2]]
    assert [one for one in order if one[2] != "same_program"] == in_turns
    [side] = compare(queued.out, queued.out)
    assert side["n"] == 6 and side["mat"]["ratio"] == 1
    with pytest.raises(UserError, match="concurrency 1 and 2"):
        compare(drawn.out, queued.out)

    before = len(second)
    assert benchmark(queued, str) == [row] and len(recorded(queued)) == before
    # A kill before a queue's last line: that queue is measured again, one answer and its seconds.
    lines = [json.dumps(r) for r in second if r["key"][:5] != ["questions", 1, "queue", 2, "speculative"]]
    assert len(lines) == before - 1
    (queued.out / "records.jsonl").write_text("\n".join(lines) + "\n")
    benchmark(queued, str)
    assert len(recorded(queued)) == before + 1
    # With other prompts in it, it is another queue.
    assert benchmark(dataclasses.replace(queued, limit=2), str)[0]["n"] == 4
    assert len(recorded(queued)) > before + 1


@pytest.mark.parametrize("concurrency", [1, 2])
def test_only_the_very_prompt_and_machine_count(settings, prompt_file, concurrency, monkeypatch):
    own = dataclasses.replace(settings, block_sizes=(4,), concurrency=concurrency, limit=2)
    benchmark(own, str)
    before = recorded(own)
    lines = prompt_file.read_text(encoding="utf-8").split("\n")
    lines[1] = json.dumps({"turns": ["Name three."]})
    prompt_file.write_text("\n".join(lines), encoding="utf-8")
    benchmark(own, str)
    anew = recorded(own)[len(before) :]
    asked = {0, 1} if concurrency > 1 else {1}
    assert {r["key"][1] for r in anew if "prompt" in r} == asked
    modes = [r["key"][3] for r in anew if "tokens" in r]
    assert sorted(set(modes)) == ["plain", "speculative"] and len(modes) == 2 * len(asked)

    here = machine.describe()
    monkeypatch.setattr("infer.benchmark.describe", lambda: here | {"cpu": "abacus"})
    before = recorded(own)
    benchmark(own, str)
    anew = recorded(own)[len(before) :]
    assert len([r for r in anew if "tokens" in r]) == 4 and anew[0]["about"]["machine"]["cpu"] == "abacus"


def test_a_sample_is_seeded(settings):
    options = dict(limit=2, drafters=("lookup",), block_sizes=(2,))
    picked = []
    for seed in (None, 1, 2):
        own = dataclasses.replace(settings, seed=seed, out=settings.out / str(seed), **options)
        benchmark(own, str)
        picked.append(tuple(sorted({r["key"][1] for r in recorded(own) if len(r["key"]) > 3})))
    assert picked[0] == (0, 1) and len(set(picked)) > 1
    assert all(len(two) == 2 and max(two) < 3 for two in picked), "the fourth is too long"


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("bfloat16", 2)])
def test_a_block_of_one_is_the_plain_baseline(settings, dtype, rows, monkeypatch):
    """1.00 but for noise; a clock that tells nothing but the form of the program leaves none."""
    generate = Decoder.generate

    def clocked(self, *args, **options):
        answers = generate(self, *args, **options)
        return [dataclasses.replace(g, decode_seconds=g.rounds * (1.0 + self.block_size)) for g in answers]

    monkeypatch.setattr(Decoder, "generate", clocked)
    ones = dict(dtype=dtype, plain_rows=rows, block_sizes=(1,), parts=rows == 2)
    [row] = benchmark(dataclasses.replace(settings, **ones), str)
    assert row["speedup"] == pytest.approx(1) == row["speedup_of_means"]
    assert row["speedup_spread"] == pytest.approx([1, 1])
    assert row["plain_tokens_per_s"] == pytest.approx(1 / (1 + rows)) and row["plain_rows"] == rows
    assert (row["identical"], row["mat"], row["tau"], row["histogram"]) == (3, 1, 1, [7 * 3])
    assert row.get("draft_ms", 0) == 0


def test_bf16_is_identical_through_the_same_program(settings, tmp_path):
    options = dict(dtype="bfloat16", plain_rows=None, limit=2, same_program="all")
    drafters = (*settings.drafters, "lookup")
    rows = benchmark(dataclasses.replace(settings, drafters=drafters, **options), str)
    # Rounds of several sizes are no one program: lookup sends two slots or four.
    checked = [row for row in rows if "identical_same_program" in row]
    assert [(row["drafter"] == "lookup", row["block_size"]) for row in checked] == [
        *((False, 2), (False, 4), (True, 2))
    ]
    for row in checked:
        assert row["identical_same_program"] == row["n"] == 2 and row["same_program_cost"] > 0
    for row in rows:
        assert row["identical"] + round(row["divergence_rate"] * row["n"]) == row["n"]
        assert row["plain_rows"] in (1, 2)
    lines = report([settings.out], tmp_path / "out").splitlines()
    at = lines[0].split(" | ").index("identical (same program)")
    assert [line.split(" | ")[at] for line in lines[2:6]] == ["2/2", "2/2", "2/2", ""]


def test_bf16_is_identical_to_plain_decoding_of_its_shape(settings):
    """A mode of plain decoding, not a check: no draft is computed."""
    alike = dict(dtype="bfloat16", plain_rows=4, block_sizes=(4,), limit=2)
    [row] = benchmark(dataclasses.replace(settings, **alike), str)
    assert row["identical"] == row["n"] == 2 and row["plain_rows"] == 4
    _, decoder = load_decoder(settings.target, settings.drafters[0])
    assert (decoder.plain_like().block_size, decoder.plain_like().drafter) == (4, None)
    _, several = load_decoder(settings.target, settings.drafters[0], smaller=(2,), min_confidence=0.5)
    with pytest.raises(UserError, match=r"\(2, 4\) have no one shape"):
        several.plain_like()


def test_drafters_compete_beside_one_baseline_and_may_come_later(settings):
    (folder,) = settings.drafters
    first = benchmark(dataclasses.replace(settings, limit=1), str)
    all_of_them = dataclasses.replace(settings, limit=1, drafters=(folder, "lookup", f"{folder}+lookup"))
    rows = benchmark(all_of_them, str)
    names = [(row["drafter"], row["block_size"]) for row in rows]
    run = Path(folder).parent.name
    assert names == [(n, b) for n in (run, "lookup", f"{run}+lookup") for b in (2, 4)]
    assert all(row["identical"] == row["n"] == 1 for row in rows)
    assert len({row["plain_tokens_per_s"] for row in rows}) == 1 and rows[:2] == first
    # Plain decoding ran beside the first alone.
    assert [row["plain_measured_beside"] for row in rows] == [1, 1, 0, 0, 0, 0]
    lines = report([settings.out], settings.out / "report").splitlines()
    assert ["* |" in line for line in lines[2:8]] == [False, False, True, True, True, True]
    assert rows[4]["provenance"] == rows[0]["provenance"] != {} == rows[2]["provenance"]
    with pytest.raises(UserError, match="each once"):
        benchmark(dataclasses.replace(settings, drafters=(folder, folder)), str)


def test_a_drafter_trained_on_is_another_one(settings, tmp_path):
    """In one folder of results, under one name; a result holds the answers of the last alone."""
    (given,) = settings.drafters
    config, params = load_drafter(given)
    run = tmp_path / "run" / "drafter"
    save_drafter(run, config, params)
    one = dataclasses.replace(settings, drafters=(str(run),), block_sizes=(4,))
    [before] = benchmark(one, str)
    save_drafter(run, config, jax.tree.map(lambda leaf: -leaf, params))
    [after] = benchmark(dataclasses.replace(one, limit=1), str)
    assert (before["drafter"], before["n"], after["drafter"], after["n"]) == ("run", 3, "run", 1)
    assert after["plain_measured_beside"] == 0
    [side] = compare(one.out, one.out)
    assert side["n"] == 1 and side["mat"]["first"] == pytest.approx(after["mat"])


class Doctored:
    """A decoder whose answers are doctored, as bf16 might."""

    def __init__(self, decoder, doctor):
        self.own, self.doctor = decoder, doctor

    def __getattr__(self, name):
        return getattr(self.own, name)

    def generate(self, prompts, *args, **options):
        answers = self.own.generate(prompts, *args, **options)
        return [self.doctor(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def test_where_outputs_part_and_how_close_the_choice_was(settings, tmp_path):
    """One answer goes astray at its fourth token, one ends after its sixth, one stays."""
    _, decoder = load_decoder(settings.target, settings.drafters[0], dtype="bfloat16", bucket=256)
    asks = {0: [5, 9, 2], 1: [7, 7, 3, 8], 2: [11, 4]}

    def doctor(prompt, answer):
        tokens = {3: [*answer.tokens[:3], answer.tokens[3] + 1, *answer.tokens[4:]], 4: answer.tokens[:6]}
        return dataclasses.replace(answer, tokens=tokens.get(len(prompt), answer.tokens))

    at = ("doctored@", 4)
    # Plain decoding of the same shape: nothing else can part.
    terms = Terms(8, plain_rows=4)
    contest = Contest(Records(tmp_path / "records.jsonl", "s"), {at: Doctored(decoder, doctor)}, terms)
    for index, prompt in asks.items():
        contest.measure("made up", 0, {index: prompt})
    row = contest.row("made up", [(0, {index: prompt}) for index, prompt in asks.items()], at)
    assert (row["identical"], row["divergence_rate"]) == (1, pytest.approx(2 / 3))
    assert (row["first_divergence_min"], row["first_divergence_median"]) == (3, 4.5)
    gap, params = make_gap(decoder.target), decoder.weights.target
    plain = [contest.records["made up", i, 0, "plain"]["tokens"] for i in asks]
    gaps = [gap(params, [*asks[i], *plain[i][:place]]) for i, place in ((0, 3), (1, 6))]
    assert row["logit_gap_max"] == max(gaps) > min(gaps) >= 0
    assert row["logit_gap_median"] == pytest.approx(sum(gaps) / 2)


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
    with pytest.raises(UserError, match="concurrency 0"):
        benchmark(dataclasses.replace(settings, concurrency=0), str)
    with pytest.raises(UserError, match="no prompt fits in 3 tokens"):
        benchmark(dataclasses.replace(settings, max_prompt_tokens=3), str)
    assert not settings.out.exists()
    with pytest.raises(UserError, match=r"rows\.json"):
        report([tmp_path], tmp_path / "no")
    (tmp_path / "rows.json").write_text('{"machine": {}, "rows": [{"mat": 1}]}')
    with pytest.raises(UserError, match="older"):
        report([tmp_path], tmp_path / "no")
