"""The training step: features of the frozen target, blocks, drafter, factorised loss, AdamW."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from dscout_jax import ops
from dscout_jax.config import DrafterConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.initialise import Init, init_drafter
from dscout_jax.models import Drafter, StackedTarget, Target, embed
from dscout_jax.objective import factorized_loss, sample_blocks
from dscout_jax.objective.inclusion import Blocks
from dscout_jax.sharding import BATCH, ROWS, by_rows, over_rows, shardings, spec_of, specs, whole
from train.export import load_start
from train.hosts import put
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


def used_layers(target: TargetConfig, drafter: DrafterConfig, sees_target: bool) -> int:
    """Layers of the target that its features need: up to the last tap, or all where the loss sees its end."""
    return target.num_layers if sees_target else max(drafter.target_layer_ids) + 1


def frozen_specs(frozen: Frozen, mesh: Mesh) -> Frozen:
    """PartitionSpecs; a head of fewer rows than the vocabulary is not split along them."""
    table = spec_of("embed_tokens/weight", frozen.embed_tokens["weight"].shape, mesh)
    head = table if frozen.ids is None else PartitionSpec(None, table[1])
    ids, rows = (None if x is None else PartitionSpec() for x in (frozen.ids, frozen.rows))
    return Frozen({"weight": table}, head, ids, rows)


def spread_state(
    settings: TrainSettings,
    config: DrafterConfig,
    target_params: dict[str, Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> TrainState:
    """`first_state` on a mesh, made where it stays: it need not fit one device."""

    def make(params):
        return first_state(settings, config, params, optimizer)

    if settings.init not in get_args(Init):
        # Read in host memory: as constants of a program the values would be compiled in.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            state = make(None)
        return put(state, shardings(state, mesh))
    places = shardings(jax.eval_shape(make, target_params), mesh)
    return jax.jit(make, out_shardings=places)(target_params)


def make_features(
    target: Target | StackedTarget, drafter: Drafter, sees_target: bool, mesh: Mesh | None = None
) -> Callable[..., Features]:
    """(target params, tokens [B, S]) -> Features; jitted.

    Args:
        mesh: over which the parameters lie by the table and the rows by `BATCH`; None: one device's work.
    """

    def features(params: dict[str, Any], tokens_BxS: jax.Array) -> Features:
        out = target.apply({"params": params}, tokens_BxS, taps=drafter.config.target_layer_ids)
        return jax.lax.stop_gradient(Features(out.taps, out.hidden if sees_target else None))

    def spread(params: dict[str, Any], tokens_BxS: jax.Array) -> Features:
        weights = by_rows(specs(params, mesh))
        return over_rows(features, mesh, (weights, BATCH), BATCH)(params, tokens_BxS)

    return jax.jit(features if mesh is None else spread)


def make_sums(drafter: Drafter, settings: TrainSettings) -> Callable[..., tuple[jax.Array, tuple]]:
    """(params, frozen, key, features, tokens, answer, row_ids) -> numerator, (denominator, slots, counts).

    The loss of a batch is the quotient of the first two, each summed over all of its parts. counts: `blocks`
    that stand at an anchor, and `queries`, the slots up to their horizons, the anchors' own included.
    """
    objective = settings.objective

    def sums(params, frozen, key, features, tokens, answer, row_ids):
        blocks = sample_blocks(
            key,
            tokens,
            answer,
            row_ids,
            num_anchors=settings.anchors,
            block_size=settings.block_size,
            mask_token_id=drafter.config.mask_token_id,
            horizon=objective.horizon,
            unmask=objective.unmask,
        )
        table = whole("embed_tokens/weight", frozen.embed_tokens["weight"])
        hidden = _hidden(drafter, settings, params, table, features.taps, blocks)
        if frozen.rows is not None:
            blocks = blocks._replace(labels=frozen.rows[blocks.labels])
        out = factorized_loss(
            objective,
            hidden,
            whole("lm_head/weight", frozen.head),
            blocks,
            features.hidden,
            rows_per_sequence=int((objective.horizon.spread(settings.anchors) - 1).sum()),
            chunk=settings.chunk,
        )
        counts = {"blocks": blocks.keep.sum(), "queries": (blocks.horizons * blocks.keep).sum()}
        return out.numerator, (out.denominator, out.slots, counts)

    return sums


def _hidden(
    drafter: Drafter,
    settings: TrainSettings,
    params: Any,
    table_VxD: jax.Array,
    taps_BxSxCD: jax.Array,
    blocks: Blocks,
) -> jax.Array:
    """The drafter's output [B, N, W, D] for sampled blocks; zero beyond the width of a block's group.

    Blocks never see each other. So blocks of like horizons go together, no wider than the longest of them;
    and with `anchor_chunk`, so many at a time go through all layers alone, and the backward pass keeps
    nothing of them but what went in. The context's keys and values are made once.
    """
    context = drafter.apply({"params": params}, taps_BxSxCD, method="contexts")

    def some(part):
        x_BxnxWxD, anchors_Bxn, horizons_Bxn = part
        rest = (anchors_Bxn, context, horizons_Bxn, settings.attention_chunk)
        return drafter.apply({"params": params}, x_BxnxWxD, *rest, method="block")

    # A loop also keeps a compiler from merging the recomputation with the first pass, as XLA:CPU does else.
    again = jax.checkpoint(some, prevent_cse=False)
    N, W = blocks.inputs.shape[1:]
    found = []
    for width, some_blocks in settings.objective.horizon.groups(N):
        ids_BxnxW = blocks.inputs[:, some_blocks, :width]
        x_BxnxWxD = embed({"embed_tokens": {"weight": table_VxD}}, ids_BxnxW)
        part = (x_BxnxWxD, blocks.anchors[:, some_blocks], blocks.horizons[:, some_blocks])
        n = settings.anchor_chunk
        out = some(part) if n is None else ops.map_chunks(again, part, n)
        found.append(jnp.pad(out, ((0, 0), (0, 0), (0, W - width), (0, 0))))
    return jnp.concatenate(found, axis=1)


def make_step(
    drafter: Drafter,
    settings: TrainSettings,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Jitted (state, frozen, seed, progress, features, tokens, answer, row_ids) -> (state, metrics), donated.

    `seed` and the step draw the blocks; it is an argument so that runs that differ in it share a program.
    `progress` in 0..1 sets the learning rate.
    Loss and gradient are quotients of sums over the whole batch: all devices, all accumulation parts.
    A step whose loss or gradient is not finite changes nothing and is counted; so does one without a
    supervised slot, uncounted.

    Args:
        mesh: over which state and `frozen` lie by the table and the rows by `BATCH`; None: one device's work.
    """
    sums = make_sums(drafter, settings)

    def accumulated(params, frozen, key, *parts):
        """Sums and their gradients over the rows at hand, in `accumulation` parts."""
        grad = jax.value_and_grad(sums, has_aux=True)
        A = settings.accumulation
        if A == 1:
            return grad(params, frozen, key, *parts)
        split = jax.tree.map(lambda a: a.reshape(A, a.shape[0] // A, *a.shape[1:]), parts)

        def add(total, part):
            return jax.tree.map(jnp.add, total, grad(params, frozen, key, *part)), None

        first = grad(params, frozen, key, *jax.tree.map(lambda a: a[0], split))
        return jax.lax.scan(add, first, jax.tree.map(lambda a: a[1:], split))[0]

    def over_mesh(params, frozen, key, *parts):
        weights = by_rows(specs(params, mesh))

        def local(params, frozen, key, *parts):
            found, grads = accumulated(params, frozen, key, *parts)
            # A gathered weight's gradient has been summed over `fsdp` on its way back.
            summed = lambda g, spec: jax.lax.psum(g, "data" if "fsdp" in spec else ROWS)  # noqa: E731
            return jax.lax.psum(found, ROWS), jax.tree.map(summed, grads, weights)

        put = (weights, by_rows(frozen_specs(frozen, mesh)), PartitionSpec(), *(BATCH for _ in parts))
        return over_rows(local, mesh, put, (PartitionSpec(), weights))(params, frozen, key, *parts)

    totals = accumulated if mesh is None else over_mesh

    def step(state: TrainState, frozen: Frozen, seed, progress, features: Features, tokens, answer, row_ids):
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        found, grads = totals(state.params, frozen, key, features, tokens, answer, row_ids)
        numerator, (denominator, slots, counts) = found
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
        skipped = state.skipped + ~finite
        metrics = {"loss": loss, "grad_norm": norm, "denominator": denominator, "learning_rate": rate}
        metrics |= counts | {"skipped": skipped}
        metrics |= {"slot_loss" if name == "loss" else name: value for name, value in slots.items()}
        after = TrainState(params, opt_state, state.step + 1, skipped)
        if mesh is not None:
            after = jax.lax.with_sharding_constraint(after, shardings(after, mesh))
        return after, metrics

    return jax.jit(step, donate_argnums=0)
