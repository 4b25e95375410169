"""Speeds, both speed-ups and intervals, of answers made up."""

import numpy as np
import pytest

from infer.figures import FIGURES, counts, figures, histogram, spread, totals


def answer(accepted, seconds):
    return {
        "tokens": list(range(sum(accepted) + len(accepted) + 1)),
        "accepted": accepted,
        "prefill_seconds": 0.5,
        "decode_seconds": seconds,
    }


def plain(tokens, seconds):
    return answer([0] * tokens, seconds)


def test_both_speed_ups_agree_where_answers_are_of_one_length():
    slow = [plain(6, 6.0), plain(6, 9.0), plain(6, 6.5)]
    fast = [answer([1, 3], 3.0), answer([5], 2.0), answer([0, 0, 1, 1], 7.0)]
    row = figures(slow, fast, [0, 1, 2], 6)
    assert row["speedup"] == pytest.approx(21.5 / 12) == row["speedup_of_means"]
    assert (row["n"], row["identical"], row["identical_percent"]) == (3, 3, 100)
    assert row["mat"] == pytest.approx(18 / 7) and row["tau"] == pytest.approx((3 + 6 + 1.5) / 3)
    assert row["histogram"] == [2, 3, 0, 1, 0, 1] and row["ms_per_round"] == pytest.approx(12e3 / 7)
    # Of unlike lengths, the long answer's share is its tokens in one and its place in the other.
    slow, fast = [plain(1, 1.0), plain(9, 9.0)], [answer([0], 1.0), answer([8], 1.0)]
    row = figures(slow, fast, [0, 1], 9)
    assert row["speedup"] == pytest.approx(10 / 2)
    assert row["speedup_of_means"] == pytest.approx(1 / ((1 + 1 / 9) / 2))


def test_a_queue_counts_all_its_tokens_and_its_own_seconds():
    slow, fast = [plain(3, 9.0), plain(3, 9.0)], [answer([2], 4.0), answer([2], 4.0)]
    row = figures(slow, fast, [0, 1], 4, (8.0, 4.0))
    assert (row["plain_tokens_per_s"], row["speculative_tokens_per_s"], row["speedup"]) == (1, 2, 2)
    assert row["speedup_of_means"] == pytest.approx(9 / 4) and row["speedup_spread"] is None
    assert row["plain_tokens_per_s_spread"] is row["speculative_tokens_per_s_spread"] is None
    assert row["mat_spread"] == row["tau_spread"] == [3, 3], "drafts have no seconds"


def test_answers_of_one_token_have_no_round():
    row = figures([plain(0, 0.0)], [answer([], 0.0)], [0], 4)
    assert (row["speedup"], row["speedup_of_means"], row["mat"], row["mat_spread"]) == (0, 0, 1, None)
    assert histogram([[]], 3) == [0, 0, 0]


def test_intervals_resample_whole_conversations_plain_and_speculative_together():
    # Speeds differ tenfold between conversations, the speed-up does not: only pairs show that.
    slow = [plain(4, 4.0), plain(4, 40.0), plain(4, 400.0)]
    fast = [answer([3], 2.0), answer([3], 20.0), answer([3], 200.0)]
    row = figures(slow, fast, [0, 1, 2], 4)
    assert row["speedup_spread"] == pytest.approx([2, 2]) and row["mat_spread"] == pytest.approx([4, 4])
    # Two turns of one conversation never part.
    joined = figures(slow[:2], [answer([3], 1.0), answer([0, 0, 0, 0], 1.0)], [7, 7], 4)
    assert joined["mat_spread"] is None and joined["conversations"] == 1
    each = np.array([totals(counts([p], [f])) for p, f in zip(slow, fast, strict=True)])
    assert spread("speedup", each) == row["speedup_spread"]
    # Speeds alone lie anywhere between the slowest and the fastest.
    assert row["plain_tokens_per_s_spread"] == pytest.approx([0.01, 1.0])
    assert row["speculative_tokens_per_s_spread"] == pytest.approx([0.02, 2.0])


def test_every_figure_is_of_sums_of_totals():
    slow = [plain(6, 6.0), plain(6, 9.0), plain(4, 6.5), plain(0, 0.0)]
    fast = [answer([1, 3], 3.0), answer([5], 2.0), answer([0, 0, 0, 0], 7.0), answer([], 0.0)]
    row = figures(slow, fast, [0, 1, 2, 3], 6)
    found = {name: float(figure(totals(counts(slow, fast)))) for name, figure in FIGURES.items()}
    names = {"tokens_per_s": "speculative_tokens_per_s"}
    assert found == pytest.approx({name: row[names.get(name, name)] for name in FIGURES})
    low, high = row["tau_spread"]
    assert low == pytest.approx(1) and high == pytest.approx(6) and low < row["tau"] < high
