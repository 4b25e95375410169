"""Which tokens of a conversation are learnt: exactly the assistant's words and their end token."""

import os
from pathlib import Path

import pytest
from interop_tools import CHATML, byte_tokenizer

from dscout_jax.errors import UserError
from dscout_jax.interop import Tokenizer, load_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = [{"role": "user", "content": f"Question {i}?"} for i in range(3)]
WORDS = ["<b>One</b>, café.", "Two 🙂", "\n  Three\n\nlines  "]
SAY = [{"role": "assistant", "content": words} for words in WORDS]
ONE = [ASK[0], SAY[0]]
THREE = [ASK[0], SAY[0], ASK[1], SAY[1], ASK[2], SAY[2]]
CLOSED = "<think>\n\n</think>\n\n"

MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}",
)
TRIMMED = CHATML.replace("m['content'] +", "m['content'] | trim +")
# The generation prompt opens the thought, and the history closes it.
OPENED = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
# Qwen3's way with thoughts in few lines: the last answer gets one, an empty one if need be; older ones lose
# theirs; without thinking the prompt closes it.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}{% set words = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + words if loop.last else words }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def _tokenizer(template: str | None = CHATML) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), template, {"eos_token": "<|im_end|>"}, stop_ids=(256,))


def _learnt(tokenizer: Tokenizer, turns, **options) -> list[str]:
    """The supervised stretches as text."""
    ids, mask = tokenizer.chat_with_mask(turns, **options)
    assert len(ids) == len(mask)
    shown = tokenizer.show_mask(ids, mask)
    return [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("turns", [ONE, THREE])
def test_plain_templates_with_and_without_markers(template, system, turns):
    tokenizer = _tokenizer(template)
    words = [turn["content"] + "<|im_end|>" for turn in turns if turn["role"] == "assistant"]
    assert _learnt(tokenizer, system + turns) == words
    assert _learnt(tokenizer, system + turns, last_only=True) == words[-1:]
    ids, _ = tokenizer.chat_with_mask(system + turns)
    assert ids == tokenizer.chat(system + turns, generate=False)


def test_the_row_is_the_decoding_prompt_and_then_the_answer():
    tokenizer = _tokenizer()
    prompt = tokenizer.chat([SYSTEM, *THREE[:5]])
    ids, mask = tokenizer.chat_with_mask([SYSTEM, *THREE], last_only=True)
    assert ids[: len(prompt)] == prompt and not any(mask[: len(prompt)])
    answer = [*tokenizer.encode(WORDS[2]), tokenizer.stop_ids[0]]
    row = tokenizer.answer_row(prompt, answer)
    assert (ids[: len(row[0])], mask[: len(row[1])]) == row
    assert not any(mask[len(row[1]) :])


def test_trimmed_words_empty_words_and_a_last_user_turn():
    assert _learnt(_tokenizer(TRIMMED), THREE) == [words.strip() + "<|im_end|>" for words in WORDS]
    silent = [ASK[0], {"role": "assistant", "content": ""}, ASK[1], SAY[1]]
    assert _learnt(_tokenizer(), silent) == ["<|im_end|>", WORDS[1] + "<|im_end|>"]
    assert _learnt(_tokenizer(), [*ONE, ASK[1]]) == [WORDS[0] + "<|im_end|>"]


def test_what_the_prompt_opens_is_not_learnt():
    thought = [ASK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}]
    assert _learnt(_tokenizer(OPENED), thought) == ["hm\n</think>\n\nYes<|im_end|>"]


def test_refusals():
    tokenizer = _tokenizer()
    with pytest.raises(UserError, match="no assistant turn"):
        tokenizer.chat_with_mask(ASK[:1])
    with pytest.raises(UserError, match="at least one turn"):
        tokenizer.chat([])
    with pytest.raises(UserError, match="turn 0"):
        tokenizer.chat(["hello"])
    with pytest.raises(UserError, match="must be text"):
        tokenizer.chat([{"role": "user", "content": None}])
    with pytest.raises(UserError, match="already ends with the assistant"):
        tokenizer.chat(ONE)
    with pytest.raises(UserError, match="no thinking mode"):
        tokenizer.chat(ASK[:1], thinking=True)
    with pytest.raises(UserError, match="no chat template"):
        _tokenizer(None).chat(ASK[:1])
    with pytest.raises(UserError, match="only users here"):
        _tokenizer("{{ raise_exception('only users here') }}").chat(ASK[:1])
    with pytest.raises(UserError, match="not valid"):
        _tokenizer("{% if %}").chat(ASK[:1])
    with pytest.raises(UserError, match="refuses"):
        _tokenizer("{{ messages.append(1) }}").chat(ASK[:1])
    with pytest.raises(UserError, match="cannot be told apart"):
        _tokenizer(
            "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}"
        ).chat_with_mask(ONE)


