"""Runs become DFlash folders and folders become runs, bit for bit, with what they were made from."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import flip

from dscout_jax.cli import main
from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import load_draft_ids, load_drafter, load_provenance, names, save_drafter
from dscout_jax.interop.safetensors import SINGLE
from dscout_jax.models import Target
from dscout_jax.objective import dflash
from train.export import decodable, export, import_drafter, load_start, read_run
from train.loop import train
from train.settings import TrainSettings

CONFIG = TargetConfig(48, 16, 24, 4, 4, 2, 4, 1e-6, RopeConfig(1e4), 128, False, True, (1,))


@pytest.fixture(scope="module")
def target():
    params = Target(CONFIG).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    tokenizer = SimpleNamespace(special_ids={"eos_token": 1, "pad_token": 0}, show_mask=lambda *row: str(row))
    return SimpleNamespace(config=CONFIG, params=params, tokenizer=tokenizer, name="tiny", fingerprint="f00d")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_tokens": rng.integers(2, 40, 5).tolist(), "answer_tokens": rng.integers(2, 40, 12).tolist()}
        for _ in range(12)
    ]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TrainSettings(
        objective=dflash(2),
        data=str(root / "answers.jsonl"),
        run=str(root / "run"),
        num_layers=1,
        block_size=2,
        target_layer_ids=(0, 2),
        mask_token_id=47,
        seq_len=24,
        batch=8,
        num_anchors=4,
        steps=4,
        train_vocab="seen",
        heldout=3,
        eval_every=2,
        save_every=4,
        chunk=64,
    )


@pytest.fixture(scope="module")
def run(settings, target):
    train(settings, target)
    return Path(settings.run)


def _bits(params):
    return {
        path: (np.asarray(v).dtype.name, np.asarray(v).tobytes()) for path, v in names.flatten(params).items()
    }


def test_the_newest_checkpoint_is_the_drafter_that_training_saved(run, tmp_path):
    out = export(run, tmp_path / "out", dtype=jnp.float32)
    (config, params), (saved_config, saved) = load_drafter(out), load_drafter(run / "drafter")
    assert config == saved_config and _bits(params) == _bits(saved)
    assert load_draft_ids(out) == load_draft_ids(run / "drafter")
    about, want = load_provenance(out), load_provenance(run / "drafter")
    assert about["heldout"].pop("step") == 4
    assert about == want and about["target_fingerprint"] == "f00d" and about["recipe"] == "dflash"
    raw = json.loads((out / "config.json").read_text())
    assert (raw["eos_token_id"], raw["pad_token_id"]) == (1, 0)


def test_an_earlier_step_brings_its_own_figures(run, tmp_path):
    out = export(run, tmp_path / "out", step=2)
    _, params = load_drafter(out)
    assert {kind for kind, _ in _bits(params).values()} == {"bfloat16"}
    assert _bits(params) != _bits(load_drafter(run / "drafter", jnp.bfloat16)[1])
    about = load_provenance(out)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    (want,) = [row["eval"]["mat"] for row in logged if row["step"] == 2 and "eval" in row]
    assert about["steps"] == about["heldout"]["step"] == 2 and about["heldout"]["mat"] == want
    text = (out / "README.md").read_text()
    for fact in ("- target fingerprint: f00d", "- recipe: dflash", "- steps: 2", "draft_ids.json"):
        assert fact in text
    assert f"{want['2']:.3f} at blocks of 2" in text
    with pytest.raises(UserError, match="no checkpoint of step 3; it has 2, 4"):
        export(run, tmp_path / "none", step=3)
    assert not (tmp_path / "none").exists()


def test_the_best_step_is_that_of_the_evaluations(run, tmp_path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    mats = {row["step"]: row["eval"]["mat"]["2"] for row in rows if "eval" in row}
    assert sorted(mats) == [2, 4]
    shutil.copytree(run, tmp_path / "copy")
    for best in (2, 4):
        for row in rows:
            if "eval" in row:
                row["eval"]["mat"]["2"] = 1.9 if row["step"] == best else 1.1
        (tmp_path / "copy" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert read_run(tmp_path / "copy", "best").step == best
    # The checkpoints hold the MAT too, by which the best of them stays when others go.
    for step, mat in mats.items():
        assert json.loads((run / "checkpoints" / str(step) / "metrics" / "metrics").read_text())["mat"] == mat
    (tmp_path / "copy" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no checkpoint was evaluated; name a step of 2, 4"):
        export(tmp_path / "copy", tmp_path / "out", step="best")


def _foreign(folder, dtype, odd=None):
    """Another project's folder: no provenance, stop tokens as a list; `odd`: the final norm's own dtype."""
    config = DrafterConfig.for_target(
        CONFIG, num_layers=1, block_size=2, mask_token_id=47, target_layer_ids=(0, 2)
    )
    rng = np.random.default_rng(1)
    flat = {p: rng.normal(size=shape).astype(dtype) for p, shape in names.drafter_shapes(config).items()}
    flat["norm/weight"] = flat["norm/weight"].astype(odd or dtype)
    ids = {"eos_token": [1, 3], "bos_token": 2}
    save_drafter(folder, config, names.nest(flat), special_ids=ids, dtype=None)
    (folder / "dscout.json").unlink()
    return folder


@pytest.fixture
def foreign(tmp_path):
    return _foreign(tmp_path / "theirs", jnp.bfloat16)


def test_import_and_export_give_the_folder_back(foreign, tmp_path):
    imported = import_drafter(foreign, tmp_path / "imported")
    out = export(imported, tmp_path / "out")
    assert (out / SINGLE).read_bytes() == (foreign / SINGLE).read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (foreign, out))
    assert before == after and after["eos_token_id"] == [1, 3]
    assert load_provenance(out) == {"imported_from": "theirs"}
    with pytest.raises(UserError, match="exists"):
        import_drafter(foreign, imported)
    # Ours keeps saying what it was made from, and which ids it drafts.
    again = import_drafter(export(imported, tmp_path / "ours"), tmp_path / "again")
    assert load_provenance(export(again, tmp_path / "out2")) == {"imported_from": "theirs"}


@pytest.mark.parametrize(("dtype", "odd"), [("float16", None), ("bfloat16", "float32")])
def test_what_is_stored_goes_in_and_out_as_it_is(tmp_path, dtype, odd):
    theirs = _foreign(tmp_path / "theirs", jnp.dtype(dtype), odd)
    out = export(import_drafter(theirs, tmp_path / "imported"), tmp_path / "out")
    assert (out / SINGLE).read_bytes() == (theirs / SINGLE).read_bytes()
    before, after = (json.loads((f / "config.json").read_text()) for f in (theirs, out))
    assert before == after and after["torch_dtype"] == dtype
    main(["export", str(tmp_path / "imported"), str(tmp_path / "half"), "--dtype", "float16"])
    assert {kind for kind, _ in _bits(load_drafter(tmp_path / "half")[1]).values()} == {"float16"}
    flip(tmp_path / "imported" / "checkpoints" / "0" / "state")
    with pytest.raises(UserError, match=r"checkpoints/0 is damaged"):
        export(tmp_path / "imported", tmp_path / "out")


def test_a_refused_folder_leaves_no_run(foreign, tmp_path):
    raw = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(raw | {"is_causal": True}))
    with pytest.raises(UserError, match="is_causal"):
        import_drafter(foreign, tmp_path / "imported")
    assert [place.name for place in tmp_path.iterdir()] == ["theirs"]


def test_an_imported_run_is_a_start_and_no_run_to_go_on_with(
    foreign, settings, target, tmp_path, monkeypatch
):
    imported = import_drafter(foreign, tmp_path / "imported")
    start = dataclasses.replace(settings, init=str(imported), run=str(tmp_path / "warm"))
    # No time at all: what comes out is what went in.
    warm = train(start, target, minutes=0.0)
    assert _bits(load_drafter(warm)[1]) == _bits(load_drafter(foreign, jnp.float32)[1])
    assert load_provenance(warm)["started_from"] == {"imported_from": "theirs"}
    # A trained run is a start too.
    _, params, about = load_start(start.run)
    assert _bits(params) == _bits(load_drafter(warm)[1]) and about["steps"] == 0
    with pytest.raises(UserError, match="name another run folder"):
        train(dataclasses.replace(start, run=str(imported)), target)


def test_a_run_keeps_its_fusion(run, settings, target, tmp_path):
    soft = dataclasses.replace(settings, fusion="softmax", heldout=0, run=str(tmp_path / "soft"))
    folder = train(soft, target, minutes=0.0)
    config, params = load_drafter(folder)
    assert config.fusion == "softmax" and "fc" not in params
    assert _bits(load_drafter(export(soft.run, tmp_path / "out", dtype=jnp.float32))[1]) == _bits(params)
    with pytest.raises(UserError, match=r"another contract \(fusion: None then, 'softmax' now\)"):
        train(dataclasses.replace(settings, fusion="softmax"), target)
    with pytest.raises(UserError, match=r"is another model .*'fusion': \('fc', 'softmax'\)"):
        train(dataclasses.replace(soft, init=str(run), run=str(tmp_path / "other")), target)


def test_a_run_decodes_by_its_newest_checkpoint(run, foreign):
    folder = decodable(run)
    assert folder == run / "exported" / "4" and decodable(run) == folder
    assert _bits(load_drafter(folder)[1]) == _bits(load_drafter(run / "drafter")[1])
    assert decodable(foreign) == foreign
    # A checkpoint of that step that is newer than the export, as of a run begun anew.
    os.utime(folder / "dscout.json", (0, 0))
    (folder / SINGLE).write_bytes(b"of before")
    assert decodable(run) == folder
    assert _bits(load_drafter(folder)[1]) == _bits(load_drafter(run / "drafter")[1])


def test_what_is_damaged_or_no_run_is_named(run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    for file in (broken / "checkpoints" / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"checkpoints/4 is damaged .*try --step 2"):
        export(broken, tmp_path / "out")
    assert read_run(broken, step=2).step == 2
    # What any other bit among the weights would look like.
    sums = broken / "checkpoints" / "2" / "checksums" / "metadata"
    before = sums.read_text()
    saved = json.loads(before)
    saved["['params']['fc']['weight']"] ^= 1
    sums.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"'fc'.*differ from what was saved\); no earlier one is left"):
        export(broken, tmp_path / "out", 2)
    sums.write_text(before)
    # A half-written checkpoint has no number yet.
    (broken / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    shutil.rmtree(broken / "checkpoints" / "4")
    assert read_run(broken).step == 2
    shutil.rmtree(broken / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint yet"):
        export(broken, tmp_path / "out")
    with pytest.raises(UserError, match=r"has no drafter\.json"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_commands(run, tmp_path, capsys):
    main(["export", str(run), str(tmp_path / "out"), "--step", "2", "--dtype", "float32"])
    main(["import", str(tmp_path / "out"), str(tmp_path / "imported")])
    assert (tmp_path / "imported" / "checkpoints" / "0").is_dir()
    with pytest.raises(SystemExit) as stop:
        main(["import", str(tmp_path / "absent"), str(tmp_path / "other")])
    assert stop.value.code == 2 and "absent" in capsys.readouterr().err
