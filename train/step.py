"""The training step: features of the frozen target, blocks, drafter, factorised loss, AdamW."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from dscout_jax.config import DrafterConfig
from dscout_jax.errors import UserError
from dscout_jax.initialise import Init, init_drafter
from dscout_jax.models import Drafter, Target, embed
from dscout_jax.objective import factorized_loss, sample_blocks
from train.export import load_start
from train.settings import TrainSettings


class TrainState(NamedTuple):
    """params: fp32 masters. opt_state: optax's. step: int32, steps taken. skipped: int32, non-finite ones."""

    params: dict[str, Any]
    opt_state: Any
    step: jax.Array
    skipped: jax.Array


class Frozen(NamedTuple):
    """What the step needs of the target: its embedding table, and the head's scored rows.

    head: [R, D]. ids: [R] int32, the ids of its rows; rows: [V] int32, the row of each id (0 where it is
        not scored); both None: all are scored.
    """

    embed_tokens: dict[str, jax.Array]
    head: jax.Array
    ids: jax.Array | None = None
    rows: jax.Array | None = None


class Features(NamedTuple):
    """taps: [B, S, C * D]. hidden: [B, S, D] after the final norm, for predictions that see the target."""

    taps: jax.Array
    hidden: jax.Array | None


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """AdamW behind clipping by global norm, for a learning rate of -1: the step scales its updates."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.scale_by_adam(),
        optax.add_decayed_weights(settings.weight_decay),
    )


def learning_rate(settings: TrainSettings, progress: jax.Array) -> jax.Array:
    """Linear warm-up over the first `warmup` of the run, then a cosine to 0.

    Args:
        progress: 0..1, the share of the run that is over, by steps or by time.
    """
    warmup = max(settings.warmup, 1e-6)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * (progress - warmup) / (1 - warmup)))
    return settings.learning_rate * jnp.where(progress < warmup, progress / warmup, falling)


def first_state(
    settings: TrainSettings,
    config: DrafterConfig,
    target_params: dict[str, Any],
    optimizer: optax.GradientTransformation,
) -> TrainState:
    """The state at step 0; every leaf its own buffer, since the step donates them.

    Raises:
        UserError: `settings.init` is a drafter whose weights mean something else than this run's would.
    """
    if settings.init in get_args(Init):
        params = init_drafter(config, jax.random.key(settings.seed), target_params, settings.init)
    else:
        theirs, params, _ = load_start(settings.init)
        same = dataclasses.replace(theirs, block_size=config.block_size, max_position=config.max_position)
        if same != config:
            mine = dataclasses.asdict(config)
            odd = {k: (v, mine[k]) for k, v in dataclasses.asdict(same).items() if v != mine[k]}
            raise UserError(f"the drafter in {settings.init} is another model (its own, this run's): {odd}")
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def make_features(target: Target, drafter: Drafter, sees_target: bool) -> Callable[..., Features]:
    """(target params, tokens [B, S]) -> Features; jitted."""

    @jax.jit
    def features(params: dict[str, Any], tokens_BxS: jax.Array) -> Features:
        out = target.apply({"params": params}, tokens_BxS, taps=drafter.config.target_layer_ids)
        return jax.lax.stop_gradient(Features(out.taps, out.hidden if sees_target else None))

    return features


def make_step(
    drafter: Drafter, settings: TrainSettings, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """(state, frozen, progress, features, tokens, answer, row_ids) -> (state, metrics); jitted, donated.

    `progress` in 0..1 sets the learning rate.
    Loss and gradient are quotients of sums over the whole batch: all devices, all accumulation parts.
    A step whose loss or gradient is not finite changes nothing and is counted; so does one without a
    supervised slot, uncounted.
    """
    objective = settings.objective
    rows_per_sequence = settings.query_budget

    def sums(params, frozen, key, features, tokens, answer, row_ids):
        blocks = sample_blocks(
            key,
            tokens,
            answer,
            row_ids,
            num_anchors=settings.num_anchors,
            block_size=settings.block_size,
            mask_token_id=drafter.config.mask_token_id,
            horizon=objective.horizon,
            unmask=objective.unmask,
            query_budget=settings.query_budget,
        )
        x_BxNxWxD = embed({"embed_tokens": frozen.embed_tokens}, blocks.inputs)
        hidden = drafter.apply({"params": params}, features.taps, x_BxNxWxD, blocks.anchors, blocks.horizons)
        if frozen.rows is not None:
            blocks = blocks._replace(labels=frozen.rows[blocks.labels])
        out = factorized_loss(
            objective,
            hidden,
            frozen.head,
            blocks,
            features.hidden,
            rows_per_sequence=rows_per_sequence,
            chunk=settings.chunk,
        )
        return out.numerator, (out.denominator, out.slots, blocks.keep.sum())

    def step(state: TrainState, frozen: Frozen, progress, features: Features, tokens, answer, row_ids):
        key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
        grad = jax.value_and_grad(sums, has_aux=True)
        parts = (features, tokens, answer, row_ids)
        if settings.accumulation == 1:
            totals = grad(state.params, frozen, key, *parts)
        else:
            A = settings.accumulation
            split = jax.tree.map(lambda a: a.reshape(A, a.shape[0] // A, *a.shape[1:]), parts)

            def add(total, part):
                return jax.tree.map(jnp.add, total, grad(state.params, frozen, key, *part)), None

            first = grad(state.params, frozen, key, *jax.tree.map(lambda a: a[0], split))
            totals, _ = jax.lax.scan(add, first, jax.tree.map(lambda a: a[1:], split))
        (numerator, (denominator, slots, blocks)), grads = totals
        scale = 1.0 / jnp.where(denominator > 0, denominator, 1.0)
        loss, grads = numerator * scale, jax.tree.map(lambda g: g * scale, grads)
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        rate = learning_rate(settings, progress)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: -rate * u, updates)
        proposed = (optax.apply_updates(state.params, updates), opt_state)
        use = finite & (denominator > 0)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(use, new, old), proposed, (state.params, state.opt_state)
        )
        metrics = {"loss": loss, "grad_norm": norm, "blocks": blocks, "denominator": denominator}
        metrics["learning_rate"] = rate
        metrics |= {"slot_loss" if name == "loss" else name: value for name, value in slots.items()}
        return TrainState(params, opt_state, state.step + 1, state.skipped + ~finite), metrics

    return jax.jit(step, donate_argnums=0)
