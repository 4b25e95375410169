"""Answered rows as static batches, through grain: mixed, shuffled by seed, repeated, resumed exactly.

A file is JSONL as `dscout regenerate` writes it, held in memory, or what `dscout pack` made of such files,
read row by row as they are needed.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from dscout_jax.errors import UserError
from dscout_jax.interop.jsonl import parse_jsonl, parse_line
from train.paths import is_remote, local_path, place

PACKED = ".array_record"
Data = str | Path | tuple[tuple[str, float], ...]
"""One file, or (file, weight) of several: a batch's rows come from them in proportion to the weights."""


class Batch(NamedTuple):
    """B rows of S tokens, padded on the right.

    tokens: [B, S] int32. answer: [B, S] bool, the answer's words and its end token. row_ids: [B] int32.
    """

    tokens: np.ndarray
    answer: np.ndarray
    row_ids: np.ndarray


class Row(NamedTuple):
    """A row of a file: its prompt's name, and the lengths of its two parts in tokens."""

    name: str
    prompt: int
    answer: int


class Source(NamedTuple):
    """A file: what is known of each row, its tokens (prompt + answer) by number, and a hash of the whole."""

    rows: list[Row]
    tokens: Callable[[int], list[int]]
    digest: str


class RowList(Sequence[Batch]):
    """Rows of sources, each an element of `Batch` without the batch axis, made when it is asked for."""

    def __init__(self, sources: list[Source], ids: list[tuple[int, int, int]], seq_len: int) -> None:
        """ids: (source, number in it, row id) of each."""
        self._sources, self._ids, self._seq_len = sources, ids, seq_len

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return RowList(self._sources, self._ids[at], self._seq_len)
        source, number, row_id = self._ids[at]
        ids = self._sources[source].tokens(number)[: self._seq_len]
        tokens, mask = np.zeros(self._seq_len, np.int32), np.zeros(self._seq_len, bool)
        tokens[: len(ids)] = ids
        mask[self._sources[source].rows[number].prompt : len(ids)] = True
        return Batch(tokens, mask, np.int32(row_id))

    def row_ids(self) -> list[int]:
        """Of all rows, without reading them."""
        return [row_id for _, _, row_id in self._ids]


class Rows(NamedTuple):
    """What a run reads; a hash of all files; of several files (weight, places in `train`) each; and how many
    rows were left out because fewer than two answer tokens are left of them."""

    train: RowList
    heldout: RowList
    digest: str
    shares: list[tuple[float, list[int]]] | None
    left_out: int


def read_source(path: str | Path) -> Source:
    """A file of answered rows.

    Raises:
        UserError: no such file, or a row without its tokens.
    """
    if str(path).endswith(PACKED):
        return _packed(path)
    file = place(path)
    if not file.is_file():
        raise UserError(f"{path} is no file")
    data = file.read_bytes()
    rows, tokens = [], []
    for number, row in enumerate(parse_jsonl(data.decode("utf-8"), str(path)), 1):
        rows.append(_row(row, f"{path}:{number}"))
        tokens.append(np.array(row["prompt_tokens"] + row["answer_tokens"], np.int32))
    return Source(rows, tokens.__getitem__, hashlib.sha256(data).hexdigest())


def _row(row: dict[str, Any], where: str) -> Row:
    try:
        prompt, answer = row["prompt_tokens"], row["answer_tokens"]
    except KeyError as missing:
        raise UserError(f"{where} lacks {missing}; make it with `dscout regenerate`") from None
    # A prompt's other turns and answers have its id before `#`.
    return Row(str(row.get("id", where)).partition("#")[0], len(prompt), len(answer))


def _index(path: str | Path) -> Path:
    return Path(f"{path}.json")


def _packed(path: str | Path) -> Source:
    if is_remote(path):
        raise UserError(
            f"{path}: packed rows are read in place; copy them to a local disk or mount the bucket"
        )
    if not _index(path).is_file() or not Path(path).is_file():
        raise UserError(f"{path} or {_index(path)} is no file; make both with `dscout pack`")
    about = json.loads(_index(path).read_text(encoding="utf-8"))
    records = grain.sources.ArrayRecordDataSource([str(path)])
    if len(records) != len(about["rows"]):
        raise UserError(f"{path} holds {len(records)} rows, its index {len(about['rows'])}; pack it again")

    def tokens(number: int) -> list[int]:
        row = json.loads(records[number])
        return row["prompt_tokens"] + row["answer_tokens"]

    return Source([Row(*row) for row in about["rows"]], tokens, about["digest"])


