"""Generate and latency on tiny models, and what infer may import."""

import json
import subprocess
import sys

import pytest

from infer.generate import generate
from infer.latency import latency
from infer.load import encode_prompt, load_decoder


def test_generate_streams_the_plain_answer(folders, capsys):
    target, drafter = folders
    options = dict(target=target, dtype="float32", max_new_tokens=12)
    plain = generate("Hello", **options)
    text = capsys.readouterr().out
    speculative = generate("Hello", drafter=drafter, **options)
    captured = capsys.readouterr()
    assert captured.out == text
    assert plain.mat == 1.0 and plain.tokens == speculative.tokens == plain.rounds + 1
    assert "MAT" in captured.err and "tokens/s" in captured.err
    loaded, decoder = load_decoder(target, dtype="float32")
    [generation] = decoder.generate([encode_prompt(loaded, "Hello")], 12)
    assert "".join(loaded.tokenizer.stream(iter([generation.tokens]))) == text.removesuffix("\n")


def test_latency_names_every_part(folders, tmp_path):
    target, drafter = folders
    out = tmp_path / "latency.json"
    options = dict(dtypes=("float32",), block_sizes=(2, 4), calls=2, repeats=1, log=str)
    latency(drafter, target=target, out=out, **options)
    document = json.loads(out.read_text())
    figures = document["dtypes"]["float32"]
    assert document["machine"]["jax"] and figures["ar_ms"] > 0 and figures["plain_rows"] in (1, 2)
    for block, size in zip(figures["blocks"], (2, 4), strict=True):
        assert block["block_size"] == size
        assert min(block["draft_ms"], block["verify_ms"], block["round_ms"]) > 0
        parts = block["draft_ms"] + block["verify_ms"] + block["other_ms"]
        assert block["round_ms"] == pytest.approx(parts)


def test_infer_needs_no_training_packages():
    """The GPU machine has none of these."""
    blocked = ("grain", "tyro", "torch", "transformers", "orbax", "optax", "train")
    code = "import sys\n"
    code += "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    code += "import infer.benchmark, infer.generate, infer.latency, infer.report\n"
    subprocess.run([sys.executable, "-c", code], check=True)
