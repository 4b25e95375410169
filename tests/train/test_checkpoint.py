"""Checkpoints: a damaged one is found, named and passed over; the best on held-out rows stays."""

import jax.numpy as jnp
import numpy as np
import pytest
from damage import flip

from dscout_jax.errors import UserError
from train import checkpoint
from train.checkpoint import Checkpoints
from train.checksums import checksums, differing
from train.step import TrainState


def state(step, value=1.0, width=96):
    params = {"fc": {"weight": jnp.full((64, width), value) + jnp.arange(float(width))}}
    return TrainState(params, {"mu": jnp.zeros(3)}, jnp.int32(step), jnp.int32(0))


def saved(path, scores, keep=2):
    checkpoints = Checkpoints(path, keep)
    for step, mat in scores.items():
        checkpoints.save(state(step, step), {"at": step}, {"a": 1}, mat)
        checkpoints.wait()
    return checkpoints


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, capsys):
    saved(tmp_path, {1: None, 2: None, 3: None}, keep=3).close()
    whole = tmp_path / "checkpoints"
    flip(whole / "3" / "state")
    next(whole.joinpath("2", "state").rglob("_METADATA")).write_text("torn")
    found, position = Checkpoints(tmp_path, 3).restore(state(0), {"a": 1})
    assert position == {"at": 1} and int(found.step) == 1
    np.testing.assert_array_equal(found.params["fc"]["weight"], state(1, 1).params["fc"]["weight"])
    said = capsys.readouterr().out
    assert "checkpoints/3 is damaged" in said and "checkpoints/2 is damaged" in said
    # Set aside and no step's any more: the run can write them again, and once more damage them.
    assert sorted(p.name for p in whole.iterdir()) == ["1", "2.damaged", "3.damaged"]
    again = Checkpoints(tmp_path, 3)
    again.save(state(2, 2), {"at": 2}, {"a": 1})
    again.close()
    flip(whole / "2" / "state")
    assert Checkpoints(tmp_path, 3).restore(state(0), {"a": 1})[1] == {"at": 1}
    assert sorted(p.name for p in whole.iterdir()) == ["1", "2.damaged", "3.damaged"]
    flip(whole / "1" / "state")
    with pytest.raises(UserError, match="every checkpoint"):
        Checkpoints(tmp_path, 3).restore(state(0), {"a": 1})
    assert (whole / "1").is_dir()


def test_what_another_process_cannot_read_none_goes_on_with(tmp_path, capsys, monkeypatch):
    saved(tmp_path, {1: None, 2: None}).close()
    answers = iter([False, True])
    monkeypatch.setattr(checkpoint, "everywhere", lambda ok: ok and next(answers))
    found, _ = Checkpoints(tmp_path, 2).restore(state(0), {"a": 1})
    assert int(found.step) == 1 and "another process could not read it" in capsys.readouterr().out


def test_another_models_state_is_refused_and_not_damaged(tmp_path):
    saved(tmp_path, {1: None, 2: None}).close()
    with pytest.raises(UserError, match=r"fc/weight \(\(64, 96\) there, \(64, 32\) here\)"):
        Checkpoints(tmp_path, 2).restore(state(0, width=32), {"a": 1})
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]


def test_another_contract_is_refused_and_nothing_removed(tmp_path):
    saved(tmp_path, {1: None}).close()
    with pytest.raises(UserError, match="a: 1 then, 2 now"):
        Checkpoints(tmp_path, 2).restore(state(0), {"a": 2})
    assert (tmp_path / "checkpoints" / "1").is_dir()


def test_the_drafters_shape_is_never_accepted(tmp_path):
    contract = {"num_layers": 1, "block_size": 4, "target_layer_ids": [1], "mask_token_id": 5, "a": 1}
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(state(1, 1), {"at": 1}, contract)
    checkpoints.wait()
    for name in ("num_layers", "block_size", "target_layer_ids", "mask_token_id"):
        other = contract | {name: 9, "a": 2}
        with pytest.raises(UserError, match=f"accept.*{name}.*another run folder, with init="):
            checkpoints.restore(state(0), other, accept=("a", name))
        with pytest.raises(UserError, match=f"{name}: .*another run folder, with init=") as said:
            checkpoints.restore(state(0), other, accept=("a",))
        assert "--accept" not in str(said.value)
    assert checkpoints.restore(state(0), contract | {"a": 2}, accept=("a",))[1] == {"at": 1}


def test_the_best_stays_beside_the_newest(tmp_path):
    saved(tmp_path, {1: 1.5, 2: 2.5, 3: 2.0, 4: None, 5: None}).close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "4", "5"]
    # A run that goes on knows which it was.
    saved(tmp_path, {6: 2.25, 7: None, 8: None}).close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "7", "8"]
    saved(tmp_path / "none", {1: None, 2: None, 3: None}).close()
    assert sorted(p.name for p in (tmp_path / "none" / "checkpoints").iterdir()) == ["2", "3"]


def test_checksums_see_any_flipped_bit_and_any_exchange():
    before = checksums(state(1)._asdict())
    for change in (
        lambda w: w.at[5, 7].set(np.nextafter(np.float32(w[5, 7]), np.float32(100))),
        lambda w: w.at[0, 0].set(-w[0, 0]),
        lambda w: w[:, ::-1],
        lambda w: w.at[3].set(w[3][::-1]),
    ):
        changed = state(1)._replace(params={"fc": {"weight": change(state(1).params["fc"]["weight"])}})
        assert differing(before, changed._asdict()) == ["['params']['fc']['weight']"]
        assert differing(before, {"params": changed.params}) == ["['params']['fc']['weight']"]
    for dtype in (jnp.bfloat16, jnp.float16):
        half = {"w": jnp.arange(6, dtype=dtype).reshape(2, 3)}
        assert differing(checksums(half), half) == [] != differing(checksums(half), {"w": half["w"][::-1]})
