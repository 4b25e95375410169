"""The command line: help, and a user's mistakes end with exit code 2 and one line."""

import json
import os
import subprocess
import sys

import pytest

from dscout_jax.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "usage: dscout" in capsys.readouterr().out


def test_two_words_name_one_command(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "latency", "--help"])
    assert "--block-sizes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["train", "no/such/config.py"], "no/such/config.py"),
        # With a shard named it does not ask a cluster who it is, which only a fresh process may.
        (
            ["regenerate", "no/such.jsonl", "out.jsonl", "--target", "no/such/folder", "--shard", "0", "1"],
            "no/such/folder",
        ),
        (["generate", "hello", "--target", "no/such/folder"], "no/such/folder"),
        (["generate", "hello", "--temprature", "1"], "temprature"),
        (["bench", "check", "no/such.json", "--identical"], "no/such.json"),
        (["bench", "compare", "no/such", "folders"], "no/such"),
        (["generate", "hello", "--temperature", "-1"], "temperature -1"),
        (["bench", "no/such.jsonl", "--drafter", "lookup"], "no/such.jsonl"),
        (["generate"], "--prompts"),
        (["generate", "hello", "--out", "answers.jsonl"], "--out"),
        (["generate", "hello", "--adapt"], "--policy"),
        (["generate", "hello", "--drafter", "lookup", "--min-confidence", "0.5"], "--smaller"),
        (["generate", "hello", "--drafter", "lookup", "--smaller", "2"], "--min-confidence"),
        (["generate", "hello", "--smaller", "2", "--min-confidence", "0.5"], "--drafter"),
        (["generate", "hello", "--drafter", "d", "--policy", "no/such.json"], "no/such.json"),
        (["bench", "q.jsonl", "--drafter", "d", "--policy", "p.json", "--block-sizes", "4"], "--block-sizes"),
        (["bench", "q.jsonl", "--drafter", "d", "--policy", "no/such.json"], "no/such.json"),
        (["bench", "q.jsonl", "--drafter", "d", "--min-confidence", "0.5"], "--smaller"),
        (["tune", "report", "no/such"], "no/such"),
        (["report"], "folders"),
        (["tune", "q.jsonl", "--drafter", "d", "--all-sizes"], "--validate"),
        (["tune", "q.jsonl", "--drafter", "d", "--validate", "--passes", "0"], "passes 0"),
        (["tune", "q.jsonl", "--drafter", "d", "--temperature", "-1"], "temperature -1"),
        (["bench", "latency", "--drafter", "d", "--concurrencies", "0"], "concurrencies (0,)"),
        (["generate", "--prompts", "no/such.jsonl", "--out", "answers.jsonl"], "no/such.jsonl"),
    ],
)
def test_a_users_mistake_names_the_value_and_exits_with_2(arguments, names, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert names in captured.err + captured.out
    assert not list(tmp_path.iterdir())


def test_the_gate_exits_with_1_and_the_reason(tmp_path, capsys):
    row = {"dataset": "chat", "drafter": "mine", "dtype": "bfloat16", "block_size": 4, "n": 2}
    row |= {"temperature": 0.0, "concurrency": 1}
    rows = [row | {"speedup": 1.1, "identical": 2}]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    main(["bench", "check", str(tmp_path), "--identical", "--min-speedup", "1.1"])
    with pytest.raises(SystemExit) as stop:
        main(["bench", "check", str(tmp_path), "--min-speedup", "1.2"])
    assert stop.value.code == 1 and "chat" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["bench", "check", str(tmp_path), "--min-mat", "1.2"])
    assert stop.value.code == 2 and "row 0" in capsys.readouterr().err


def test_library_and_inference_import_without_the_training_packages():
    code = (
        "import sys, dscout_jax, dscout_jax.decode, dscout_jax.objective, dscout_jax.interop, infer.load, "
        "infer.answer_file, infer.benchmark, infer.compare, infer.generate, infer.latency, infer.pictures, "
        "infer.policy, infer.report, infer.tune, infer.validate\n"
        "bad = {'grain', 'tyro', 'torch', 'transformers', 'orbax', 'train'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TAKES_MEMORY = """
import os, resource, sys
from dscout_jax.cli.memory import keep_memory

keep_memory()
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = b"x" * 2**27
    del taken
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(os.environ["GLIBC_TUNABLES"], *faults, *sys.argv[1:])
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="this system has no glibc")
def test_a_command_takes_its_memory_once():
    def said(**variables):
        rest = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
        words = [sys.executable, "-c", TAKES_MEMORY, "a word"]
        return subprocess.run(words, env=rest | variables, capture_output=True, text=True, check=True).stdout

    tunables, _, _, last, *words = said().split()
    # 128 MiB are 64 large pages at least.
    assert "hugetlb=1" in tunables and int(last) < 16 and words == ["a", "word"]
    own = "glibc.malloc.check=0"
    assert said(GLIBC_TUNABLES=own).split()[0] == own
