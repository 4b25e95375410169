"""The training run: one linear function from settings to a saved drafter."""

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
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
from dscout_jax.models import Drafter, Target, target_head
from dscout_jax.sharding import BATCH, make_mesh
from train.checkpoint import Checkpoints
from train.convert import open_target
from train.dataset import Batch, batches, load_rows
from train.evaluate import evaluate, make_hits
from train.export import describe, load_start, refuse_imported
from train.settings import TrainSettings
from train.step import Features, Frozen, TrainState, first_state, make_features, make_optimizer, make_step


class FeatureStore:
    """The target's features of each row, computed once and kept in host memory when asked to."""

    def __init__(self, compute, params: dict[str, Any], keep: bool, sharding: NamedSharding) -> None:
        self._compute, self._params, self._keep, self._sharding = compute, params, keep, sharding
        self._rows: dict[int, Features] = {}

    def __call__(self, batch: Batch) -> Features:
        """Features of a batch, on devices."""
        ids = batch.row_ids.tolist()
        if not all(i in self._rows for i in ids):
            found = self._compute(self._params, jax.device_put(batch.tokens, self._sharding))
            if self._keep:
                host = jax.tree.map(np.asarray, found)
                for place, i in enumerate(ids):
                    # No block looks past the answer's end.
                    end = int(np.flatnonzero(batch.answer[place])[-1]) + 1
                    self._rows[i] = jax.tree.map(lambda a, p=place, e=end: a[p, :e].copy(), host)
            return found
        S = batch.tokens.shape[1]
        rows = [jax.tree.map(lambda a: np.pad(a, ((0, S - len(a)), (0, 0))), self._rows[i]) for i in ids]
        return jax.device_put(jax.tree.map(lambda *a: np.stack(a), *rows), self._sharding)


class Log:
    """metrics.jsonl of a run at step `at`; lines of later steps are forgotten, since they come again."""

    def __init__(self, path: Path, at: int) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= at]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, at once."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Termination:
    """Notes a SIGTERM in place of dying of it, where signals can be caught: in the main thread."""

    asked = False

    def __enter__(self) -> "Termination":
        self._catches = threading.current_thread() is threading.main_thread()
        if self._catches:
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, *_: object) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        if self._catches:
            signal.signal(signal.SIGTERM, self._previous)


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
    seen = np.unique(np.concatenate([r.tokens[r.answer] for r in rows]))
    places = np.zeros(vocab, np.int32)
    places[seen] = np.arange(len(seen))
    ids = jnp.asarray(seen)
    return Frozen(params["embed_tokens"], head[ids], ids, jnp.asarray(places))


def train(settings: TrainSettings, target: LoadedTarget | None = None, minutes: float | None = None) -> Path:
    """Trains a drafter and saves it in DFlash format under `run/drafter`; resumes what it finds.

    Args:
        target: already loaded; None loads `settings.target`.
        minutes: bound on the time spent training, over all calls; the learning rate comes down with it.
    Returns:
        The drafter's folder.
    Raises:
        UserError: before any work, for data, shapes or a run folder that do not fit.
    """
    run = Path(settings.run)
    refuse_imported(run)
    rows = load_rows(settings.data, settings.seq_len, settings.heldout)
    dtype = jnp.dtype(settings.dtype)
    target = target or open_target(settings.target, dtype)
    config = drafter_config(settings, target)
    contract = settings.contract() | {"fingerprint": target.fingerprint, "data": rows.digest}
    mesh = make_mesh()
    if settings.batch // settings.accumulation % mesh.shape["data"]:
        raise UserError(
            f"batch {settings.batch} / accumulation {settings.accumulation} is not divisible by the "
            f"{mesh.shape['data']} devices of the data axis"
        )
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, BATCH)
    run.mkdir(parents=True, exist_ok=True)

    module, drafter = Target(target.config, dtype), Drafter(config, dtype)
    params = jax.device_put(target.params, whole)
    optimizer = make_optimizer(settings)
    state = jax.device_put(first_state(settings, config, target.params, optimizer), whole)
    data = batches(rows.train, settings.batch, settings.seed)
    checkpoints = Checkpoints(run, settings.keep)
    restored = checkpoints.restore(state, contract)
    before = 0.0
    if restored:
        state, position = jax.device_put(restored[0], whole), restored[1]
        data.set_state(position["data"])
        before = position["seconds"]

    frozen = jax.device_put(_frozen(target.params, settings, rows.train, target.config.vocab_size), whole)
    draft_ids = None if frozen.ids is None else np.asarray(frozen.ids).tolist()
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "recipe": settings.objective.name,
        "settings": contract,
    }
    if settings.init not in get_args(Init):
        provenance["started_from"] = load_start(settings.init)[2]
    describe(run, config, provenance, target.tokenizer.special_ids, draft_ids)
    compute = make_features(module, drafter, settings.objective.sees_target)
    store = FeatureStore(compute, params, settings.cache_features, split)
    heldout_store = FeatureStore(compute, params, settings.cache_features, whole)
    step = make_step(drafter, settings, optimizer)
    sizes = sorted({max(2, config.block_size // 2), config.block_size})
    hits = {B: make_hits(drafter, B, settings.chunk) for B in sizes}

    def score(state: TrainState) -> dict[str, Any]:
        def taps(row: Batch) -> jax.Array:
            return heldout_store(Batch(row.tokens[None], row.answer[None], row.row_ids[None])).taps

        return evaluate(hits, state.params, frozen, taps, rows.heldout)

    begun = time.monotonic()

    def spent() -> float:
        return before + time.monotonic() - begun

    def progress() -> float:
        by_time = spent() / max(minutes * 60, 1e-9) if minutes is not None else 0.0
        return min(max((at + 1) / (settings.steps + 1), by_time), 1.0)

    def save() -> None:
        checkpoints.save(state, {"data": data.get_state(), "seconds": spent()}, contract)

    last, scores = None, None
    at = int(state.step)
    if at == 0:
        _show_sample(rows.train[0], target)
    bar = tqdm(total=settings.steps, initial=at, desc="train", disable=None)
    with Log(run / "metrics.jsonl", at) as log, Termination() as stop:
        while at < settings.steps and progress() < 1.0 and not stop.asked:
            batch = next(data)
            features = store(batch)
            arrays = jax.device_put((batch.tokens, batch.answer, batch.row_ids), split)
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
                save()
        if last is not None:
            log.write(_record(at, last))
        save()
        checkpoints.close()
        bar.close()
        if stop.asked:
            raise SystemExit(0)
        if rows.heldout:
            scores = score(state)
            log.write({"step": at, "eval": scores})
    return save_drafter(
        run / "drafter",
        config,
        jax.device_get(state.params),
        provenance | {"steps": at, "skipped_steps": int(state.skipped), "heldout": scores},
        dtype=jnp.float32,
        special_ids=target.tokenizer.special_ids,
        draft_ids=draft_ids,
    )


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
