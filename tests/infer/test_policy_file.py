"""The policy: acceptance over latency, the choice that follows, and its file."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dscout_jax.decode import mat
from dscout_jax.errors import UserError
from infer.policy import LatencyModel, MatModel, Policy, gain_over_fixed, load_policy

EASY = [[3, 2, 3, 0], [3, 3, 1]]
HARD = [[0, 0, 0, 0, 1], [0, 0]]
MS = {(c, b): 10.0 + c * b for c in (1, 8) for b in (1, 2, 4)}


def policy() -> Policy:
    workloads = {"easy": MatModel.fit(EASY, 4), "hard": MatModel.fit(HARD, 4)}
    return Policy({"drafter": "d"}, workloads, LatencyModel(MS))


@given(st.lists(st.lists(st.integers(0, 7), min_size=1), min_size=1, max_size=6))
def test_mat_at_the_logged_size_is_the_measured_one_and_concave_below(answers):
    model = MatModel.fit(answers, 8, draws=20)
    mats = np.array([model.mat(b) for b in range(1, 9)])
    assert np.isclose(mats[-1], mat(answers)) and mats[0] == 1
    steps = np.diff(mats)
    assert (steps >= 0).all() and (np.diff(steps) <= 1e-12).all()
    # A shorter block accepts what it has room for.
    assert np.isclose(mats[3], mat([[min(a, 3) for a in answer] for answer in answers]))
    assert all(lo <= hi for lo, hi in zip(model.low, model.high, strict=True))


def test_the_interval_of_mat_is_of_mat_itself():
    """Answers whose slots make up for one another: MAT(3) is 2 in each, whatever S_1 and S_2 are."""
    answers = [[1, 1], [2, 0], [1, 1], [2, 0]]
    model = MatModel.fit(answers, 3)
    assert model.low[0] < model.survival[0] < model.high[0]
    assert (model.mat_low[1], model.mat_high[1]) == pytest.approx((2, 2)) and model.mat(3) == 2
    assert model.mat_low[0] == pytest.approx(1 + model.low[0])
    assert 1 + sum(model.high) > 2.1, "which the sums of the ends miss"


def test_latency_is_measured_or_between_measured_points():
    model = LatencyModel(MS)
    assert all(model.ms(*at) == ms for at, ms in MS.items())
    assert model.ms(1, 3) == pytest.approx(13.0) and model.ms(4, 2) == pytest.approx(18.0)
    for at, said in (((16, 2), "concurrency 16"), ((1, 8), "block size 8")):
        with pytest.raises(UserError, match=said):
            model.ms(*at)
    with pytest.raises(UserError, match=r"\(8, 4\)"):
        LatencyModel({at: ms for at, ms in MS.items() if at != (8, 4)})


def test_chooses_the_highest_quotient_and_plain_where_speculation_loses():
    made = policy()
    for workload, concurrency in (("easy", 1), ("easy", 8), ("hard", 1), ("hard", 8)):
        model = made.workloads[workload]
        quotient = {b: model.mat(b) / MS[concurrency, b] for b in (1, 2, 4)}
        assert made.best(workload, concurrency) == max(quotient, key=quotient.get)
    assert made.best("hard", 8) == 1 and made.best("easy", 1) == 4
    assert made.tokens_per_s("easy", 8, 1) == pytest.approx(8e3 / 18)
    with pytest.raises(UserError, match="'chat' is unknown; known: easy, hard"):
        made.best("chat", 1)


def test_gain_is_over_the_best_single_size():
    rows = policy().table()
    assert len(rows) == 12 and sum(row["chosen"] for row in rows) == 4
    fixed, gain = gain_over_fixed(rows)
    cells = {(r["workload"], r["concurrency"], r["block_size"]): r["tokens_per_s_predicted"] for r in rows}
    at = [("easy", 1), ("easy", 8), ("hard", 1), ("hard", 8)]
    tops = {cell: max(cells[(*cell, b)] for b in (1, 2, 4)) for cell in at}
    by_hand = {b: np.mean([cells[(*cell, b)] / tops[cell] for cell in at]) for b in (1, 2, 4)}
    assert fixed == max(by_hand, key=by_hand.get)
    assert (
        gain == pytest.approx(np.mean([tops[cell] / cells[(*cell, fixed)] for cell in at]) - 1) and gain > 0
    )


def test_the_file_comes_back_and_others_are_refused(tmp_path):
    made = policy()
    path = made.save(tmp_path / "deep" / "policy.json")
    assert load_policy(path) == made
    assert json.loads(path.read_text())["table"] == made.table()
    spread = {at: (ms - 1, ms + 2) for at, ms in MS.items()}
    timed = Policy(made.about, made.workloads, LatencyModel(MS, spread))
    assert load_policy(timed.save(tmp_path / "timed.json")) == timed
    assert timed.latency.rows()[0] == {"concurrency": 1, "block_size": 1, "ms": 11, "low": 10, "high": 13}
    for text, said in (("[]", "no policy"), ('{"about": {}}', "workloads"), ("x", "no policy")):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UserError, match=said):
            load_policy(tmp_path / "other.json")
    with pytest.raises(UserError, match="dscout tune"):
        load_policy(tmp_path / "none.json")
    with pytest.raises(UserError, match="no rounds"):
        MatModel.fit([[]], 4)


def test_all_workloads_count_alike():
    made = policy()
    easy, hard = made.workloads.values()
    both = made.model(None)
    assert both.mat(4) == pytest.approx((easy.mat(4) + hard.mat(4)) / 2)
    assert both.rounds == easy.rounds + hard.rounds
    quotient = {b: both.mat(b) / MS[1, b] for b in (1, 2, 4)}
    assert made.best(None, 1) == max(quotient, key=quotient.get)


def test_few_sizes_are_plain_each_best_and_the_largest():
    survival = {"one": (0.9, 0.0, 0.0, 0.0), "two": (0.9, 0.9, 0.0, 0.0), "three": (0.9, 0.9, 0.9, 0.0)}
    models = {name: MatModel(s, s, s, s, s, 9) for name, s in survival.items()}
    points = {(1, b): 10.0 + b for b in (1, 2, 3, 4, 5)}
    made = Policy({}, models, LatencyModel(points))
    assert [made.best(name, 1) for name in models] == [2, 3, 4]
    assert made.few_sizes(1, most=5) == (1, 2, 3, 4, 5)
    # Nobody misses 5; without 3 its workload gets 13/14 of its best, without 2 another only 12/13.
    assert made.few_sizes(1) == (1, 2, 3, 4)
    assert made.few_sizes(1, most=3) == (1, 2, 4)
    assert made.few_sizes(1, most=2) == (1, 4)


def test_the_form_of_plain_decoding_is_kept(tmp_path):
    made = Policy({}, policy().workloads, LatencyModel(MS), {1: 2, 8: 1})
    assert load_policy(made.save(tmp_path / "policy.json")) == made
    assert [made.plain_rows_at(c) for c in (1, 3, 6, 8)] == [2, 2, 1, 1] and policy().plain_rows_at(1) == 1
