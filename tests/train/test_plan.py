"""`dscout plan` on simulated devices: what it says of memory, collectives and operations."""

import dataclasses
import json

import pytest

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from train import flops
from train import plan as planning
from train.collectives import Moved, moved
from train.plan import Program, plan
from train.plan_page import advice
from train.settings import load_settings

TARGET = TargetConfig(48, 32, 64, 4, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, True, False, (1,))
CONFIG = """
from dscout_jax.objective import dflash
from train.settings import TrainSettings

config = TrainSettings(
    objective=dflash(4), data="", run="", target="{folder}", num_layers=1, block_size=4,
    target_layer_ids=(0, 1), mask_token_id=47, seq_len=24, batch=16, num_anchors=4, chunk=12,
    scan_layers=True, mesh=(2, 4, 1), cache_features=False,
)
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TARGET.to_hf()))
    (tmp_path / "tiny.py").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path / "tiny.py"


def test_simulated_devices_gather_weights_and_scatter_gradients(config, tmp_path):
    text = plan(config, "cpu:8", out=tmp_path / "deep" / "out")
    found = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert (tmp_path / "deep" / "out.md").read_text() == text and "cpu:8: compiles" in text
    assert found["chips"] == 8 and found["fits"] is None and "roofline" not in found
    # Every matrix that a program uses is gathered in fp32: two scanned layers and the table for the features;
    # table, head and the drafter's own for the step, whose gradients go back the same way.
    layer, table = flops.layer_weights(TARGET), 48 * 32
    own = layer + 32 * 2 * 32
    share = 3 / 4 * 4
    assert found["collectives"]["all-gather"]["bytes"] == share * (2 * layer + table + 2 * table + own)
    # Keys and values are used twice, for the context and for the blocks.
    assert found["collectives"]["reduce-scatter"]["bytes"] == share * (own + 2 * 16 * 32)
    # What is summed over all devices is a drafter's share over `data`, norms and counts: no activations.
    assert found["collectives"]["all-reduce"]["bytes"] < 4 * (own / 4 + 1000)
    step = found["memory"]["step"]
    assert step["peak"] == sum(step[k] for k in ("arguments", "temporaries", "results", "resident"))


def test_plan_refuses_what_does_not_go_together(config, tmp_path):
    for options, said in (
        ({"topology": "v99:2"}, "v5p:4x4x4"),
        ({"topology": "cpu:8", "mesh": (3, 1, 1)}, "does not fit 8 devices"),
        ({"topology": "cpu:8", "batch": 12}, "batch 12"),
        ({"topology": "cpu:8", "mesh": (1, 2, 4)}, "KV heads"),
        ({"topology": "cpu:9999"}, "simulated devices"),
    ):
        with pytest.raises(UserError, match=said):
            plan(config, **options)
    config.write_text(config.read_text().replace("mask_token_id=47, ", ""))
    with pytest.raises(UserError, match="mask_token_id"):
        plan(config, "cpu:8")


def test_what_does_not_fit_says_what_to_change(config, monkeypatch):
    monkeypatch.setitem(flops.CHIPS, "cpu", flops.Chip(1000, 1e9, 1e9, 1e6))
    program = Program(600, 500, 0, 0, {})
    monkeypatch.setattr(planning, "compile_step", lambda *args: {"features": program, "step": program})
    text = planning.plan(config, "cpu:8", batch=32)
    assert "does not fit" in text.splitlines()[0]
    assert "To make it fit: 4 rows a chip at a time: raise accumulation." in text
    # Each piece of advice taken, the next is another, until only a smaller job is left.
    settings = dataclasses.replace(load_settings(config), batch=8, scan_layers=False, chunk=512)
    mesh = {"data": 2, "fsdp": 4, "tensor": 1}
    for said, changes in (
        ("remat='layer'", {"remat": "layer"}),
        ("lower attention_chunk", {"attention_chunk": 16}),
        ("lower chunk", {"chunk": 256}),
        ("scan_layers=True", {"scan_layers": True}),
        ("mesh (1, 8, 1)", {}),
        ("remat='all'", {"remat": "all"}),
        ("lower num_anchors", {}),
    ):
        assert said in advice(settings, mesh)
        if said.startswith("mesh"):
            mesh = {"data": 1, "fsdp": 8, "tensor": 1}
        settings = dataclasses.replace(settings, **changes)


PROGRAM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.7 (p: f32[64]) -> f32[16] {
  %all-reduce.1 = f32[64]{0:T(8)} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  ROOT %slice = f32[16] slice(%all-reduce.1)
}

%begin (p: f32[8]) -> f32[16] {
  %g.1 = f32[16]{0} all-gather(%p), channel_id=9, replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
}

%goes_on (p: f32[8]) -> f32[16] {
  %g.2 = f32[16]{0} all-gather(%p), channel_id=9, replica_groups={{0,1}}, frontend_attributes={chain_id="0"}
}

%inner (x: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %fusion.2 = f32[16] fusion(%x), kind=kCustom, calls=%goes_on
}

%body (x: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %g = (bf16[8,16]{1,0}, bf16[4]{0}) all-gather(%x, %y), replica_groups=[2,4]<=[8], dimensions={0}
  %fusion.1 = f32[16] fusion(%x), kind=kCustom, calls=%begin
  %hide = (s32[], bf16[8]) while(%t), condition=%condition, body=%inner
}

%condition (x: (s32[], bf16[8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (p: f32[64]) -> f32[16] {
  %w = (s32[], bf16[8]) while(%t), condition=%condition, body=%body
  %known = (s32[], bf16[8]) while(%t), condition=%condition, body=%body, x={"known_trip_count":{"n":"3"}}
  %f = f32[16] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.7
  %r = f32[10]{0} all-reduce(%f), replica_groups={}, to_apply=%sum
  %s = (f32[2]{0}, f32[8]{0}) all-gather-start(%f), replica_groups={{0,1,2,3}}
  %c = f32[6]{0} collective-permute(%f), source_target_pairs={{0,1}}
  %one = f32[6]{0} all-reduce(%f), replica_groups={{0},{1}}, to_apply=%sum
}
"""