def pack(answers: Sequence[str | Path], out: str | Path) -> Path:
    """Writes JSONL files of answered rows, one after another, as one file for random access, with its index.

    Records are the rows' own lines, so that the file trains as the lines would. One line is in memory at a
    time, and of each row its name and lengths.

    Raises:
        UserError: a name without its ending or in a bucket, a file that exists or is missing, a row without
            its tokens.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    out = local_path(out, "rows are packed")
    if not str(out).endswith(PACKED):
        raise UserError(f"{out}: the name of a packed file ends with {PACKED}")
    if out.exists() or _index(out).exists():
        raise UserError(f"{out} exists; name another file")
    out.parent.mkdir(parents=True, exist_ok=True)
    part, digest, index = out.with_name(f".{out.name}.part"), hashlib.sha256(), []
    writer = ArrayRecordWriter(str(part), "group_size:1")  # one row a group: any of them is read alone
    try:
        for path in answers:
            file = place(path)
            if not file.is_file():
                raise UserError(f"{path} is no file")
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    digest.update(line)
                    if line.strip():
                        where = f"{path}:{number}"
                        index.append(_row(parse_line(line.decode("utf-8"), where), where))
                        writer.write(line.removesuffix(b"\n"))
        writer.close()
        part.rename(out)
    finally:
        if writer.is_open():
            writer.close()
        part.unlink(missing_ok=True)
    text = json.dumps({"digest": digest.hexdigest(), "rows": index})
    _index(out).write_text(text + "\n", encoding="utf-8")
    return out


def load_rows(data: Data, seq_len: int, heldout: int) -> Rows:
    """Reads answered rows, one document each, so that none can attend to another; those cut before two answer
    tokens are left out: every row of every batch has an anchor.

    A prompt is held out whole: its other turns and other answers, ids of the same name before `#`, are
    neither trained on nor evaluated.

    Raises:
        UserError: see `read_source`; or nothing is left to train on, of a file.
    """
    several = not isinstance(data, str | Path)
    mixture = data if several else ((data, 1.0),)
    sources = [read_source(path) for path, _ in mixture]
    found, prompts, begin = [], [], 0
    for k, source in enumerate(sources):
        for number, row in enumerate(source.rows):
            if min(row.prompt + row.answer, seq_len) - row.prompt >= 2:
                found.append((k, number, begin + number))
                prompts.append(row.name)
        begin += len(source.rows)
    # Files are sorted by prompt length; held-out rows are spread over it by a fixed shuffle.
    order = np.random.default_rng(0).permutation(len(found))
    cut = max(len(found) - heldout, 0)
    apart = {prompts[i] for i in order[cut:]}
    kept = [found[i] for i in order[:cut] if prompts[i] not in apart]
    for k, (path, _) in enumerate(mixture):
        if not any(source == k for source, _, _ in kept):
            usable = sum(source == k for source, _, _ in found)
            raise UserError(
                f"{path} has {usable} usable rows; with {heldout} held out none is left to train on"
            )
    digest, shares = sources[0].digest, None
    if several:
        digests = [[source.digest, weight] for source, (_, weight) in zip(sources, mixture, strict=True)]
        digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
        places = [[at for at, (source, _, _) in enumerate(kept) if source == k] for k in range(len(sources))]
        shares = [(weight, of) for (_, weight), of in zip(mixture, places, strict=True)]
    apart_rows = RowList(sources, [found[i] for i in order[cut:]], seq_len)
    return Rows(RowList(sources, kept, seq_len), apart_rows, digest, shares, begin - len(found))


def stack(rows: Sequence[Batch]) -> Batch:
    """Rows along a new batch axis."""
    return Batch(*(np.stack(x) for x in zip(*rows, strict=True)))


def batches(
    rows: Sequence[Batch],
    batch: int,
    seed: int,
    own: np.ndarray | None = None,
    shares: list[tuple[float, list[int]]] | None = None,
) -> grain.DatasetIterator:
    """An endless iterator of batches; `get_state` and `set_state` move it exactly.

    Args:
        own: places, in the batch, of the rows that this process reads; None: all. The order is that of the
            whole batch, so that a run goes on with the same rows on another number of processes.
        shares: (weight, places in `rows`) of each part of a mixture, every part shuffled and repeated by
            itself; None: all rows alike.
    """
    if shares is None:
        order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
    else:
        parts = [grain.MapDataset.source(of).seed(seed).shuffle().repeat() for _, of in shares]
        order = grain.MapDataset.mix(parts, [weight for weight, _ in shares])
    data = order.batch(batch)
    data = data.map(lambda ids: stack([rows[int(i)] for i in (ids if own is None else ids[own])]))
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))
