"""The target's own answers to a file of prompts: what a drafter learns from."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from dscout_jax.decode import Decoder, Sampling, seed_of
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from dscout_jax.models import Target
from train.paths import local_path
from train.prompts import load_prompts


def regenerate(
    target: LoadedTarget,
    prompts: str | Path,
    out: str | Path,
    *,
    max_new_tokens: int = 160,
    batch: int = 32,
    temperature: float = 0.0,
    thinking: bool | None = None,
    seed: int = 0,
    limit: int | None = None,
    dtype: Any = None,
    shard: tuple[int, int] = (0, 1),
    mesh: Mesh | None = None,
) -> Path:
    """Answers every turn of every prompt; rows append to `out` and finished ones are skipped.

    A row: `{id, prompt_tokens, answer_tokens, finish}` and what it was made with: `thinking`, `temperature`,
    `target`, `max_new_tokens`, `seed`, `dtype` (rows of before that was recorded pass). A later turn follows
    the target's own answers and is a row of its own, `id#2`, `id#3`, ...; one that no longer fits the target
    is left out. Prompts of like length share a batch, padded to one of a few shapes. A run that was killed
    goes on where it stopped: a torn last line is cut off, and no prompt is answered twice.

    Args:
        shard: (i, n): answers every n-th prompt from the i-th on, counted from 0, into a file of its own
            beside `out`, `NAME.i-of-n.jsonl`. So n hosts share the prompts; `dscout pack` joins the files.
        mesh: of this process's own devices, over which target and rows are spread; None: one device.
    Raises:
        UserError: `out` is in a bucket, or holds answers of another target or of other settings; or a prompt
            is too long.
    """
    if temperature < 0:
        raise UserError(f"temperature {temperature} must be 0 (greedy) or more")
    dtype = jnp.dtype(dtype or _dtype(target))
    settings = {
        "thinking": thinking,
        "temperature": temperature,
        "target": target.fingerprint,
        "max_new_tokens": max_new_tokens,
        "seed": seed if temperature else None,
        "dtype": dtype.name,
    }
    i, n = shard
    if not 0 <= i < n:
        raise UserError(f"shard {i}/{n}: shards of {n} count from 0 to {n - 1}")
    out = local_path(out, "answers are written, as they come,")
    if n > 1:
        out = out.with_name(f"{out.stem}.{i}-of-{n}{out.suffix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    done = _finished(out, settings)
    asked = load_prompts(prompts)[:limit][i::n]
    if not asked:
        raise UserError(f"{prompts} holds no prompt for shard {i} of {n}")
    room = target.config.max_position - max_new_tokens - 1
    for name, turns in asked:
        count = len(_ids(target, [], turns[0], thinking))
        if count > room:
            raise UserError(
                f"prompt {name!r} has {count} tokens; with {max_new_tokens} new ones the target has room "
                f"for {room}"
            )
    decoder = Decoder(
        Target(target.config, dtype),
        target.params,
        stop_ids=target.tokenizer.stop_ids,
        # Many rows of one token each: XLA:CPU attends over fp32 entries twice as fast as over bf16 ones.
        cache_dtype=jnp.float32,
        capacity_bucket=128,
        mesh=mesh,
    )
    total = sum(_row(name, turn) not in done for name, turns in asked for turn in range(len(turns)))
    with open(out, "a", encoding="utf-8") as file, tqdm(total=total, desc="answers", disable=None) as bar:
        # Turn by turn: the second needs the first one's answer.
        for turn in range(max(len(turns) for _, turns in asked)):
            todo = []
            for name, turns in asked:
                if turn < len(turns) and _row(name, turn) not in done:
                    before = [done.get(_row(name, t)) for t in range(turn)]
                    if None not in before:
                        history = zip(turns, map(target.tokenizer.decode, before), strict=False)
                        ids = _ids(target, history, turns[turn], thinking)
                        todo += [(_row(name, turn), ids)] if len(ids) <= room else []
            todo.sort(key=lambda item: len(item[1]))
            for start in range(0, len(todo), batch):
                part = todo[start : start + batch]
                answers = decoder.generate(
                    [ids for _, ids in part],
                    max_new_tokens,
                    sampling=[Sampling(temperature, seed=seed_of(seed, ids)) for _, ids in part],
                    rows=batch,
                )
                for (name, ids), answer in zip(part, answers, strict=True):
                    row = {"id": name, "prompt_tokens": ids, "answer_tokens": answer.tokens}
                    file.write(json.dumps(row | {"finish": answer.finish} | settings) + "\n")
                    done[name] = answer.tokens
                file.flush()
                os.fsync(file.fileno())
                bar.update(len(part))
    return out


def _row(name: str, turn: int) -> str:
    return f"{name}#{turn + 1}" if turn else name


def _ids(
    target: LoadedTarget, history: Iterable[tuple[str, str]], asks: str, thinking: bool | None
) -> list[int]:
    """The conversation so far, (user, assistant) by turns, and what the user asks now."""
    said = [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return target.tokenizer.chat([*said, {"role": "user", "content": asks}], thinking=thinking)


def _dtype(target: LoadedTarget) -> Any:
    return target.params["norm"]["weight"].dtype


def _finished(out: Path, settings: dict[str, Any]) -> dict[str, list[int]]:
    """Id -> answer of what is there already; cuts off a line that a kill left torn."""
    if not out.exists():
        return {}
    data = out.read_bytes()
    whole = data.rfind(b"\n") + 1
    done = {}
    for line in data[:whole].decode("utf-8").split("\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            row = {"dtype": settings["dtype"]} | row
            wrong = {k: row[k] for k, v in settings.items() if row[k] != v}
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{out} is no file of answers; name another") from None
        if wrong:
            asked = {k: settings[k] for k in wrong}
            raise UserError(f"{out} holds answers made with {wrong}, not {asked}; name another file")
        done[row["id"]] = row["answer_tokens"]
    if whole < len(data):
        with open(out, "r+b") as file:
            file.truncate(whole)
    return done