def test_collectives_are_counted_through_loops_and_fusions():
    assert moved(PROGRAM, 8) == {
        "all-gather": Moved(5 + 3 + 1 + 3, 8 * 0.75 * 2 * (8 * 16 + 4) + 0.75 * 32 + 3 * 0.5 * 64),
        "reduce-scatter": Moved(1, 0.75 * 4 * 64),
        "all-reduce": Moved(1, 2 * 7 / 8 * 40),
        "collective-permute": Moved(1, 24.0),
    }


def test_operations_from_shapes(config):
    settings = load_settings(config)
    drafter = DrafterConfig.for_target(
        TARGET, num_layers=1, block_size=4, mask_token_id=47, target_layer_ids=(0, 1)
    )
    found = flops.step_flops(settings, TARGET, drafter, used=2)
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    assert flops.layer_weights(TARGET) == layer
    target = 2 * 24 * 2 * layer + 2 * 2 * 24 * 24 * 32
    blocks, head = 2 * 16 * layer, 2 * 12 * 32 * 48
    context = 2 * 2 * 24 * 64 * 32 + 3 * 2 * 24 * 2 * 32 * 16
    attention = 3 * 4 * 16 * 32 * (12 + 4)
    assert found.needed == 16 * (target + 3 * blocks + context + attention + 2 * head)
    assert found.needed < found.executed
    chip = flops.Chip(1, 1e9, 1e9, 1e6)
    bound = flops.roofline(found, chip, 8, 5e6, 16 * 24)
    assert bound.step == 5.0 and bound.tokens_a_day == 16 * 24 / 5 * 86400
    bound = flops.roofline(found, chip, 8, 0, 16 * 24)
    assert bound.step == pytest.approx(found.executed / 8e9 + found.traffic / 8e9)
