"""Chat templates: rendering as transformers does, and which characters are the assistant's words.

Templates come from checkpoints, so they run in a sandbox that cannot change what it is given.
"""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dscout_jax.errors import UserError

Turn = Mapping[str, Any]

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*$")

_ENTANGLED = (
    "the chat template changes the text around an answer with the answer itself, so the assistant's words "
    "cannot be told apart; train on single answers"
)


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`; the words are found without it."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own spelling)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    try:
        return env.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid: line {error.lineno}: {error.message}") from None


def check_turns(turns: Sequence[Turn]) -> None:
    """Refuses what is not a conversation.

    Raises:
        UserError: no turn, or a turn without a role or without text.
    """
    if not turns:
        raise UserError("a conversation needs at least one turn: [{'role': 'user', 'content': '...'}]")
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise UserError(f"turn {i} is {turn!r}; it must be {{'role': ..., 'content': ...}}")
        if not isinstance(turn.get("content"), str):
            raise UserError(f"turn {i} ({turn['role']}) has content {turn.get('content')!r}; it must be text")


class ChatTemplate(NamedTuple):
    """A template's source and the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    source: str
    special_tokens: Mapping[str, str]

    def render(self, turns: Sequence[Turn], generate: bool = False, thinking: bool | None = None) -> str:
        """The conversation as text; with `generate`, up to where the assistant's next words begin.

        Args:
            thinking: the template's `enable_thinking`; None leaves it to the template.

        Raises:
            UserError: not a conversation, thinking asked of a template that has none, or refused by it.
        """
        check_turns(turns)
        options = {} if thinking is None else {"enable_thinking": thinking}
        if thinking and "enable_thinking" not in self.source:
            raise UserError("this target's chat template has no thinking mode; leave thinking off")
        try:
            return _compile(self.source).render(
                messages=[dict(turn) for turn in turns],
                add_generation_prompt=generate,
                tools=None,
                documents=None,
                **self.special_tokens,
                **options,
            )
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from None

    def words(self, turns: Sequence[Turn], thinking: bool | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The rendered conversation and the character span of each assistant turn's words.

        The assistant's words are replaced by marks and the conversation is rendered once more: what
        surrounds the marks is the template's own and never supervised. That covers the empty thought
        that a template puts before an answer, and needs no generation markers. Words are what remains of the
        true text between those surroundings, whatever the template did to them (trimmed, thoughts dropped).

        Raises:
            UserError: the surroundings of the words depend on the words, so that they cannot be told apart.
        """
        text = self.render(turns, thinking=thinking)
        marks = {i: f"\x02w{i}\x03" for i, turn in enumerate(turns) if turn["role"] == "assistant"}
        if not marks:
            return text, []
        marked = [{**turn, "content": marks[i]} if i in marks else turn for i, turn in enumerate(turns)]
        rendered = self.render(marked, thinking=thinking)
        parts = re.split("\x02w\\d+\x03", rendered)
        if len(parts) != len(marks) + 1:
            raise UserError("the chat template drops or doubles assistant turns; train on single answers")
        spans, start = [], _start_of(parts[0], text, 0)
        for number, (i, part) in enumerate(zip(marks, parts[1:], strict=True), start=1):
            last = number == len(marks)
            end, after = _next_part(part, text, start, last)
            # What the generation prompt already says is never the assistant's, say an opening <think>.
            prompt = self.render(turns[:i], generate=True, thinking=thinking) if i else ""
            if text.startswith(prompt) and len(prompt) <= end:
                start = max(start, len(prompt))
            spans.append((start, end))
            start = after
        return text, spans


def _variants(part: str) -> list[str]:
    """A piece of template text, and the same without an empty thought at its end.

    The marks hold no thought. Where the true words do, the template writes it in place of the empty one.
    """
    shorter = _EMPTY_THOUGHT.sub("", part)
    return [part] if shorter == part else [part, shorter]


def _start_of(part: str, text: str, at: int) -> int:
    """Where the first answer begins: after the piece of template text that stands at `at`."""
    for variant in _variants(part):
        if text.startswith(variant, at):
            return at + len(variant)
    raise UserError(_ENTANGLED)


def _next_part(part: str, text: str, start: int, last: bool) -> tuple[int, int]:
    """Where the piece of template text after an answer begins and ends; the last one ends the text."""
    for variant in [part] if last else _variants(part):
        at = text.rfind(variant, start) if last else text.find(variant, start)
        if at >= 0 and (not last or at + len(variant) == len(text)):
            return at, at + len(variant)
    raise UserError(_ENTANGLED)
