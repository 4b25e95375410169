"""The training run: one linear function from settings to a saved drafter."""

import json
import time
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.initialise import Init
from dscout_jax.interop import (
    LoadedTarget,
    check_pair,
    default_mask_id,
    save_drafter,
)
from dscout_jax.models import Drafter, StackedTarget, Target, stack_layers, target_head
from dscout_jax.sharding import BATCH, named, shardings
from train.checkpoint import Checkpoints
from train.convert import open_target
from train.dataset import Batch, batches, load_rows, stack
from train.evaluate import evaluate, make_hits
from train.export import describe, load_start, refuse_imported
from train.hosts import Termination, barrier, fetch, first, mesh_for, own_rows, put, put_rows
from train.settings import TrainSettings
from train.step import (
    Features,
    Frozen,
    TrainState,
    frozen_specs,
    make_features,
    make_optimizer,
    make_step,
    spread_state,
    used_layers,
)


class FeatureStore:
    """The target's features of each row, computed once and kept in `rows`, host memory; None keeps none.

    A batch is this process's rows of `count`.
    """

    def __init__(
        self, compute, params: dict[str, Any], rows: dict[int, Features] | None, sharding: NamedSharding
    ) -> None:
        self._compute, self._params, self._sharding = compute, params, sharding
        self._keep, self._rows = rows is not None, {} if rows is None else rows

    def __call__(self, batch: Batch, count: int) -> Features:
        """Features of a batch, on devices."""
        ids = batch.row_ids.tolist()
        if not all(i in self._rows for i in ids):
            found = self._compute(self._params, put_rows(batch.tokens, self._sharding, count))
            if self._keep:
                host = jax.tree.map(np.asarray, found)
                for place, i in enumerate(ids):
                    # No block looks past the answer's end.
                    end = int(np.flatnonzero(batch.answer[place])[-1]) + 1
                    self._rows[i] = jax.tree.map(lambda a, p=place, e=end: a[p, :e].copy(), host)
            return found
        S = batch.tokens.shape[1]
        rows = [jax.tree.map(lambda a: np.pad(a, ((0, S - len(a)), (0, 0))), self._rows[i]) for i in ids]
        return put_rows(jax.tree.map(lambda *a: np.stack(a), *rows), self._sharding, count)


class Log:
    """metrics.jsonl of a run at step `at`; lines of later steps are forgotten, since they come again.

    Only the first process writes; all of them know the evaluations.
    """

    def __init__(self, path: Path, at: int) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= at]
        # Every process has read before the first one writes.
        barrier("log")
        if first():
            path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8") if first() else None
        self.scores: dict[int, dict[str, Any]] = {}
        """Step -> evaluation."""
        for line in kept:
            self._note(json.loads(line))

    def _note(self, record: dict[str, Any]) -> None:
        if "eval" in record:
            self.scores[record["step"]] = record["eval"]

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, at once."""
        self._note(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def drafter_config(settings: TrainSettings, target: LoadedTarget) -> DrafterConfig:
    """The drafter that a run trains."""
    mask = settings.mask_token_id
    config = DrafterConfig.for_target(
        target.config,
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        mask_token_id=default_mask_id(target) if mask is None else mask,
        target_layer_ids=settings.target_layer_ids,
        fusion=settings.fusion,
    )
    check_pair(config, target.config, target.tokenizer.special_ids)
    return config


def _frozen(params: dict[str, Any], settings: TrainSettings, rows: list[Batch], vocab: int) -> Frozen:
    head = target_head(params)
    if settings.train_vocab == "full":
        return Frozen(params["embed_tokens"], head)
    seen = np.unique(_answered(rows))
    places = np.zeros(vocab, np.int32)
    places[seen] = np.arange(len(seen))
    return Frozen(params["embed_tokens"], head[seen], seen.astype(np.int32), places)


def _answered(rows: list[Batch]) -> np.ndarray:
    return np.concatenate([r.tokens[r.answer] for r in rows])


def drafted(settings: TrainSettings, rows: list[Batch]) -> list[int] | None:
    """The ids that a run's drafter will draft from; None: all."""
    if settings.train_vocab == "full":
        return None
    seen, counts = np.unique(_answered(rows), return_counts=True)
    # Of equally frequent ones the smaller ids, which a BPE learnt first.
    order = np.argsort(-counts, kind="stable")[: settings.draft_vocab]
    return np.sort(seen[order]).tolist()


