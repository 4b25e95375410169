"""The training run: one linear function from settings to a saved drafter."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, check_pair, default_mask_id, load_target, save_drafter
from dscout_jax.models import Drafter, Target, target_head
from dscout_jax.sharding import BATCH, make_mesh
from train.checkpoint import Checkpoints
from train.dataset import Batch, batches, load_rows
from train.evaluate import evaluate, make_hits
from train.settings import TrainSettings
from train.step import Features, Frozen, TrainState, fresh_state, make_features, make_optimizer, make_step


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
                    self._rows[i] = jax.tree.map(lambda a, p=place: a[p].copy(), host)
            return found
        rows = [self._rows[i] for i in ids]
        return jax.device_put(jax.tree.map(lambda *a: np.stack(a), *rows), self._sharding)


def drafter_config(settings: TrainSettings, target: LoadedTarget) -> DrafterConfig:
    """The drafter that a run trains."""
    mask = settings.mask_token_id
    config = DrafterConfig.for_target(
        target.config,
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        mask_token_id=default_mask_id(target) if mask is None else mask,
        target_layer_ids=settings.target_layer_ids,
    )
    check_pair(config, target.config, target.tokenizer.special_ids)
    return config


def _frozen(params: dict[str, Any], settings: TrainSettings, rows: list[Batch], vocab: int) -> Frozen:
    head = target_head(params)
    if settings.train_vocab == "full":
        return Frozen(params["embed_tokens"], head, None)
    seen = np.unique(np.concatenate([r.tokens[r.answer] for r in rows]))
    places = np.zeros(vocab, np.int32)
    places[seen] = np.arange(len(seen))
    return Frozen(params["embed_tokens"], head[jnp.asarray(seen)], jnp.asarray(places))


def train(settings: TrainSettings, target: LoadedTarget | None = None, minutes: float | None = None) -> Path:
    """Trains a drafter and saves it in DFlash format under `run/drafter`; resumes what it finds.

    Args:
        target: already loaded; None loads `settings.target`.
        minutes: stops after this long at the latest, evaluates and saves; a later run goes on.
    Returns:
        The drafter's folder.
    Raises:
        UserError: before any work, for data, shapes or a run folder that do not fit.
    """
    begun = time.monotonic()
    run = Path(settings.run)
    rows = load_rows(settings.data, settings.seq_len, settings.heldout)
    dtype = jnp.dtype(settings.dtype)
    target = target or load_target(settings.target, dtype)
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
    state = jax.device_put(fresh_state(settings, config, target.params, optimizer), whole)
    data = batches(rows.train, settings.batch, settings.seed)
    checkpoints = Checkpoints(run, settings.keep)
    restored = checkpoints.restore(state, contract)
    if restored:
        state = jax.device_put(restored[0], whole)
        data.set_state(restored[1])

    frozen = jax.device_put(_frozen(target.params, settings, rows.train, target.config.vocab_size), whole)
    sees_target = settings.objective.prediction.sees_target
    compute = make_features(module, drafter, sees_target)
    store = FeatureStore(compute, params, settings.cache_features, split)
    heldout_store = FeatureStore(compute, params, settings.cache_features, whole)
    step = make_step(drafter, settings, optimizer)
    sizes = sorted({max(2, config.block_size // 2), config.block_size})
    hits = {B: make_hits(drafter, B, settings.chunk) for B in sizes}
    head = jax.device_put(target_head(target.params), whole)

    def score(state: TrainState) -> dict[str, Any]:
        def taps(row: Batch) -> jax.Array:
            return heldout_store(Batch(row.tokens[None], row.answer[None], row.row_ids[None])).taps

        return evaluate(hits, state.params, frozen.embed_tokens, head, taps, rows.heldout)

    stop = {"asked": False}
    previous = signal.signal(signal.SIGTERM, lambda *_: stop.update(asked=True))
    last, scores = None, None
    at = int(state.step)
    if at == 0:
        _show_sample(rows.train[0], target)
    bar = tqdm(total=settings.steps, initial=at, desc="train", disable=None)
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as log:

        def write(record: dict[str, Any]) -> None:
            log.write(json.dumps(record) + "\n")
            log.flush()

        while at < settings.steps and not stop["asked"]:
            if minutes is not None and time.monotonic() - begun > minutes * 60:
                break
            batch = next(data)
            features = store(batch)
            arrays = jax.device_put((batch.tokens, batch.answer, batch.row_ids), split)
            state, metrics = step(state, frozen, features, *arrays)
            at += 1
            # Fetched one step late, so that the host never waits for the step it has just sent off.
            if last is not None:
                write(_record(at - 1, last))
                bar.set_postfix(loss=f"{float(last['loss']):.3f}", refresh=False)
            last = metrics
            bar.update()
            if rows.heldout and at % settings.eval_every == 0:
                scores = score(state)
                write({"step": at, "eval": scores})
                bar.write(f"step {at}: held-out MAT {scores['mat'][str(settings.block_size)]:.3f}")
            if at % settings.save_every == 0:
                checkpoints.save(state, data.get_state(), contract)
        if last is not None:
            write(_record(at, last))
        if rows.heldout:
            scores = score(state)
            write({"step": at, "eval": scores})
    bar.close()
    checkpoints.save(state, data.get_state(), contract)
    checkpoints.close()
    signal.signal(signal.SIGTERM, previous)
    if stop["asked"]:
        raise SystemExit(0)
    provenance = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "recipe": settings.objective.name,
        "steps": at,
        "skipped_steps": int(state.skipped),
        "heldout": scores,
        "settings": contract,
    }
    return Path(
        save_drafter(
            run / "drafter",
            config,
            jax.device_get(state.params),
            provenance,
            dtype=jnp.float32,
            special_ids=target.tokenizer.special_ids,
        )
        or run / "drafter"
    )


def _record(step: int, metrics: dict[str, jax.Array]) -> dict[str, Any]:
    host = jax.device_get(metrics)
    count = np.maximum(host["included"], 1)
    return {
        "step": step,
        "time": round(time.time(), 3),
        "loss": float(host["loss"]),
        "grad_norm": float(host["grad_norm"]),
        "blocks": int(host["blocks"]),
        "included": host["included"].tolist(),
        "weight": (host["weight"] / count).tolist(),
        "slot_loss": (host["slot_loss"] / count).tolist(),
        "accuracy": (host["hits"] / count).tolist(),
        "survival": (host["survived"] / np.maximum(host["reach"], 1)).tolist(),
    }


def _show_sample(row: Batch, target: LoadedTarget) -> None:
    """Prints what one row supervises, so that a wrong template or mask is seen before it costs a run."""
    text = target.tokenizer.decode(row.tokens[row.answer].tolist())
    prompt = target.tokenizer.decode(row.tokens[: int(np.flatnonzero(row.answer)[0])].tolist())
    tqdm.write(f"one row, prompt: {prompt!r}\n  supervised: {text!r}")
