"""`benchmarks/drafter_in_pytorch.py`: both sides make the same rounds, in fp32 and in bf16."""

import json
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config import DrafterConfig
from dscout_jax.interop import load_target, names, save_drafter

torch = pytest.importorskip("torch", reason="the other side is PyTorch: install the parity extra")
tiny = pytest.importorskip("torch_tiny")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "drafter_in_pytorch.py"


def test_the_same_rounds_on_both_sides(tmp_path):
    tiny.target("qwen3", tied=True, vocab_size=8, spread=1.0).save_pretrained(tmp_path / "target")
    tiny.write_tokenizer(tmp_path / "target")
    config = DrafterConfig.for_target(
        load_target(tmp_path / "target", jnp.float32).config, num_layers=1, block_size=3, mask_token_id=7
    )
    rng = np.random.default_rng(0)
    flat = {
        path: rng.normal(0, 0.2, shape) if len(shape) == 2 else np.ones(shape)
        for path, shape in names.drafter_shapes(config).items()
    }
    save_drafter(tmp_path / "drafter", config, names.nest(flat), dtype=jnp.float32, draft_ids=range(6))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abba", "ba")))
    out = tmp_path / "out.json"
    command = [str(prompts), "--drafter", str(tmp_path / "drafter"), "--target", str(tmp_path / "target")]
    runpy.run_path(str(SCRIPT))["main"]([*command, "--max-new-tokens", "40", "--out", str(out)])
    found = json.loads(out.read_text())
    exact = found["dtypes"]["float32"]
    assert exact["same_rounds"] == 2 and exact["mat"]["ours"] == exact["mat"]["pytorch"] > 1
    best = found["faster"]
    assert best["plain_ratio"] == best["ours plain"][0] / best["pytorch plain"][0]
    assert best["speculative_ratio"] > best["speculative_ratio_if_its_drafts_were_free"] > 0
    for sides in found["dtypes"].values():
        assert set(sides["tokens_per_s"]) == {
            *("ours plain, 1 row", "ours plain, 2 rows", "ours speculative", "pytorch plain"),
            *("pytorch speculative", "pytorch speculative, without_drafts"),
            "pytorch speculative, whole vocabulary",
        }
