"""Generate and latency on tiny models, and what infer may import."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dscout_jax.decode import Sampling, seed_of
from dscout_jax.errors import UserError
from infer.answer_file import answer_file
from infer.generate import GenerateSettings, generate
from infer.latency import filled, latency
from infer.load import encode_prompt, load_decoder


def test_generate_streams_the_plain_answer(folders, capsys):
    target, drafter = folders
    settings = GenerateSettings(target=target, max_new_tokens=12)
    plain = generate("Hello", settings)
    text = capsys.readouterr().out
    cut = dict(smaller=(1, 2), min_confidence=0.01)
    for other, options in ((drafter, {}), ("lookup", {}), (drafter, cut)):
        speculative = generate("Hello", dataclasses.replace(settings, drafter=other, **options))
        captured = capsys.readouterr()
        assert captured.out == text
        assert plain.mat == 1.0 and plain.tokens == speculative.tokens == plain.rounds + 1
        assert "MAT" in captured.err and "tokens/s" in captured.err
    loaded, decoder = load_decoder(target, dtype="float32")
    [generation] = decoder.generate([encode_prompt(loaded, "Hello")], 12)
    assert "".join(loaded.tokenizer.stream(iter([generation.tokens]))) == text.removesuffix("\n")
    assert generation.text == loaded.tokenizer.decode(generation.tokens)


def test_a_file_of_conversations(folders, tmp_path, capsys, monkeypatch):
    target, drafter = folders
    rows = [{"id": i, "turns": turns} for i, turns in enumerate((["Hi", "And?", "More"], ["x" * 40], ["Hi"]))]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = GenerateSettings(target=target, max_new_tokens=6, sampling=Sampling(0.9, top_k=40, seed=3))
    out = tmp_path / "deep" / "answers.jsonl"
    answered = answer_file(prompts, settings, slots=2, out=out)
    assert [json.loads(line) for line in out.read_text().splitlines()] == answered
    assert [row["id"] for row in answered] == [0, 1, 2]
    assert [len(row["answers"]) for row in answered] == [3, 1, 1]
    assert answered[0]["answers"][0] == answered[2]["answers"][0], "neither place nor company matters"

    # Each turn is what the conversation so far gets alone, by plain and by speculative decoding.
    loaded, decoder = load_decoder(target, dtype="float32")
    history = []
    for turn, answer in zip(rows[0]["turns"], answered[0]["answers"], strict=True):
        ids = encode_prompt(loaded, turn, history=history)
        draws = settings.sampling._replace(seed=seed_of(3, ids))
        [generation] = decoder.generate([ids], 6, sampling=draws)
        assert generation.text == answer
        history.append((turn, answer))

    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(rows[2]) + "\n"))
    capsys.readouterr()
    answer_file(Path("-"), dataclasses.replace(settings, drafter=drafter), slots=2)
    [row] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["tokens"], row["left_out"]) == (answered[2]["tokens"], 0)
    assert sum(a + 1 for a in row["accepted"][0]) + 1 == len(row["tokens"][0])

    before = out.read_bytes()
    with pytest.raises(UserError, match="exists"):
        answer_file(prompts, settings, out=out)
    assert out.read_bytes() == before
    with pytest.raises(UserError, match="row 0 lacks"):
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"turns": "Hi"}\n')
        answer_file(bad, settings, out=tmp_path / "new.jsonl")
    with pytest.raises(UserError, match="top_p 2"):
        answer_file(prompts, dataclasses.replace(settings, sampling=Sampling(1.0, top_p=2.0)))
    with pytest.raises(UserError, match="prompt 1: "):
        answer_file(prompts, dataclasses.replace(settings, max_new_tokens=980), out=tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()


def test_latency_names_every_part(folders, tmp_path, monkeypatch):
    target, drafter = folders
    out = tmp_path / "latency.json"
    options = dict(dtypes=("float32",), block_sizes=(4,), calls=2, repeats=2, log=str)
    latency(drafter, target=target, out=out, concurrencies=(1, 3), contexts=(64,), **options)
    document = json.loads(out.read_text())
    assert document["machine"]["jax"]
    measured = document["dtypes"]["float32"]
    at = [(f["capacity"], f["prompt_tokens"], f["batch"]) for f in measured]
    # 2 calls, the prefill's token and a block of 4 stand behind the prompt.
    assert at == [(64, 57, 1), (64, 57, 3)]
    for figures in measured:
        assert figures["ar_ms"] > 0 and figures["plain_rows"] in (1, 2)
        low, high = figures["spread"][f"prefill_{figures['prompt_tokens']}"]
        assert 0 < low <= figures["prefill_ms"] <= high
        [block] = figures["blocks"]
        assert block["block_size"] == 4
        assert min(block["draft_ms"], block["verify_ms"], block["round_ms"]) > 0
        parts = block["draft_ms"] + block["verify_ms"] + block["other_ms"]
        assert block["round_ms"] == pytest.approx(parts)
    for wrong, said in (
        (dict(contexts=(6,)), "context of 6"),
        (dict(contexts=(4096,)), "the model has 1024"),
        (dict(concurrencies=(0,)), r"concurrencies \(0,\)"),
        (dict(block_sizes=(9,)), r"\[9\]"),
    ):
        with pytest.raises(UserError, match=said):
            latency(drafter, target=target, out=tmp_path / "none.json", **options | wrong)
    assert not (tmp_path / "none.json").exists()

    # A prompt longer than what one forward reads is of whole chunks, so that none is padded beyond the cache.
    monkeypatch.setattr("infer.latency.CHUNK", 64)
    _, full = load_decoder(target, drafter, dtype="float32")
    decoder, tokens = filled(full, 192, 2)
    assert tokens == 128
    assert decoder.shape(decoder.requests([[1] * tokens], 3)).capacity == 192


def test_infer_needs_no_training_packages():
    """The GPU machine has none of these."""
    blocked = ("grain", "tyro", "torch", "transformers", "orbax", "optax", "train")
    code = "import sys\n"
    code += "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    code += "import infer.answer_file, infer.benchmark, infer.generate, infer.latency, infer.report\n"
    subprocess.run([sys.executable, "-c", code], check=True)
