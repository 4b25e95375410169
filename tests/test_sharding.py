"""The table of parameter places: complete, unambiguous, and clear about what does not divide."""

import dataclasses
import re

import jax
import pytest
from jax.sharding import PartitionSpec

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.models import stack_layers
from dscout_jax.sharding import RULES, by_rows, choose_fsdp, make_mesh, spec_of, specs

TARGET = TargetConfig(48, 32, 64, 11, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, True, False, (1,))
DRAFTER = DrafterConfig.for_target(
    TARGET, num_layers=2, block_size=4, mask_token_id=47, target_layer_ids=(0, 2)
)


def test_every_parameter_matches_one_rule_and_every_rule_a_parameter():
    light = dataclasses.replace(DRAFTER, fusion="softmax")
    shapes = names.target_shapes(TARGET) | names.drafter_shapes(DRAFTER) | names.drafter_shapes(light)
    used = set()
    for path in shapes:
        found = [pattern for pattern, _ in RULES if re.fullmatch(pattern, path)]
        assert len(found) == 1, path
        used |= set(found)
    assert used == {pattern for pattern, _ in RULES}
    with pytest.raises(UserError, match="matches 0 sharding rules"):
        spec_of("layers_0/mlp/bias", (4,), make_mesh())


def test_stacked_layers_lie_as_single_ones_do():
    flat = {
        path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in names.target_shapes(TARGET).items()
    }
    mesh = make_mesh(1, 4, 2)
    stacked = specs(jax.eval_shape(lambda p: stack_layers(p, 3), names.nest(flat)), mesh)
    single = specs(names.nest(flat), mesh)
    for path, spec in names.flatten(single["layers_2"]).items():
        assert names.flatten(stacked["layers"])[path] == PartitionSpec(None, *spec)
    assert by_rows(single["embed_tokens"]["weight"]) == PartitionSpec(None, "fsdp")


def test_what_does_not_divide_is_named():
    mesh = make_mesh(1, 8, 1)
    with pytest.raises(UserError, match=r"'fc/weight' of shape \(12, 24\): 12 .* 8 devices .* 'fsdp'"):
        spec_of("fc/weight", (12, 24), mesh)
    with pytest.raises(UserError, match=r"2 x 2 x 3 .* does not fit 8"):
        make_mesh(2, 2, 3)


def test_weights_are_split_as_far_as_the_memory_asks():
    assert choose_fsdp(64, 8_000, None, [32]) == 1
    assert choose_fsdp(64, 8_000, 32_000, [32]) == 1
    assert choose_fsdp(64, 8_000, 8_000, [32]) == 4
    assert choose_fsdp(64, 8_000, 900, [32]) == 32  # 64 does not divide the width
    assert choose_fsdp(12, 8_000, 3_000, [32]) == 4
