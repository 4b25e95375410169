"""From a drafter's folder to a policy: what is measured, what resumes, what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from dscout_jax.decode import mat
from dscout_jax.errors import UserError
from infer.load import encode_prompt, load_decoder
from infer.policy import load_policy
from infer.tune import TuneSettings, check_policy, table, tune


@pytest.fixture
def settings(folders, prompt_file, tmp_path):
    target, drafter = folders
    return TuneSettings(
        prompts=(prompt_file,),
        drafter=drafter,
        target=str(target),
        dtype="float32",
        block_sizes=(2, 4),
        concurrencies=(1, 2),
        max_new_tokens=12,
        limit=3,
        rows=2,
        repeats=1,
        out=tmp_path / "tuned",
    )


def test_measures_once_and_predicts_what_was_logged(settings):
    policy = tune(settings, log=lambda line: None)
    loaded, decoder = load_decoder(settings.target, settings.drafter, dtype="float32")
    texts = [json.loads(line)["turns"][0] for line in settings.prompts[0].read_text().split("\n")[:3]]
    answers = [decoder.generate([encode_prompt(loaded, text)], 12)[0].accepted for text in texts]
    model = policy.workloads["questions"]
    assert np.isclose(model.mat(4), mat(answers)) and model.rounds == sum(map(len, answers))
    assert policy.latency.concurrencies == [1, 2] and policy.latency.block_sizes == [1, 2, 4]
    assert load_policy(settings.out / "policy.json").table() == policy.table()
    assert table(policy).count("**") == 2 * 2

    before = (settings.out / "records.jsonl").read_text()
    again = tune(dataclasses.replace(settings, block_sizes=(2, 4)), log=lambda line: None)
    assert (settings.out / "records.jsonl").read_text() == before and again == policy

    assert check_policy(policy, loaded, decoder, "float32") == []
    moved = policy.about | {"machine": policy.about["machine"] | {"cpu": "abacus"}}
    (doubt,) = check_policy(dataclasses.replace(policy, about=moved), loaded, decoder, "float32")
    assert "abacus" in doubt
    with pytest.raises(UserError, match="another dtype"):
        check_policy(policy, loaded, decoder, "bfloat16")
    other = dataclasses.replace(policy, about=policy.about | {"drafter": "x"})
    with pytest.raises(UserError, match="another drafter"):
        check_policy(other, loaded, decoder, "float32")


def test_wrong_settings_are_named_before_anything_runs(settings):
    with pytest.raises(UserError, match=r"\[5\]"):
        tune(dataclasses.replace(settings, block_sizes=(2, 5)))
    with pytest.raises(UserError, match="one name"):
        dataclasses.replace(settings, prompts=settings.prompts * 2)
    for wrong in ({"concurrencies": ()}, {"concurrencies": (0,)}, {"limit": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            dataclasses.replace(settings, **wrong)
    assert not settings.out.exists()
