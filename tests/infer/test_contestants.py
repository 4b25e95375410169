"""What contestants are called."""

import pytest

from infer.contestants import names_of


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["models/first", "lookup", "models/first+lookup"], ["first", "lookup", "first+lookup"]),
        (["runs/a/drafter", "runs/b/drafter"], ["a", "b"]),
        (["runs/a/exported/1200", "runs/b/exported/1200+lookup"], ["a", "b+lookup"]),
        (["x/a/drafter", "y/a/drafter", "y/c"], ["x/a", "y/a", "c"]),
        (["runs/a/exported/1200", "runs/a/exported/2400"], ["a/exported/1200", "a/exported/2400"]),
        (["runs/a/drafter", "runs/a"], ["a/drafter", "a"]),
        (["runs/lookup", "lookup"], ["runs/lookup", "lookup"]),
        (["a/b/c", "d/b/c", "b/c"], ["a/b/c", "d/b/c", "here/b/c"]),
        (["first", "./first"], ["first", "first"]),
    ],
)
def test_a_drafter_is_called_by_what_tells_it_from_the_others(given, names, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert names_of(given) == names
