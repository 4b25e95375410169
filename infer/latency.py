"""Where a round's time goes: each part a timed program of its own, warmed, in medians."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dscout_jax import ops
from dscout_jax.decode import Decoder, DecodeState, Sampling, Weights, serve
from dscout_jax.errors import UserError
from dscout_jax.models import Target, target_head
from infer.load import load_decoder
from infer.machine import describe

CHUNK = 1024
"""Positions of a long prompt read in one forward, as the Decoder does by itself."""

Step = Callable[[Weights, DecodeState], DecodeState]


def forward_step(target: Target, tokens: int, taps: tuple[int, ...] = ()) -> Step:
    """The target's bare forward of `tokens` tokens with its head and argmax; nothing is committed.

    The first choice becomes the next call's anchor: were nothing carried on, a loop would hoist the forward.
    """

    def step(weights: Weights, state: DecodeState) -> DecodeState:
        block = jnp.broadcast_to(state.anchors[:, None], (state.lengths.shape[0], tokens))
        out = target.apply({"params": weights.target}, block, state.lengths, state.target, taps)
        choices = ops.argmax(ops.head_logits(out.hidden, target_head(weights.target)))
        if taps:
            # Keeps the tapped features alive in the timed program.
            choices += (out.taps.astype(jnp.float32).sum() == jnp.inf).astype(choices.dtype)
        return _set_anchors(state._replace(target=out.cache), choices[:, 0])

    return step


def draft_step(decoder: Decoder) -> Step:
    """One draft forward with the target's head; the cache stays as it is."""
    draft = decoder.draft_of(decoder.block_size)

    def step(weights: Weights, state: DecodeState) -> DecodeState:
        return _set_anchors(state, draft(weights, state).ids[:, 0])

    return step


def _set_anchors(state: DecodeState, ids: jax.Array) -> DecodeState:
    rows = jnp.arange(state.lengths.shape[0])
    return state._replace(tokens=state.tokens.at[rows, state.lengths].set(ids.astype(jnp.int32)))


def timer(step: Step, weights: Weights, state: DecodeState, calls: int) -> Callable[[], float]:
    """A compiled loop of `calls` steps; calling it times one pass and returns milliseconds a step.

    The steps stand in a loop because decoding's do: what XLA does at a loop's entry it does once here too.
    """

    def run(weights, state):
        return jax.lax.fori_loop(0, calls, lambda _, s: step(weights, s), state)

    program = jax.jit(run).lower(weights, state).compile()
    jax.block_until_ready(program(weights, state))

    def timed() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(weights, state))
        return (time.perf_counter() - begun) * 1e3 / calls

    return timed


def made_up(decoder: Decoder, batch: int, tokens: int) -> list[list[int]]:
    """`batch` prompts of so many tokens, none of which repeats itself soon."""
    vocab = decoder.target.config.vocab_size
    return [[(7 * i + row) % (vocab - 1) for i in range(tokens)] for row in range(batch)]


def whole(
    decoder: Decoder, prompts: Sequence[Sequence[int]], calls: int, sampling: Sampling | None = None
) -> Callable[[], float]:
    """A timer of decoding itself (`serve`, a slot a prompt), in milliseconds a round, its work included."""
    requests = decoder.requests(prompts, calls + 1, [[]] * len(prompts), sampling)

    def timed() -> float:
        stretches: list[float] = []
        answers = dict(serve(decoder, requests, len(prompts), clock=stretches.append))
        return sum(stretches) * 1e3 / max(answer.rounds for answer in answers.values())

    timed()
    return timed


def reading(decoder: Decoder, prompts: Sequence[Sequence[int]], calls: int) -> Callable[[], float]:
    """A timer of the prefill of these prompts, in milliseconds; both models read them."""
    requests = decoder.requests(prompts, calls + 1)

    def timed() -> float:
        return decoder.prefill(requests)[1] * 1e3

    timed()
    return timed


def part_timers(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    calls: int,
    drafts: bool = True,
    sampling: Sampling | None = None,
) -> dict[str, Callable[[], float]]:
    """Timers of "draft", "verify" and the whole "round" at the decoder's block size.

    A decoder with smaller sizes verifies at its largest here. Without `drafts`, as in plain decoding by two
    rows, there is no draft to time.
    """
    state, _ = decoder.prefill(decoder.requests(prompts, calls + 1))
    taps = decoder.drafter.config.target_layer_ids if decoder.drafter else ()
    verify = forward_step(decoder.target, decoder.block_size, taps)
    timers = {"verify": timer(verify, decoder.weights, state, calls)}
    if drafts and decoder.block_size > 1:
        timers["draft"] = timer(draft_step(decoder), decoder.weights, state, calls)
    return timers | {"round": whole(decoder, prompts, calls, sampling)}


