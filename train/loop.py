"""The training run: one linear function from settings to a saved drafter."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dscout_jax.errors import UserError
from dscout_jax.initialise import Init
from dscout_jax.interop import (
    LoadedTarget,
    save_drafter,
)
from dscout_jax.models import target_head
from dscout_jax.sharding import BATCH, named
from train.checkpoint import Checkpoints
from train.dataset import Batch, batches, stack
from train.evaluate import evaluate, make_hits
from train.export import describe, load_start, refuse_imported
from train.features import FeatureFiles, FeatureStore, StoredFeatures
from train.flops import PEAKS, step_flops
from train.hosts import Termination, barrier, fetch, first, own_rows, put, put_rows
from train.log import Log, Profile, Speed, need, record
from train.paths import local_folder, place
from train.prepare import Prepared, prepare, run_contract
from train.settings import TrainSettings
from train.step import (
    Features,
    Frozen,
    TrainState,
    frozen_specs,
    make_optimizer,
    make_step,
    spread_state,
    used_layers,
)


def _frozen(params: dict[str, Any], settings: TrainSettings, rows: Sequence[Batch], vocab: int) -> Frozen:
    head = target_head(params)
    if settings.train_vocab == "full":
        return Frozen(params["embed_tokens"], head)
    seen = np.unique(_answered(rows))
    places = np.zeros(vocab, np.int32)
    places[seen] = np.arange(len(seen))
    return Frozen(params["embed_tokens"], head[seen], seen.astype(np.int32), places)


def _answered(rows: Sequence[Batch]) -> np.ndarray:
    return np.concatenate([r.tokens[r.answer] for r in rows])


def drafted(settings: TrainSettings, rows: Sequence[Batch]) -> list[int] | None:
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
    accept: Sequence[str] = (),
    cache_dir: str | Path | None = None,
) -> epath.Path:
    """Trains a drafter and saves it in DFlash format under `run/drafter`; resumes what it finds.

    Args:
        target: already loaded; None loads `settings.target`, and lets go of what is not needed: where layers
            are scanned, only then are they on the mesh once.
        minutes: bound on the time spent training, over all calls; the learning rate comes down with it.
        kept: features by row, read and added to, of runs on the same data that tap the same layers.
        accept: parts of the contract in which a run that is there may differ.
        cache_dir: where the embedded target lies, for `target` None.
    Returns:
        The drafter's folder.
    Raises:
        UserError: before any work, for data, shapes or a run folder that do not fit.
    """
    run = place(settings.run)
    refuse_imported(run)
    for name in settings.loggers:
        need(name)
    ready = prepare(settings, target, cache_dir)
    rows, target, config, drafter, mesh, split = ready[:6]
    contract = run_contract(settings, target.fingerprint, rows.digest)
    several = jax.process_count() > 1
    if several and settings.cache_features and settings.features is None:
        raise UserError("cache_features keeps whole rows on one host: set it to False for several processes")
    if several and minutes is not None:
        raise UserError("minutes bounds a run of one process: bound one of several by its steps")
    store = _features(settings, ready, kept)
    run.mkdir(parents=True, exist_ok=True)

    optimizer = make_optimizer(settings)
    state = spread_state(settings, config, ready.weights, optimizer, mesh)
    frozen = _frozen(ready.weights, settings, rows.train, target.config.vocab_size)
    frozen = put(frozen, named(frozen_specs(frozen, mesh), mesh))
    # Only what computes features still needs the target, and where layers are scanned not by name.
    ready = ready._replace(weights={}, params={})
    own = own_rows(split, settings.batch)
    data = batches(rows.train, settings.batch, settings.seed, own, rows.shares)
    checkpoints = Checkpoints(run, settings.keep)
    restored = checkpoints.restore(state, contract, accept)
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
        log.flush()
        checkpoints.save(state, {"data": data.get_state(), "seconds": spent()}, contract, mat)

    speed, profile = _speed(settings, ready), Profile(run, settings.profile)
    last, stopping = None, False
    at = int(state.step)
    if at == 0 and first():
        if rows.left_out:
            tqdm.write(
                f"{rows.left_out} rows have fewer than two answer tokens within seq_len {settings.seq_len}, "
                "and so no anchor: left out",
                file=sys.stderr,
            )
        _show_sample(rows.train[0], target)
    # Of time or steps, whichever ends the run: so the time left is that of the whole run.
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=1.0, initial=progress(), desc="train", bar_format=form, disable=None)
    with Log(run, at, settings.loggers) as log, Termination() as stop:
        while at < settings.steps and progress() < 1.0 and not (stopping := stop.asked(at)):
            profile.before(at + 1)
            batch = next(data)
            features = store(batch, settings.batch)
            arrays = put_rows(tuple(batch), split, settings.batch)
            state, metrics = step(state, frozen, settings.seed, progress(), features, *arrays)
            at += 1
            profile.after(at, state)
            # Fetched one step late, so that the host never waits for the step it has just sent off.
            if last is not None:
                log.write(record(at - 1, last, speed))
                bar.set_postfix(step=at, loss=f"{float(last['loss']):.3f}", refresh=False)
            last = metrics
            bar.update(progress() - bar.n)
            evaluated = bool(rows.heldout) and at % settings.eval_every == 0
            if evaluated:
                scores = score(state)
                speed.pause()
                log.write({"step": at, "eval": scores})
                bar.write(f"step {at}: held-out MAT {scores['mat'][str(settings.block_size)]:.3f}")
            # What was evaluated is kept, or the best could not be; the last is evaluated and saved below.
            over = at == settings.steps or progress() >= 1.0
            if evaluated or (at % (settings.save_every // 2) == 0 and not over):
                # A checkpoint's own line goes first: no later run could write it.
                log.write(record(at, last, speed))
                last = None
                save()
        if last is not None:
            log.write(record(at, last, speed))
        profile.stop()
        # Before the last save, which keeps the MAT beside the weights; whoever asks to stop does not wait.
        if rows.heldout and not stopping and at not in log.scores:
            log.write({"step": at, "eval": score(state)})
        save()
        checkpoints.close()
        bar.close()
        if stopping:
            raise SystemExit(0)
    learnt = fetch(state.params)
    if first():
        ended = {"steps": at, "skipped_steps": int(state.skipped), "heldout": log.scores.get(at)}
        with local_folder(run / "drafter") as folder:
            save_drafter(
                folder,
                config,
                learnt,
                provenance | ended,
                dtype=jnp.float32,
                special_ids=target.tokenizer.special_ids,
                draft_ids=draft_ids,
            )
    barrier("drafter")
    return epath.Path(settings.run).expanduser() / "drafter"  # as it was named


def _speed(settings: TrainSettings, ready: Prepared) -> Speed:
    shapes, sees_target = ready.target.config, settings.objective.sees_target
    counted = step_flops(settings, shapes, ready.config, used_layers(shapes, ready.config, sees_target))
    needed = counted.needed
    if settings.features is not None or settings.cache_features:
        needed -= counted.parts["target"]
    peak = PEAKS.get(ready.mesh.devices.flat[0].device_kind)
    peak = None if peak is None else peak * ready.mesh.size
    return Speed(settings.batch * settings.seq_len, needed, peak)


def _features(
    settings: TrainSettings, ready: Prepared, kept: dict[int, Features] | None
) -> FeatureStore | StoredFeatures:
    if settings.features is not None:
        files = FeatureFiles(settings.features, ready.features_contract(settings), create=False)
        return StoredFeatures(files, ready.places, ready.split)
    if kept is None and settings.cache_features:
        kept = {}
    return FeatureStore(ready.compute, ready.params, kept, ready.split)


def _tables(
    hits, params, frozen: Frozen, store: FeatureStore | StoredFeatures, rows: Sequence[Batch], mesh: Mesh
):
    """(answer's mask, {B: table of hits}) of each row; every device works on a row of its own."""
    split = NamedSharding(mesh, BATCH)
    count = mesh.shape["data"] * mesh.shape["fsdp"]
    own = own_rows(split, count)
    for begin in range(0, len(rows), count):
        group = list(rows[begin : begin + count])
        padded = group + [group[-1]] * (count - len(group))
        local = stack([padded[i] for i in own])
        taps, tokens = store(local, count).taps, put_rows(local.tokens, split, count)
        tables = {B: fetch(h(params, frozen, taps, tokens)) for B, h in hits.items()}
        for i, row in enumerate(group):
            yield row.answer, {B: table[i] for B, table in tables.items()}


def _show_sample(row: Batch, target: LoadedTarget) -> None:
    """Prints one row, control tokens and all: a wrong template or mask is seen before it costs a run."""
    length = int(np.flatnonzero(row.answer)[-1]) + 1
    shown = target.tokenizer.show_mask(row.tokens[:length].tolist(), row.answer[:length].tolist())
    tqdm.write(f"one row, what is learnt in ⟦ ⟧:\n{shown}")
