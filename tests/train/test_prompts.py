"""The prompts that ship with the package."""

from collections import Counter

from train.prompts import load_prompts


def test_however_few_are_taken_all_areas_are_in_and_none_is_held_out():
    asked, heldout = (list(load_prompts(name)) for name in ("quickstart", "heldout"))
    for rows in (asked, heldout):
        assert len({name for name, _ in rows}) == len(rows)
        for end in range(8, len(rows) + 1, 8):
            counts = Counter(name.split("/")[0] for name, _ in rows[:end])
            assert len(counts) == 8 and len(set(counts.values())) == 1
    assert not {turns[0] for _, turns in asked} & {turns[0] for _, turns in heldout}
