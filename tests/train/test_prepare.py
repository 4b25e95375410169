"""The target on its mesh: read where it stays, and there once."""

import dataclasses
import gc
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tiny_run import CONFIG, tiny_settings, tiny_target, write_answers

from dscout_jax.sharding import shardings
from train import loop, prepare
from train.hosts import mesh_for, state_bytes


class Reached(Exception):
    """The first step was about to run."""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings of a run that reads the tiny target by itself, in bf16; and the meshes it is read onto."""
    write_answers(tmp_path / "answers.jsonl")
    asked = []

    def open_target(source, dtype, cache_dir, mesh):
        asked.append(mesh)
        found = tiny_target()
        found.params = jax.tree.map(lambda w: w.astype(dtype), found.params)
        return found

    monkeypatch.setattr(prepare, "open_words", lambda source, cache_dir: tiny_target())
    monkeypatch.setattr(prepare, "open_target", open_target)
    return dataclasses.replace(tiny_settings(tmp_path), dtype="bfloat16", mesh=None), asked


def test_the_mesh_is_chosen_before_weights_are_read(settings, monkeypatch):
    settings, asked = settings
    # Weights may fill a quarter of a device: where they would fill it, they are cut in four.
    config = prepare.drafter_config(settings, tiny_target())
    memory = state_bytes(CONFIG, config, 2)
    monkeypatch.setattr(prepare, "mesh_for", partial(mesh_for, memory=memory))
    ready = prepare.prepare(settings)
    assert [dict(mesh.shape) for mesh in asked] == [{"data": 2, "fsdp": 4, "tensor": 1}]
    assert jax.tree.map(lambda w: w.sharding, ready.weights) == shardings(ready.weights, asked[0])
    assert ready.target.params == {} and ready.target.fingerprint == "f00d"


def test_scanned_layers_are_on_the_mesh_once(settings, monkeypatch):
    settings, _ = settings
    settings = dataclasses.replace(settings, scan_layers=True, mesh=(2, 4, 1))
    before, found = jax.live_arrays(), []

    def make_step(*args):
        def step(*args):
            gc.collect()
            found.extend(x for x in jax.live_arrays() if not any(x is y for y in before))
            raise Reached

        return step

    monkeypatch.setattr(loop, "make_step", make_step)
    with pytest.raises(Reached):
        loop.train(settings)
    shapes = [x.shape for x in found if x.dtype == jnp.bfloat16]
    one = (CONFIG.intermediate_size, CONFIG.hidden_size)
    # Two layers up to the tap, stacked; of what is not stacked, the table and the norm alone.
    assert shapes.count((2, *one)) == 2 and one not in shapes
    tables = [x for x in found if x.shape == (CONFIG.vocab_size, CONFIG.hidden_size)]
    buffers = {x.addressable_shards[0].data.unsafe_buffer_pointer() for x in tables}
    assert len(buffers) == 1 and tables[0].dtype == jnp.bfloat16
    stacked = [x for x in found if x.shape == (2, *one)]
    assert all(x.sharding.shard_shape(x.shape) == (2, one[0], one[1] // 4) for x in stacked)