def train(
    settings: TrainSettings,
    target: LoadedTarget | None = None,
    minutes: float | None = None,
    kept: dict[int, Features] | None = None,
) -> Path:
    """Trains a drafter and saves it in DFlash format under `run/drafter`; resumes what it finds.

    Args:
        target: already loaded; None loads `settings.target`.
        minutes: bound on the time spent training, over all calls; the learning rate comes down with it.
        kept: features by row, read and added to, of runs on the same data that tap the same layers.
    Returns:
        The drafter's folder.
    Raises:
        UserError: before any work, for data, shapes or a run folder that do not fit.
    """
    run = Path(settings.run)
    refuse_imported(run)
    rows = load_rows(settings.data, settings.seq_len, settings.heldout)
    dtype = jnp.dtype(settings.dtype)
    target = target or open_target(settings.target, dtype, mesh=settings.named_mesh())
    config = drafter_config(settings, target)
    contract = settings.contract() | {"fingerprint": target.fingerprint, "data": rows.digest}
    mesh = mesh_for(settings, target.config, config)
    several = jax.process_count() > 1
    if several and settings.cache_features:
        raise UserError("cache_features keeps whole rows on one host: set it to False for several processes")
    if several and minutes is not None:
        raise UserError("minutes bounds a run of one process: bound one of several by its steps")
    split = NamedSharding(mesh, BATCH)
    run.mkdir(parents=True, exist_ok=True)

    sees_target = settings.objective.sees_target
    drafter = Drafter(config, dtype, settings.remat, settings.scan_layers)
    params = put(target.params, shardings(target.params, mesh))
    optimizer = make_optimizer(settings)
    state = spread_state(settings, config, params, optimizer, mesh)
    frozen = _frozen(params, settings, rows.train, target.config.vocab_size)
    frozen = put(frozen, named(frozen_specs(frozen, mesh), mesh))
    module: Target | StackedTarget = Target(target.config, dtype)
    if settings.scan_layers:
        used = used_layers(target.config, config, sees_target)
        module = StackedTarget(target.config, used, dtype)
        params = jax.jit(lambda p: stack_layers(p, used))(params)
        params = jax.device_put(params, shardings(params, mesh))
    own = own_rows(split, settings.batch)
    data = batches(rows.train, settings.batch, settings.seed, own)
    checkpoints = Checkpoints(run, settings.keep)
    restored = checkpoints.restore(state, contract)
    before = 0.0
    if restored:
        state, position = restored
        data.set_state(position["data"])
        before = position["seconds"]

    draft_ids = drafted(settings, rows.train)
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "recipe": settings.objective.name,
        "settings": contract,
    }
    if settings.init not in get_args(Init):
        provenance["started_from"] = load_start(settings.init)[2]
    if first():
        describe(run, config, provenance, target.tokenizer.special_ids, draft_ids)
    compute = make_features(module, drafter, sees_target, mesh)
    if kept is None and settings.cache_features:
        kept = {}
    store = FeatureStore(compute, params, kept, split)
    step = make_step(drafter, settings, optimizer, mesh)
    sizes = sorted({max(2, config.block_size // 2), config.block_size})
    hits = {B: make_hits(drafter, B, settings.chunk, mesh) for B in sizes}

    def score(state: TrainState) -> dict[str, Any]:
        return evaluate(_tables(hits, state.params, frozen, store, rows.heldout, mesh))

    begun = time.monotonic()

    def spent() -> float:
        return before + time.monotonic() - begun

    def progress() -> float:
        by_time = spent() / max(minutes * 60, 1e-9) if minutes is not None else 0.0
        return min(max((at + 1) / (settings.steps + 1), by_time), 1.0)

    def save() -> None:
        found = log.scores.get(at)
        mat = None if found is None else found["mat"][str(settings.block_size)]
        checkpoints.save(state, {"data": data.get_state(), "seconds": spent()}, contract, mat)

    last, stopping = None, False
    at = int(state.step)
    if at == 0 and first():
        _show_sample(rows.train[0], target)
    bar = tqdm(total=settings.steps, initial=at, desc="train", disable=None)
    with Log(run / "metrics.jsonl", at) as log, Termination() as stop:
        while at < settings.steps and progress() < 1.0 and not (stopping := stop.asked(at)):
            batch = next(data)
            features = store(batch, settings.batch)
            arrays = put_rows(tuple(batch), split, settings.batch)
            state, metrics = step(state, frozen, progress(), features, *arrays)
            at += 1
            # Fetched one step late, so that the host never waits for the step it has just sent off.
            if last is not None:
                log.write(_record(at - 1, last))
                bar.set_postfix(loss=f"{float(last['loss']):.3f}", refresh=False)
            last = metrics
            bar.update()
            if rows.heldout and at % settings.eval_every == 0:
                scores = score(state)
                log.write({"step": at, "eval": scores})
                bar.write(f"step {at}: held-out MAT {scores['mat'][str(settings.block_size)]:.3f}")
            if at % settings.save_every == 0:
                # A checkpoint's own line goes first: no later run could write it.
                log.write(_record(at, last))
                last = None
                save()
        if last is not None:
            log.write(_record(at, last))
        save()
        checkpoints.close()
        bar.close()
        if stopping:
            raise SystemExit(0)
        if rows.heldout and at not in log.scores:
            log.write({"step": at, "eval": score(state)})
    learnt = fetch(state.params)
    if first():
        save_drafter(
            run / "drafter",
            config,
            learnt,
            provenance | {"steps": at, "skipped_steps": int(state.skipped), "heldout": log.scores.get(at)},
            dtype=jnp.float32,
            special_ids=target.tokenizer.special_ids,
            draft_ids=draft_ids,
        )
    barrier("drafter")
    return run / "drafter"


def _tables(hits, params, frozen: Frozen, store: FeatureStore, rows: list[Batch], mesh: Mesh):
    """(answer's mask, {B: table of hits}) of each row; every device works on a row of its own."""
    split = NamedSharding(mesh, BATCH)
    count = mesh.shape["data"] * mesh.shape["fsdp"]
    own = own_rows(split, count)
    for begin in range(0, len(rows), count):
        group = rows[begin : begin + count]
        padded = group + [group[-1]] * (count - len(group))
        local = stack([padded[i] for i in own])
        taps, tokens = store(local, count).taps, put_rows(local.tokens, split, count)
        tables = {B: fetch(h(params, frozen, taps, tokens)) for B, h in hits.items()}
        for i, row in enumerate(group):
            yield row.answer, {B: table[i] for B, table in tables.items()}


def _record(step: int, metrics: dict[str, jax.Array]) -> dict[str, Any]:
    host = jax.device_get(metrics)
    count = np.maximum(host["included"], 1)
    return {
        "step": step,
        "time": round(time.time(), 3),
        "loss": float(host["loss"]),
        "learning_rate": float(host["learning_rate"]),
        "grad_norm": float(host["grad_norm"]),
        "blocks": int(host["blocks"]),
        "included": host["included"].tolist(),
        "weight": (host["weight"] / count).tolist(),
        "slot_loss": (host["slot_loss"] / count).tolist(),
        "gradient_share": (host["gradient"] / max(host["gradient"].sum(), 1e-30)).tolist(),
        "accuracy": (host["hits"] / count).tolist(),
        "survival": (host["survived"] / np.maximum(host["reach"], 1)).tolist(),
    }


def _show_sample(row: Batch, target: LoadedTarget) -> None:
    """Prints what one row supervises, so that a wrong template or mask is seen before it costs a run."""
    text = target.tokenizer.decode(row.tokens[row.answer].tolist())
    prompt = target.tokenizer.decode(row.tokens[: int(np.flatnonzero(row.answer)[0])].tolist())
    tqdm.write(f"one row, prompt: {prompt!r}\n  supervised: {text!r}")
