"""Answers a file of conversations over a fixed number of slots, JSON lines in and out."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from dscout_jax.decode import Decoder, Generation, Request, mat, seed_of, serve
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from dscout_jax.interop.jsonl import parse_jsonl, read_jsonl
from infer.generate import GenerateSettings, load
from infer.load import encode_prompt

STANDARD_INPUT = Path("-")


def answer_file(
    prompts: Path, settings: GenerateSettings, *, slots: int = 4, out: Path | None = None
) -> list[dict[str, Any]]:
    """Writes each row of `prompts` with its answers, in the order asked, as soon as those before are done.

    Args:
        prompts: JSONL of {"turns": [...]}; "-": standard input. A later turn follows the model's own answers.
        slots: prompts decoded at a time.
        out: a new file; None: standard output.
    Raises:
        UserError: a wrong row or setting, a first turn that is too long, or `out` exists.
    """
    settings.sampling.check()
    if out is not None and out.exists():
        raise UserError(f"{out} exists; name another file, or remove it")
    if prompts == STANDARD_INPUT:
        rows = parse_jsonl(sys.stdin.read(), "standard input")
    else:
        rows = read_jsonl(prompts)
    for number, row in enumerate(rows):
        turns = row.get("turns")
        if not (isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)):
            raise UserError(f'{prompts}: row {number} lacks "turns": ["text", ...]')
    if slots < 1:
        raise UserError(f"slots {slots} must be at least 1")
    loaded, decoder = load(settings, slots)
    if rows:
        shape = decoder.shape([_request(loaded, settings, row["turns"][0], []) for row in rows])
        if settings.policy:
            settings.policy.warn_of_length(shape.capacity)
    done: dict[int, dict[str, Any]] = {}
    with _opened(out) as file:
        written = 0
        for index, generations in _converse(loaded, decoder, settings, [r["turns"] for r in rows], slots):
            done[index] = rows[index] | _figures(generations, len(rows[index]["turns"]))
            while written in done:
                file.write(json.dumps(done[written], ensure_ascii=False) + "\n")
                file.flush()
                written += 1
    return [done[i] for i in range(len(rows))]


def _opened(out: Path | None) -> contextlib.AbstractContextManager[TextIO]:
    if out is None:
        return contextlib.nullcontext(sys.stdout)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.open("x", encoding="utf-8")


def _request(
    loaded: LoadedTarget, settings: GenerateSettings, asks: str, history: Sequence[tuple[str, str]]
) -> Request:
    ids = encode_prompt(loaded, asks, settings.thinking, history)
    draws = settings.sampling._replace(seed=seed_of(settings.sampling.seed, ids))
    return Request(ids, settings.max_new_tokens, loaded.tokenizer.stop_ids, draws)


def _converse(
    loaded: LoadedTarget,
    decoder: Decoder,
    settings: GenerateSettings,
    conversations: Sequence[Sequence[str]],
    slots: int,
) -> Iterator[tuple[int, list[Generation]]]:
    """Yields (index, an answer a turn) as conversations end, turn by turn over all of them."""
    said: dict[int, list[Generation]] = {i: [] for i in range(len(conversations))}
    open_ones = list(said)
    turn = 0
    while open_ones:
        requests, askers = [], []
        for i in open_ones:
            history = list(zip(conversations[i], (g.text for g in said[i]), strict=False))
            request = _request(loaded, settings, conversations[i][turn], history)
            if _fits(decoder, request):
                requests.append(request)
                askers.append(i)
            else:
                yield i, said[i]
        turn += 1
        open_ones = []
        for at, generation in serve(decoder, requests, slots):
            i = askers[at]
            said[i].append(generation)
            if turn < len(conversations[i]):
                open_ones.append(i)
            else:
                yield i, said[i]
        open_ones.sort()


def _fits(decoder: Decoder, request: Request) -> bool:
    try:
        decoder.shape([request])
    except UserError:
        return False
    return True


def _figures(generations: list[Generation], turns: int) -> dict[str, Any]:
    """left_out: later turns that no longer fitted the model."""
    names = ("tokens", "finish", "rounds", "accepted", "prefill_seconds", "decode_seconds")
    return {
        "answers": [g.text for g in generations],
        **{name: [getattr(g, name) for g in generations] for name in names},
        "mat": mat([g.accepted for g in generations]),
        "left_out": turns - len(generations),
    }
