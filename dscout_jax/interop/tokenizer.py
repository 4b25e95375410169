"""The target's tokenizer and chat template, as one object with one meaning of "stop"."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from dscout_jax.errors import UserError
from dscout_jax.interop.chat import ChatTemplate, Turn, check_turns
from dscout_jax.interop.safetensors import read_json


class Tokenizer:
    """Text to ids and back, conversations to prompts and training rows.

    Attributes:
        stop_ids: any of these ends an answer; the first is the one written after an answer.
        special_ids: name (`pad_token`, `bos_token`, ...) -> id, of the tokens that the folder names.
    """

    def __init__(
        self,
        backend: Backend,
        template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        # A stored padding or truncation setting would silently change rows.
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        names = special_tokens or {}
        self.template = None if template is None else ChatTemplate(template, names)
        found = {name: backend.token_to_id(token) for name, token in names.items()}
        self.special_ids = {name: id for name, id in found.items() if id is not None}
        eos = self.special_ids.get("eos_token")
        # The turn's own end first: a template writes that one.
        ordered = ([eos] if eos is not None else []) + [int(i) for i in stop_ids]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ordered))

    @property
    def size(self) -> int:
        """Known ids, special tokens included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing is put before or after it."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; `skip_special=False` shows control tokens too."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, pieces: Iterator[Sequence[int]], skip_special: bool = True) -> Iterator[str]:
        """Text as tokens arrive; characters split over several tokens wait until they are whole."""
        decoder = DecodeStream(skip_special_tokens=skip_special)
        for ids in pieces:
            texts = (decoder.step(self.backend, int(i)) for i in ids)
            if text := "".join(t for t in texts if t):
                yield text

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise UserError("this target has no chat template; use a chat model, or encode plain text")
        return self.template

    def chat(self, turns: Sequence[Turn], thinking: bool | None = None, generate: bool = True) -> list[int]:
        """The conversation as a prompt: ids up to where the assistant's next words begin.

        Args:
            turns: `{"role": "system" | "user" | "assistant", "content": text}`, oldest first.
            thinking: whether the target may think aloud first; None leaves it to its template.
            generate: False renders the conversation alone.

        Raises:
            UserError: no template, no conversation, or one that already ends with the assistant.
        """
        template = self._template()
        check_turns(turns)
        if generate and turns[-1]["role"] == "assistant":
            raise UserError("the conversation already ends with the assistant; end it with the user's turn")
        return self.encode(template.render(turns, generate=generate, thinking=thinking))

    def chat_with_mask(
        self, turns: Sequence[Turn], thinking: bool | None = None, last_only: bool = False
    ) -> tuple[list[int], list[bool]]:
        """A training row: ids, and True at the assistant's words and the token that ends them.

        Words are tokenised apart from what surrounds them, because that is how decoding sees them: the
        prompt is given, the answer's tokens follow.

        Args:
            last_only: supervise the last assistant turn only.

        Raises:
            UserError: no template, or no assistant turn.
        """
        text, spans = self._template().words(turns, thinking)
        if not spans:
            raise UserError("the conversation has no assistant turn: nothing to learn from")
        ids: list[int] = []
        mask: list[bool] = []
        at, learn = 0, False
        for number, (start, end) in enumerate(spans):
            self._append(ids, mask, text[at:start], ended=learn)
            learn = not last_only or number == len(spans) - 1
            words = self.encode(text[start:end])
            ids += words
            mask += [learn] * len(words)
            at = end
        self._append(ids, mask, text[at:], ended=learn)
        return ids, mask

    def _append(self, ids: list[int], mask: list[bool], text: str, ended: bool) -> None:
        """Adds the template's own text; its first token is the end of the answer before it."""
        own = self.encode(text)
        ids += own
        mask += [ended and i == 0 and id in self.stop_ids for i, id in enumerate(own)]

    def answer_row(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[bool]]:
        """A training row of a prompt and the tokens that the target answered, its stop token included."""
        return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)

    def show_mask(self, ids: Sequence[int], mask: Sequence[bool]) -> str:
        """The row as text, supervised stretches in ⟦ ⟧: for a look at what is learnt."""
        pieces, start = [], 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or mask[i] != mask[start]:
                text = self.decode(ids[start:i], skip_special=False)
                pieces.append(f"⟦{text}⟧" if mask[start] else text)
                start = i
        return "".join(pieces)


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")


def load_tokenizer(folder: str | Path, stop_ids: Sequence[int] = ()) -> Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json and the chat template of a Hugging Face folder.

    Raises:
        UserError: no tokenizer.json, or one that cannot be read.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json; save the fast tokenizer into it")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{path} is not a readable tokenizer ({error}); fetch it again") from None
    config = read_json(folder / "tokenizer_config.json")
    special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}
    return Tokenizer(backend, _chat_template(folder, config), special, stop_ids)


def _content(token: str | dict[str, Any]) -> str:
    """A special token is stored as text or as an object."""
    return token["content"] if isinstance(token, dict) else token


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template: in a file of its own, or in tokenizer_config.json as text or a list of named ones."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