def test_the_environment_is_the_usual_one():
    template = (
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }} {{ strftime_now('%Y') | length }}\n"
        "   {% for m in messages %}\n{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.content }}\n{% endfor %}\n"
        "{% if tools is not none %}tools{% endif %}"
    )
    tokenizer = Tokenizer(byte_tokenizer(), template, {"bos_token": "<|endoftext|>"})
    text = tokenizer.decode(tokenizer.chat(THREE[:3]), skip_special=False)
    assert text == '<|endoftext|>{"a": "<é>"} 4\nQuestion 0?\n'


def test_stream_waits_for_whole_characters():
    tokenizer = _tokenizer()
    ids = tokenizer.encode("aé🙂b")
    pieces = list(tokenizer.stream(iter([ids[:2], ids[2:4], ids[4:5], ids[5:]])))
    assert pieces == ["a", "é", "🙂b"] and "".join(pieces) == tokenizer.decode(ids)
    assert tokenizer.decode([*ids, 258]) == "aé🙂b"
    assert tokenizer.decode([*ids, 258], skip_special=False) == "aé🙂b<|im_end|>"


def _qwen3() -> Path | None:
    near = Path(__file__).parents[3] / "shared" / "data" / "qwen3-tokenizer"
    folder = Path(os.environ.get("DSCOUT_QWEN3_TOKENIZER", near))
    return folder if (folder / "tokenizer.json").is_file() else None


@pytest.fixture(scope="module", params=["Qwen3's own", "small"])
def thinker(request) -> Tokenizer:
    """Qwen3's tokenizer, where it is at hand, and a small one with its manners."""
    return _tokenizer(THINKING) if request.param == "small" else request.getfixturevalue("qwen3")


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    folder = _qwen3()
    if folder is None:
        pytest.skip("Qwen3's tokenizer is not here; DSCOUT_QWEN3_TOKENIZER may name its folder")
    return load_tokenizer(folder)


@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("last_only", [False, True])
def test_words_are_learnt_never_the_empty_thought(thinker, system, thinking, last_only):
    words = [*WORDS[:2], WORDS[2].lstrip("\n")]  # the template itself trims the last turn
    ends = [text + "<|im_end|>" for text in words]
    assert _learnt(thinker, system + ONE, thinking=thinking) == ends[:1]
    options = {"thinking": thinking, "last_only": last_only}
    assert _learnt(thinker, system + THREE, **options) == (ends[-1:] if last_only else ends)
    ids, mask = thinker.chat_with_mask(system + THREE, thinking=thinking)
    assert ids == thinker.chat(system + THREE, thinking=thinking, generate=False)
    assert CLOSED in thinker.decode(ids)
    assert "think" not in thinker.decode([i for i, learn in zip(ids, mask, strict=True) if learn])


def test_a_real_thought_is_learnt_and_old_ones_are_forgotten(thinker):
    thought = "<think>\nCount them.\n</think>\n\nThree."
    turns = [ASK[0], {"role": "assistant", "content": thought}]
    assert _learnt(thinker, turns, thinking=True) == [thought + "<|im_end|>"]
    assert _learnt(thinker, [*turns, *THREE[2:4]], thinking=True) == [
        "Three.<|im_end|>",
        WORDS[1] + "<|im_end|>",
    ]


def test_the_prompt_without_thinking_is_the_prefix_of_the_row(thinker):
    prompt = thinker.chat([SYSTEM, ASK[0]], thinking=False)
    assert thinker.decode(prompt, skip_special=False).endswith("assistant\n" + CLOSED)
    assert not thinker.decode(thinker.chat(ASK[:1], thinking=True)).endswith(CLOSED)
    ids, mask = thinker.chat_with_mask([SYSTEM, *ONE], thinking=False)
    assert ids[: len(prompt)] == prompt
    assert not any(mask[: len(prompt)]) and mask[len(prompt)]


def test_qwen3_has_one_stop_token_and_spare_rows(qwen3):
    assert qwen3.stop_ids == (151645,) and qwen3.size == 151669


HEAD = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQuestion 0?<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
LATER = "<b>One</b>, café.<|im_end|>\n<|im_start|>user\nQuestion 1?<|im_end|>\n"


@pytest.mark.parametrize(
    ("turns", "thinking", "text"),
    [
        ([SYSTEM, ASK[0]], None, HEAD + OPEN),
        ([SYSTEM, ASK[0]], True, HEAD + OPEN),
        ([SYSTEM, ASK[0]], False, HEAD + OPEN + CLOSED),
        ([ASK[0]], False, HEAD.partition("<|im_end|>\n")[2] + OPEN + CLOSED),
        ([SYSTEM, *THREE[:3]], True, HEAD + OPEN + LATER + OPEN),
        ([SYSTEM, *THREE[:3]], False, HEAD + OPEN + LATER + OPEN + CLOSED),
    ],
)
def test_qwen3_prompts_read_word_for_word(qwen3, turns, thinking, text):
    assert qwen3.decode(qwen3.chat(turns, thinking), skip_special=False) == text
