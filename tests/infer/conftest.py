"""A tiny target and drafter as folders, and a file of prompts."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))

from interop_tools import target_config, write_target

from dscout_jax.config import DrafterConfig
from dscout_jax.interop import save_drafter
from dscout_jax.models import Drafter

BLOCK = 4


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Programs that several tests build are compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """(target folder, drafter folder)."""
    root = tmp_path_factory.mktemp("models")
    config = target_config(max_position=1024)
    write_target(root / "target", config)
    shapes = dict(num_layers=1, block_size=BLOCK, mask_token_id=265, target_layer_ids=(0, 1))
    drafter = DrafterConfig.for_target(config, **shapes)
    block = jnp.zeros((1, 1, BLOCK, config.hidden_size))
    taps = jnp.zeros((1, 2, 2 * config.hidden_size))
    variables = Drafter(drafter).init(jax.random.key(0), taps, block, jnp.ones((1, 1), jnp.int32))
    save_drafter(root / "drafter", drafter, variables["params"], {"target": "tiny"})
    return root / "target", root / "drafter"


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    texts = ["Hi", "What is 2 + 2?", "Line\u2028separator", "x" * 400]
    path.write_text("".join(json.dumps({"turns": [t, "more"]}, ensure_ascii=False) + "\n" for t in texts))
    return path
