"""Searches over drafters: trained, measured, resumed, drawn; on a tiny target made on the spot."""

import json

import jax
import pytest

from dscout_jax.cli import main, search
from dscout_jax.cli.search import Search, tune_depth, tune_taps
from dscout_jax.errors import UserError
from train.lab.target import make_lab

CONFIG = """
from dscout_jax.objective import dflash
from train.settings import TrainSettings

config = TrainSettings(
    objective=dflash(4), data={data!r}, run="never", target={target!r}, num_layers=1, block_size=4,
    target_layer_ids=(1,), seq_len=128, batch=8, num_anchors=4, steps=9, heldout=2,
)
"""


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Drafters of one shape are measured by the same programs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    make_lab(root / "lab", steps=2, batch=2, prompts=16, heldout=3)
    config = CONFIG.format(data=str(root / "lab" / "answers.jsonl"), target=str(root / "lab" / "target"))
    (root / "config.py").write_text(config)
    return root


@pytest.fixture(scope="module")
def options(root):
    """Words of a command line, and as a Search."""
    return dict(
        config=root / "config.py",
        prompts=(root / "lab" / "heldout.jsonl",),
        steps=1,
        dtype="float32",
        block_sizes=(4,),
        max_new_tokens=6,
        limit=2,
        repeats=1,
    )


def test_depths_are_trained_once_each_and_the_reason_is_said(root, options, monkeypatch, capsys):
    words = [str(options["config"]), "--prompts", str(options["prompts"][0]), "--steps", "1"]
    words += ["--dtype", "float32", "--block-sizes", "4", "--max-new-tokens", "6", "--limit", "2"]
    words += ["--repeats", "1", "--within", "0"]
    words += ["--out", str(root / "depth"), "--depths", "1", "2"]
    main(["tune", "depth", *words])
    said = capsys.readouterr()
    document = json.loads((root / "depth" / "search.json").read_text())
    assert document["what"] == "depth" and document["reason"] in said.out
    rows = {row["depth"]: row for row in document["rows"]}
    assert set(rows) <= {1, 2} and document["best"] == max(rows, key=lambda d: rows[d]["over_plain"])
    for depth, row in rows.items():
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["mat"] / row["round_ms"])
        assert row["over_plain"] == pytest.approx(row["tokens_per_s"] / row["plain_tokens_per_s"])
        [run] = (root / "depth").glob(f"depth-{depth}-*")
        config = json.loads((run / "drafter" / "config.json").read_text())
        assert config["num_hidden_layers"] == depth
        assert config["dflash_config"]["target_layer_ids"] == [1], "whatever the depth"
    assert {path.name for path in (root / "depth").glob("search.*")} == {
        *("search.json", "search.jsonl", "search.md", "search.png", "search.svg")
    }

    def never(*args):
        raise AssertionError("trained twice")

    monkeypatch.setattr(search, "train", never)
    main(["tune", "depth", *words])
    assert json.loads((root / "depth" / "search.json").read_text()) == document


def test_taps_stay_where_they_are_while_depth_varies(root, options, monkeypatch):
    """The default taps of a drafter follow its depth: then two things would change at once."""
    text = options["config"].read_text()
    assert "target_layer_ids=(1,), " in text
    (root / "default.py").write_text(text.replace("target_layer_ids=(1,), ", ""))
    asked = {}

    def measure(self, what, name, order, changes):
        asked[name] = changes
        return -name

    monkeypatch.setattr(search.Trials, "measure", measure)
    monkeypatch.setattr(search.Trials, "save", lambda self, what, best, reason: best)
    own = Search(**options | {"config": root / "default.py"}, out=root / "stay")
    assert tune_depth(own, (1, 2, 3), 0, lambda line: None) == 1
    layers = json.loads((root / "lab" / "target" / "config.json").read_text())["num_hidden_layers"]
    assert set(asked) >= {1, 2}
    for depth, changes in asked.items():
        assert changes == {"num_layers": depth, "target_layer_ids": (layers // 2,)}


def test_taps_by_both_fusions(root, options):
    quiet = Search(**options, out=root / "taps")
    document = tune_taps(quiet, ("all",), ("fc", "softmax"), lambda line: None)
    names = ["all fc", "all softmax"]
    assert [row["taps"] for row in document["rows"]] == names
    assert document["best"] in names and "all measured" in document["reason"]
    layers = json.loads((root / "lab" / "target" / "config.json").read_text())["num_hidden_layers"]
    [run] = (root / "taps").glob("taps-all-fc-*")
    config = json.loads((run / "drafter" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == list(range(layers - 1))


def test_senseless_searches_are_refused(root, options, tmp_path):
    quiet = Search(**options, out=tmp_path / "none")
    for depths in ((), (0, 1), (2, 1), (1, 1)):
        with pytest.raises(UserError, match="ascend"):
            tune_depth(quiet, depths)
    with pytest.raises(UserError, match="within -1"):
        tune_depth(quiet, (1, 2), -1)
    for counts in ((), (0, "all")):
        with pytest.raises(UserError, match="from 1 up"):
            tune_taps(quiet, counts, ("fc",))
    with pytest.raises(UserError, match="prompts"):
        tune_depth(Search(**options | {"prompts": ()}, out=tmp_path / "none"), (1,))
    with pytest.raises(UserError, match=r"no\.jsonl"):
        tune_depth(Search(**options | {"prompts": (tmp_path / "no.jsonl",)}, out=tmp_path / "none"), (1,))
    with pytest.raises(UserError, match=r"\(9,\)"):
        tune_depth(Search(**options | {"block_sizes": (9,)}, out=tmp_path / "none"), (1,))
    with pytest.raises(UserError, match="config"):
        tune_depth(Search(**options | {"config": tmp_path / "no.py"}, out=tmp_path / "none"), (1,))
    assert not (tmp_path / "none").exists()