def take_turns(timers: dict[Any, Callable[[], float]], repeats: int) -> dict[Any, list[float]]:
    """`repeats` samples of each timer; taking turns spreads a slow spell of the machine over all of them."""
    samples: dict[Any, list[float]] = {key: [] for key in timers}
    for _ in range(repeats):
        for key, timed in timers.items():
            samples[key].append(timed())
    return samples


def measure(
    decoder: Decoder,
    block_sizes: Sequence[int],
    *,
    batch: int = 1,
    prompt_tokens: int = 100,
    calls: int = 16,
    repeats: int = 5,
    parts: bool = True,
    sampling: Sampling | None = None,
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Milliseconds of prefill and AR step, and for every block size of draft, verify and the whole round.

    Args:
        decoder: one that drafts; its own block size does not matter.
        prompt_tokens: of the made-up prompts; a step's cost hangs on the cache's capacity, not on this.
        parts: also of prefill, bare forward, draft and verify; most are programs more to compile.
        sampling: of plain steps and whole rounds; None: greedy.
    Returns:
        {"batch", "capacity", "prompt_tokens", "prefill_ms", "ar_ms", "plain_ms", "plain_rows",
        "plain_over_ar", "blocks": [{"block_size", "draft_ms", "verify_ms", "round_ms", "other_ms",
        "round_over_parts", "verify_over_plain"}, ...], "spread": {name: [least, most]}}, in medians;
        `plain_ms` and `round_ms` come from decoding itself (`serve`, one slot a prompt), so the loop's own
        work is in them.
    """
    prompts = made_up(decoder, batch, prompt_tokens)
    timers: dict[tuple, Callable[[], float]] = {}
    for rows in (1, 2):
        plain = decoder.plain(rows)
        if parts:
            state, _ = plain.prefill(plain.requests(prompts, calls + 1))
            step = forward_step(decoder.target, rows)
            timers["ar", rows] = timer(step, plain.weights, state, calls)
        timers["plain", rows] = whole(plain, prompts, calls, sampling)
        log(f"compiled plain decoding with {rows} row(s)")
    for size in block_sizes:
        sized = decoder.resize(size)
        if parts:
            found = part_timers(sized, prompts, calls, sampling=sampling)
        else:
            found = {"round": whole(sized, prompts, calls, sampling)}
        timers |= {(name, size): timed for name, timed in found.items()}
        log(f"compiled block size {size}")
    if parts:
        timers["prefill", prompt_tokens] = reading(decoder, prompts, calls)
    samples = take_turns(timers, repeats)
    ms = {key: statistics.median(values) for key, values in samples.items()}
    rows = min((1, 2), key=lambda r: ms["plain", r])
    bare = {}
    if parts:
        bare = {
            "prefill_ms": ms["prefill", prompt_tokens],
            "ar_ms": ms["ar", rows],
            "plain_over_ar": ms["plain", rows] / ms["ar", rows],
        }
    return {
        "batch": batch,
        "capacity": decoder.shape(decoder.requests(prompts, calls + 1)).capacity,
        "prompt_tokens": prompt_tokens,
        "plain_ms": ms["plain", rows],
        "plain_rows": rows,
        "plain_ms_by_rows": {r: ms["plain", r] for r in (1, 2)},
        **bare,
        "blocks": [_block(ms, size, ms["plain", rows], parts) for size in block_sizes],
        "repeats": repeats,
        "spread": {f"{name}_{size}": [min(v), max(v)] for (name, size), v in samples.items()},
    }


def _block(ms: dict[tuple, float], size: int, plain_ms: float, parts: bool) -> dict[str, Any]:
    rounds = ms["round", size]
    if not parts:
        return {"block_size": size, "round_ms": rounds, "break_even_mat": rounds / plain_ms}
    draft, verify = ms.get(("draft", size), 0.0), ms["verify", size]
    return {
        "block_size": size,
        "draft_ms": draft,
        "verify_ms": verify,
        "round_ms": rounds,
        "other_ms": rounds - draft - verify,
        "round_over_parts": rounds / (draft + verify),
        "verify_over_plain": verify / plain_ms,
        "break_even_mat": rounds / plain_ms,
    }


def latency(
    drafter: str | Path,
    *,
    target: str | Path = "smollm2-135m",
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    block_sizes: Sequence[int] = (),
    concurrencies: Sequence[int] = (1,),
    contexts: Sequence[int] = (),
    calls: int = 16,
    repeats: int = 5,
    out: str | Path = "runs/latency.json",
    cache_dir: str | Path | None = None,
    log: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measures a target and a drafter and writes JSON with the machine beside it, after each measurement.

    `dtypes` of the document: for each a list of `measure`'s figures, one a context and concurrency.

    Args:
        concurrencies: rows decoded together.
        contexts: capacities of the caches, in positions, which prompts nearly fill; none: what prompts of 100
            tokens need.
    Raises:
        UserError: counts below 1, or a context that does not hold the rounds or that a model does not have.
    """
    if repeats < 1 or not concurrencies or min(concurrencies) < 1:
        raise UserError(f"concurrencies {tuple(concurrencies)} and repeats {repeats} must be from 1 up")
    document: dict[str, Any] = {"machine": describe(), "target": str(target), "dtypes": {}}
    out = Path(out)
    for dtype in dtypes:
        log(f"{dtype}:")
        _, full = load_decoder(target, drafter, dtype=dtype, cache_dir=cache_dir)
        sizes = block_sizes or _sizes(full.block_size)
        if wrong := [size for size in sizes if not 1 <= size <= full.block_size]:
            raise UserError(f"block sizes {wrong} are not from 1 to the drafter's own, {full.block_size}")
        grounds = [filled(full, context, calls) for context in contexts] or [(full, 100)]
        document["dtypes"][dtype] = []
        for decoder, prompt_tokens in grounds:
            for batch in concurrencies:
                options = dict(prompt_tokens=prompt_tokens, calls=calls, repeats=repeats, log=log)
                figures = measure(decoder, sizes, batch=batch, **options)
                document["dtypes"][dtype].append(figures)
                log(table(figures))
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def filled(decoder: Decoder, context: int, calls: int) -> tuple[Decoder, int]:
    """The decoder with caches of `context` positions, and the tokens of prompts that leave room for `calls`.

    Raises:
        UserError: no room for a prompt, or more positions than a model has.
    """
    tokens = context - (calls + 1) - decoder.block_size
    if tokens < 1:
        raise UserError(
            f"a context of {context} does not hold {calls + 1} new tokens and a block of {decoder.block_size}"
        )
    if tokens > CHUNK:
        tokens -= tokens % CHUNK
    sized = decoder.resize(
        decoder.block_size, capacity_bucket=context, bucket=min(tokens, CHUNK), prefill_chunk=CHUNK
    )
    sized.shape(sized.requests(made_up(sized, 1, tokens), calls + 1))
    return sized, tokens


def _sizes(most: int) -> tuple[int, ...]:
    return (*(size for size in (2, 4, 8, 16, 32) if size < most), most)


def table(figures: dict[str, Any]) -> str:
    """Markdown of one dtype's figures."""
    rows, tokens = figures["plain_rows"], figures["prompt_tokens"]

    def with_spread(ms: float, name: str) -> str:
        low, high = figures["spread"][name]
        return f"{ms:.1f} ({low:.1f} to {high:.1f})"

    lines = [
        f"concurrency {figures['batch']}, caches of {figures['capacity']} positions: prefill of {tokens} "
        f"tokens {with_spread(figures['prefill_ms'], f'prefill_{tokens}')} ms, "
        f"plain step {with_spread(figures['plain_ms'], f'plain_{rows}')} ms in the loop ({rows} row(s)), "
        f"bare forward {figures['ar_ms']:.1f} ms",
        "",
        "| B | draft ms | verify ms | other ms | round ms | round/parts | verify/plain | pays above MAT |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for b in figures["blocks"]:
        rounds = with_spread(b["round_ms"], f"round_{b['block_size']}")
        lines.append(
            f"| {b['block_size']} | {b['draft_ms']:.1f} | {b['verify_ms']:.1f} | {b['other_ms']:.1f} "
            f"| {rounds} | {b['round_over_parts']:.2f} | {b['verify_over_plain']:.2f} "
            f"| {b['break_even_mat']:.2f} |"
        )
    return "\n".join(lines)
