"""From a drafter's folder to a policy and back: measured, resumed, refused, followed, validated, drawn."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from dscout_jax.decode import Sampling, mat, seed_of
from dscout_jax.errors import UserError
from infer.answer_file import answer_file
from infer.apply import PolicyUse, adaptive, at_best, check_policy
from infer.benchmark import BenchmarkSettings, benchmark
from infer.cells import knowing
from infer.fingerprint import fingerprint_ids
from infer.generate import GenerateSettings, generate
from infer.load import encode_prompt, load_decoder
from infer.pictures import pictures
from infer.policy import LatencyModel, load_policy
from infer.report import report
from infer.tune import MIXTURE, TuneSettings, in_turns, logged, prepare, table, tune
from infer.validate import longest_slot, losing, queue_tokens_per_s, say, validate


def quiet(line):
    pass


@pytest.fixture(scope="module")
def settings(folders, tmp_path_factory):
    target, drafter = folders
    root = tmp_path_factory.mktemp("tune")
    questions = ["Hi", "What is 2 + 2?", "Line\u2028separator", "x" * 400]
    texts = {"questions": questions, "more": ["Why?", "Name one."]}
    for name, asked in texts.items():
        lines = [json.dumps({"turns": [text]}, ensure_ascii=False) + "\n" for text in asked]
        (root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return TuneSettings(
        prompts=(root / "questions.jsonl", root / "more.jsonl"),
        drafter=drafter,
        target=str(target),
        dtype="float32",
        mixture=1,
        block_sizes=(2, 4),
        concurrencies=(1, 2),
        max_new_tokens=12,
        limit=4,
        max_prompt_tokens=200,
        rows=2,
        repeats=1,
        out=root / "tuned",
    )


@pytest.fixture(scope="module")
def ground(settings):
    return prepare(settings)


@pytest.fixture(scope="module")
def policy(ground):
    return tune(ground, quiet)


@pytest.fixture(scope="module")
def loaded(settings):
    """(target, decoder at the drafter's own size)."""
    return load_decoder(settings.target, settings.drafter, dtype="float32")


def test_measures_once_and_predicts_what_was_logged(settings, ground, policy, loaded):
    target, decoder = loaded
    texts = [json.loads(line)["turns"][0] for line in settings.prompts[0].read_text().split("\n")[:3]]
    answers = [decoder.generate([encode_prompt(target, text)], 12)[0].accepted for text in texts]
    model = policy.workloads["questions"]
    assert np.isclose(model.mat(4), mat(answers)) and model.rounds == sum(map(len, answers))
    assert policy.workloads[MIXTURE].rounds == model.rounds + policy.workloads["more"].rounds
    assert policy.latency.concurrencies == [1, 2] and policy.latency.block_sizes == [1, 2, 4]
    assert set(policy.plain_rows) == {1, 2} and set(policy.plain_rows.values()) <= {1, 2}
    for at, ms in policy.latency.points.items():
        low, high = policy.latency.spread[at]
        assert low <= ms <= high
    assert load_policy(settings.out / "policy.json") == policy
    assert table(policy).count("**") == 2 * 3 * 2

    before = (settings.out / "records.jsonl").read_text()
    assert tune(ground, quiet) == policy
    assert (settings.out / "records.jsonl").read_text() == before


def test_one_capacity_holds_all(ground):
    """So that a latency measured with made-up prompts is that of every workload."""
    shapes = {
        ground.decoder.shape(ground.decoder.requests(prompts, 12)) for prompts in ground.prompts.values()
    }
    assert len(shapes) == 1 and ground.about["capacity"] == shapes.pop().capacity
    assert ground.source[MIXTURE] == ["questions", "more", "questions", "more", "questions"]
    assert ground.prompts[MIXTURE][1] == ground.prompts["more"][0]
    assert in_turns({"a": 3, "b": 1}, 2) == [("a", 0), ("a", 1), ("b", 0), ("a", 2)]


def test_another_drafter_is_refused_and_another_machine_told(settings, policy, loaded):
    target, decoder = loaded
    at = target, decoder, settings.drafter, "float32", Sampling(seed=7)
    assert check_policy(policy, *at) == []
    (doubt,) = check_policy(policy, *at[:-1], Sampling(0.7, top_k=9))
    assert doubt.startswith("sampling: greedy then, temperature 0.7, top_k 9,")
    moved = policy.about | {"machine": policy.about["machine"] | {"cpu": "abacus"}}
    (doubt,) = check_policy(dataclasses.replace(policy, about=moved), *at)
    assert "abacus" in doubt
    for change, name in (
        ({"dtype": "bfloat16"}, "dtype"),
        ({"drafter": "x"}, "drafter"),
        ({"draft ids": "x"}, "draft ids"),
        ({"copying": True}, "copying"),
    ):
        other = dataclasses.replace(policy, about=policy.about | change)
        with pytest.raises(UserError, match=f"another {name}"):
            check_policy(other, *at)
        for follow in (at_best, adaptive) if name != "copying" else ():
            with pytest.raises(UserError, match=f"another {name}"):
                follow(other, decoder, None, 1)
    # As many other ids are other ids; the same ones in another order are not.
    some = [fingerprint_ids(ids) for ids in ((1, 2, 3), (3, 1, 2), (1, 2, 4), None)]
    assert some[0] == some[1] != some[2] and some[3] is None
    fewer = decoder.resize(decoder.block_size, draft_ids=range(100))
    with pytest.raises(UserError, match="another draft ids"):
        at_best(policy, fewer, None, 1)


def test_wrong_settings_are_named_before_anything_runs(settings, tmp_path):
    with pytest.raises(UserError, match=r"\[5\]"):
        prepare(dataclasses.replace(settings, block_sizes=(2, 5), out=tmp_path / "none"))
    with pytest.raises(UserError, match="max_prompt_tokens 1"):
        prepare(dataclasses.replace(settings, max_prompt_tokens=1, out=tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="share a name"):
        dataclasses.replace(settings, prompts=settings.prompts * 2)
    with pytest.raises(UserError, match="temperature -1"):
        dataclasses.replace(settings, sampling=Sampling(-1.0))
    for wrong in ({"concurrencies": ()}, {"concurrencies": (0,)}, {"limit": 0}, {"mixture": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            dataclasses.replace(settings, **wrong)


def costing(policy, path, ms):
    """The policy with these milliseconds at each block size, as a file."""
    points = {(c, b): ms[b] for c in (1, 2) for b in (1, 2, 4)}
    return dataclasses.replace(policy, latency=LatencyModel(points)).save(path)


def test_generate_and_bench_follow_a_policy(settings, policy, tmp_path, capsys):
    plainly = costing(policy, tmp_path / "plain.json", {1: 1.0, 2: 9.0, 4: 9.0})
    largest = costing(policy, tmp_path / "largest.json", {1: 9.0, 2: 9.0, 4: 1.0})
    even = costing(policy, tmp_path / "even.json", {1: 1.0, 2: 1.0, 4: 1.0})
    base = GenerateSettings(
        drafter=settings.drafter, target=settings.target, max_new_tokens=12, cache_dir=settings.cache_dir
    )
    expected = generate("Hello", dataclasses.replace(base, drafter=None))
    text = capsys.readouterr().out
    for use in (
        PolicyUse(plainly, "more"),
        PolicyUse(largest),
        PolicyUse(even, adapt=True, explore=0.5),
    ):
        found = generate("Hello", dataclasses.replace(base, policy=use))
        assert capsys.readouterr().out == text and found.tokens == expected.tokens
    assert generate("Hello", dataclasses.replace(base, policy=PolicyUse(plainly))).mat == 1.0
    capsys.readouterr()

    moved = json.loads(even.read_text())
    moved["about"]["machine"]["cpu"] = "abacus"
    even.write_text(json.dumps(moved))
    rows = answer_file(
        settings.prompts[1], dataclasses.replace(base, policy=PolicyUse(even, adapt=True)), slots=2
    )
    assert "abacus" in capsys.readouterr().err
    plain = answer_file(settings.prompts[1], dataclasses.replace(base, drafter=None), slots=2)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in plain]

    # What was measured greedily, and with shorter caches, is followed otherwise only with a word on it.
    for change, said in (
        (dict(sampling=Sampling(0.7)), "sampling: greedy then, temperature 0.7"),
        (dict(max_new_tokens=520), "caches of 256 positions then, 768 now"),
    ):
        use = dict(policy=PolicyUse(plainly, "more")) | change
        generate("Hello", dataclasses.replace(base, **use))
        assert said in capsys.readouterr().err

    run = BenchmarkSettings(
        prompts=(settings.prompts[1],),
        drafters=(str(settings.drafter),),
        target=settings.target,
        dtype="float32",
        max_new_tokens=8,
        plain_rows=1,
        same_program="none",
        out=tmp_path / "bench",
    )
    for use, size in ((PolicyUse(plainly), 1), (PolicyUse(even, adapt=True), 4)):
        (row,) = benchmark(dataclasses.replace(run, policy=use), quiet)
        assert (row["block_size"], row["identical"]) == (size, 2)
        said = row["policy"]
        assert (said["workload"], said["adapt"], said["sizes"][-1]) == (None, size == 4, size)
    # Nothing is measured again, until the policy or what is asked of it is another.
    lines = [len((run.out / "records.jsonl").read_text().splitlines())]
    costing(policy, tmp_path / "again.json", {1: 1.0, 2: 1.0, 4: 1.5})
    for file, workload in ((even, None), (tmp_path / "again.json", None), (tmp_path / "again.json", "more")):
        (row,) = benchmark(dataclasses.replace(run, policy=PolicyUse(file, workload, adapt=True)), quiet)
        lines.append(len((run.out / "records.jsonl").read_text().splitlines()))
        assert row["policy"]["workload"] == workload
    assert lines[0] == lines[1] < lines[2] < lines[3]
    # The table says what was followed.
    [_, _, line, *_] = report([run.out], tmp_path / "report").splitlines()
    sizes = " ".join(map(str, row["policy"]["sizes"]))
    assert f"| {row['policy']['digest'][:6]}: more, adapts, explores 0.01: {sizes} |" in line

    for change, said in (
        (dict(drafter=None, policy=PolicyUse(even)), "--drafter"),
        (dict(block_size=2, policy=PolicyUse(even)), "--block-size"),
        (dict(policy=PolicyUse(even, "poems")), "'poems' is unknown"),
        (dict(policy=PolicyUse(tmp_path / "none.json")), "dscout tune"),
        (dict(policy=PolicyUse(even), target="no/such/folder"), "no/such"),
        (dict(policy=PolicyUse(even), dtype="bfloat16"), "another dtype"),
    ):
        with pytest.raises(UserError, match=said):
            generate("Hello", dataclasses.replace(base, **change))
    with pytest.raises(UserError, match="concurrency 3"):
        answer_file(settings.prompts[1], dataclasses.replace(base, policy=PolicyUse(even)), slots=3)


def test_a_decoder_by_the_policy(policy, loaded):
    _, full = loaded
    points = {(c, b): {1: 1.0, 2: 9.0, 4: 9.0}[b] for c in (1, 2) for b in (1, 2, 4)}
    slow = dataclasses.replace(policy, latency=LatencyModel(points), plain_rows={1: 2, 2: 1})
    for concurrency, rows in ((1, 2), (2, 1)):
        decoder, size = at_best(slow, full, None, concurrency)
        assert (size, decoder.block_size, decoder.drafter) == (1, rows, None)
    decoder, size = adaptive(slow, full, None, 1)
    assert (decoder.sizes, size) == ((1, 4), 4)
    assert slow.few_sizes(1, most=4) == (1, 4) and slow.plain_rows_at(7) == 1


def test_the_oracle_weighs_the_live_rows_workloads(policy):
    from types import SimpleNamespace

    survival = {"good": (0.9, 0.9, 0.9), "bad": (0.0, 0.0, 0.0)}
    some = policy.workloads["more"]
    models = {name: dataclasses.replace(some, survival=s) for name, s in survival.items()}
    points = {(c, b): {1: 1.0, 2: 1.5, 4: 2.0}[b] for c in (1, 2) for b in (1, 2, 4)}
    made = dataclasses.replace(policy, workloads=models, latency=LatencyModel(points))
    good, bad = 2**32 - 1, 7
    rule = knowing(made, (1, 2, 4), 1, {good: 0, bad: 1, 2**31: 1})
    for seeds, live, index in (([good, bad], [1, 0], 2), ([good, bad], [0, 1], 0), ([bad, good], [0, 1], 2)):
        sampling = SimpleNamespace(seed=np.array(seeds, np.uint32))
        assert int(rule(SimpleNamespace(sampling=sampling, live=np.array(live, bool)))) == index


def test_a_queue_lasts_as_long_as_its_busiest_slot():
    assert longest_slot([5, 1, 1, 1, 4], 2) == 7
    assert longest_slot([3, 2, 1], 1) == 6 and longest_slot([3, 2], 4) == 3
    accepted = [[3, 1], [0, 0, 0], [2]]  # 6, 3 and 3 tokens
    # Two slots a round: 6 / 2, 3 / 1 and 3 / 2 rounds.
    assert queue_tokens_per_s(accepted, 2, 1, 10.0) == pytest.approx(12 / (7.5 * 0.010))
    assert queue_tokens_per_s(accepted, 2, 2, 10.0) == pytest.approx(12 / (4.5 * 0.010))


def test_at_a_temperature_what_is_logged_is_drawn(settings, ground, policy, loaded):
    """Each prompt by its own seed, told apart in the records, and told to whoever decodes greedily."""
    drawn = Sampling(0.9, top_k=40, seed=3)
    warm = prepare(dataclasses.replace(settings, sampling=drawn), loaded[0])
    assert warm.about["sampling"].startswith("temperature 0.9, top_k 40")
    prompts = warm.prompts["more"]
    accepted = logged(warm, "more")
    draws = [drawn._replace(seed=seed_of(3, prompt)) for prompt in prompts]
    expected = warm.decoder.generate(prompts, 12, sampling=draws)
    assert accepted == [g.accepted for g in expected]
    assert [g.tokens for g in expected] != [g.tokens for g in warm.decoder.generate(prompts, 12)]
    assert logged(ground, "more") == [g.accepted for g in warm.decoder.generate(prompts, 12)]


def test_the_cell_where_speculation_loses_most_is_found_by_its_figures():
    speeds = {
        ("easy", 1): {1: 10, 2: 15, 4: 20},
        ("hard", 1): {1: 10, 2: 9, 4: 8},
        ("hard", 8): {1: 10, 2: 6, 4: 7},
    }
    rows = [
        {"workload": w, "concurrency": c, "block_size": b, "tokens_per_s_measured": speed}
        for (w, c), cell in speeds.items()
        for b, speed in cell.items()
    ]
    assert losing(rows) == {"workload": "hard", "concurrency": 8, "best_over_plain": 0.7}
    assert losing(rows[:3]) is None


def test_validation_runs_the_cells_once_and_is_drawn(settings, ground, policy, tmp_path):
    # Two slots and sizes 1 and 4 only: every program is one to compile.
    points = {(2, b): policy.latency.ms(2, b) for b in (1, 4)}
    policy = dataclasses.replace(policy, latency=LatencyModel(points))
    policy.save(settings.out / "policy.json")
    ground = dataclasses.replace(ground, settings=dataclasses.replace(settings, concurrencies=(2,)))
    document = validate(ground, policy, passes=2, log=quiet)
    cells = {(row["workload"], row["concurrency"]) for row in document["rows"]}
    assert cells == {(w, 2) for w in ("questions", "more", MIXTURE)}
    for cell in cells:
        own = [row for row in document["rows"] if (row["workload"], row["concurrency"]) == cell]
        assert sum(row["chosen"] for row in own) == 1 and min(row["block_size"] for row in own) == 1
        for row in own:
            assert 0 < row["tokens_per_s_low"] <= row["tokens_per_s_measured"] <= row["tokens_per_s_high"]
            assert row["tokens_per_s_predicted"] > 0
            assert np.isclose(row["mat_measured"], row["mat_predicted"]), "the very same blocks"
    online = {(row["workload"], row["concurrency"]) for row in document["online"]}
    assert (MIXTURE, 2) in online
    if loses := document["losing"]:
        assert (loses["workload"], loses["concurrency"]) in online and loses["best_over_plain"] < 1
    with pytest.raises(UserError, match="passes 0"):
        validate(ground, policy, passes=0, log=quiet)
    summary = document["summary"]
    assert 0 <= summary["mat_within_3_percent"] <= 1 and summary["cells"] == len(document["rows"])
    assert f"{len(document['rows'])} cells" in say(document) and "the oracle" in say(document)

    before = (settings.out / "records.jsonl").read_text()
    assert validate(ground, policy, passes=2, log=quiet) == document
    assert (settings.out / "records.jsonl").read_text() == before

    searched = {"what": "depth", "best": 2, "reason": "2 is the best"}
    searched["rows"] = [
        {"depth": d, "order": d, "mat": 1.5, "round_ms": 3.0, "block_size": 4}
        | {"tokens_per_s": 9.0 + d, "plain_tokens_per_s": 8.0, "over_plain": (9.0 + d) / 8}
        for d in (1, 2)
    ]
    (tmp_path / "search.json").write_text(json.dumps(searched))
    (tmp_path / "again").mkdir()
    taps = searched | {"what": "taps", "best": "all fc", "rows": [searched["rows"][0] | {"taps": "all fc"}]}
    (tmp_path / "again" / "search.json").write_text(json.dumps(taps))
    paths = pictures(settings.out, (tmp_path, tmp_path / "again", tmp_path))
    assert {path.name for path in paths} == {"report.html"} | {
        f"{name}.{ending}"
        for name in ("mat", "acceptance", "latency", "throughput", "depth", "taps", "depth-3")
        for ending in ("png", "svg")
    }
    for path in paths:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert np.asarray(image.convert("L")).std() > 5, "something is drawn"
    text = (settings.out / "report.html").read_text()
    assert text.count("data:image/svg+xml;base64,") == 7 and "tokens_per_s_measured" in text
    assert 'src="http' not in text and "href" not in text
    with pytest.raises(UserError, match=r"search\.json"):
        pictures(settings.out, (tmp_path / "none",))
    with pytest.raises(UserError, match="dscout tune"):
        pictures(tmp_path)
