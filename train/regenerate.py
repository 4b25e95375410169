"""The target's own answers to a file of prompts: what a drafter learns from."""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from dscout_jax.decode import Decoder
from dscout_jax.decode.sampling import greedy, sample
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget
from dscout_jax.models import Target
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
) -> Path:
    """Answers the first turn of every prompt; rows append to `out` and finished ones are skipped.

    A row: `{id, prompt_tokens, answer_tokens, finish, thinking, temperature, target}`. Prompts of like length
    share a batch, padded to one of a few shapes. A run that was killed goes on where it stopped: a torn last
    line is cut off, and no prompt is answered twice.

    Raises:
        UserError: `out` holds answers of another target or of other settings.
    """
    if temperature < 0:
        raise UserError(f"temperature {temperature} must be 0 (greedy) or more")
    settings = {
        "thinking": thinking,
        "temperature": temperature,
        "target": target.fingerprint,
        "max_new_tokens": max_new_tokens,
        "seed": seed if temperature else None,
    }
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = _finished(out, settings)
    todo = []
    for name, turns in load_prompts(prompts)[:limit]:
        if name not in done:
            ids = target.tokenizer.chat([{"role": "user", "content": turns[0]}], thinking=thinking)
            todo.append((name, ids))
    room = target.config.max_position - max_new_tokens - 1
    for name, ids in todo:
        if len(ids) > room:
            raise UserError(
                f"prompt {name!r} has {len(ids)} tokens; with {max_new_tokens} new ones the target "
                f"has room for {room}"
            )
    todo.sort(key=lambda item: len(item[1]))
    module = Target(target.config, dtype or _dtype(target))
    decoder = Decoder(
        module,
        target.params,
        stop_ids=target.tokenizer.stop_ids,
        choose=sample(temperature, seed) if temperature else greedy,
        # Many rows of one token each: XLA:CPU attends over fp32 entries twice as fast as over bf16 ones.
        cache_dtype=jnp.float32,
        capacity_bucket=128,
    )
    with open(out, "a", encoding="utf-8") as file, tqdm(total=len(todo), desc="answers", disable=None) as bar:
        for start in range(0, len(todo), batch):
            part = todo[start : start + batch]
            answers = decoder.generate([ids for _, ids in part], max_new_tokens, rows=batch)
            for (name, ids), answer in zip(part, answers, strict=True):
                row = {"id": name, "prompt_tokens": ids, "answer_tokens": answer.tokens}
                file.write(json.dumps(row | {"finish": answer.finish} | settings) + "\n")
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(part))
    return out


def _dtype(target: LoadedTarget) -> Any:
    return target.params["norm"]["weight"].dtype


def _finished(out: Path, settings: dict[str, Any]) -> set[str]:
    """Ids already answered; cuts off a line that a kill left torn."""
    if not out.exists():
        return set()
    data = out.read_bytes()
    whole = data.rfind(b"\n") + 1
    done = set()
    for line in data[:whole].decode("utf-8").split("\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            wrong = {k: row[k] for k, v in settings.items() if row[k] != v}
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{out} is no file of answers; name another") from None
        if wrong:
            asked = {k: settings[k] for k in wrong}
            raise UserError(f"{out} holds answers made with {wrong}, not {asked}; name another file")
        done.add(row["id"])
    if whole < len(data):
        with open(out, "r+b") as file:
            file.truncate(whole)
    return done
