"""The command line: help, and a user's mistakes end with exit code 2 and one line."""

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
        (["regenerate", "no/such.jsonl", "out.jsonl", "--target", "no/such/folder"], "no/such/folder"),
        (["generate", "hello", "--target", "no/such/folder"], "no/such/folder"),
        (["generate", "hello", "--temprature", "1"], "temprature"),
        (["generate", "hello", "--temperature", "-1"], "temperature -1"),
        (["generate"], "--prompts"),
        (["generate", "hello", "--out", "answers.jsonl"], "--out"),
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


def test_library_and_inference_import_without_the_training_packages():
    code = (
        "import sys, dscout_jax, dscout_jax.decode, dscout_jax.objective, dscout_jax.interop, infer.load, "
        "infer.answer_file, infer.benchmark, infer.generate, infer.latency, infer.report\n"
        "bad = {'grain', 'tyro', 'torch', 'transformers', 'orbax', 'train'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
