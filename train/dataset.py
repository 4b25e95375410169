"""Answered rows as static batches, through grain: shuffled by seed, repeated, resumed exactly."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import read_jsonl


class Batch(NamedTuple):
    """B rows of S tokens, padded on the right.

    tokens: [B, S] int32. answer: [B, S] bool, the answer's words and its end token. row_ids: [B] int32.
    """

    tokens: np.ndarray
    answer: np.ndarray
    row_ids: np.ndarray


class Rows(NamedTuple):
    """All rows of a file, each an element of `Batch` without the batch axis; and a hash of the file."""

    train: list[Batch]
    heldout: list[Batch]
    digest: str


def load_rows(path: str | Path, seq_len: int, heldout: int) -> Rows:
    """Reads answered rows, one document each, so that none can attend to another; those cut before two answer
    tokens are left out.

    A prompt is held out whole: its other turns and other answers, ids of the same name before `#`, are
    neither trained on nor evaluated.

    Raises:
        UserError: no such file, a row without its tokens, or nothing left to train on.
    """
    found, prompts = [], []
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            prompt, answer = row["prompt_tokens"], row["answer_tokens"]
        except KeyError as missing:
            raise UserError(f"{path}:{number} lacks {missing}; make it with `dscout regenerate`") from None
        ids = (prompt + answer)[:seq_len]
        if len(ids) - len(prompt) < 2:
            continue
        tokens, mask = np.zeros(seq_len, np.int32), np.zeros(seq_len, bool)
        tokens[: len(ids)] = ids
        mask[len(prompt) : len(ids)] = True
        found.append(Batch(tokens, mask, np.int32(number - 1)))
        prompts.append(str(row.get("id", number)).partition("#")[0])
    # Files are sorted by prompt length; held-out rows are spread over it by a fixed shuffle.
    order = np.random.default_rng(0).permutation(len(found))
    cut = max(len(found) - heldout, 0)
    apart = {prompts[i] for i in order[cut:]}
    kept = [found[i] for i in order[:cut] if prompts[i] not in apart]
    if not kept:
        raise UserError(
            f"{path} has {len(found)} usable rows; with {heldout} held out none is left to train on"
        )
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return Rows(kept, [found[i] for i in order[cut:]], digest)


def stack(rows: list[Batch]) -> Batch:
    """Rows along a new batch axis."""
    return Batch(*(np.stack(x) for x in zip(*rows, strict=True)))


def batches(rows: list[Batch], batch: int, seed: int, own: np.ndarray | None = None) -> grain.DatasetIterator:
    """An endless iterator of batches; `get_state` and `set_state` move it exactly.

    Args:
        own: places, in the batch, of the rows that this process reads; None: all. The order is that of the
            whole batch, so that a run goes on with the same rows on another number of processes.
    """
    data = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat().batch(batch)
    data = data.map(lambda ids: stack([rows[i] for i in (ids if own is None else ids[own])]))
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))
