"""What answers, as recorded, come to: speeds, both speed-ups, acceptance, identity, and intervals."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dscout_jax.decode import mat, prefix_survival, tau

Record = dict[str, Any]
"""One answer: tokens, accepted (drafts a round), prefill_seconds, decode_seconds."""


def speed(records: Sequence[Record]) -> float:
    """Tokens a second of the rounds; the prefill's token and time are left out."""
    seconds = sum(r["decode_seconds"] for r in records)
    return sum(len(r["tokens"]) - 1 for r in records) / seconds if seconds else 0.0


def seconds_a_token(records: Sequence[Record]) -> float:
    """Mean over answers of the answer's own seconds a token; those without a round are left out."""
    own = [r["decode_seconds"] / (len(r["tokens"]) - 1) for r in records if len(r["tokens"]) > 1]
    return float(np.mean(own)) if own else 0.0


def ratio(a: float, b: float) -> float:
    """a / b; 0 where nothing ran."""
    return a / b if b else 0.0


def histogram(accepted: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Rounds that committed 0, 1, ..., block_size - 1 drafts."""
    return np.bincount([a for answer in accepted for a in answer], minlength=block_size).tolist()


COUNTS = ("committed", "rounds", "seconds", "plain_tokens", "plain_seconds")
"""What an answer comes to: tokens committed by its rounds, their seconds; the same of plain decoding."""


def counts(plain: Sequence[Record], speculative: Sequence[Record]) -> list[tuple[float, ...]]:
    """COUNTS of each answer."""
    return [
        (
            sum(b["accepted"]) + len(b["accepted"]),
            len(b["accepted"]),
            b["decode_seconds"],
            len(a["tokens"]) - 1,
            a["decode_seconds"],
        )
        for a, b in zip(plain, speculative, strict=True)
    ]


def totals(counts_Nx5: Sequence[Sequence[float]]) -> np.ndarray:
    """[7]: sums of COUNTS over answers, of the answers' own means, and how many have one."""
    counted = np.asarray(counts_Nx5, float)
    ran = counted[counted[:, 1] > 0]
    return np.array([*counted.sum(axis=0), (ran[:, 0] / ran[:, 1]).sum(), len(ran)])


# Of summed totals [..., 7]; what never ran counts as nothing.
FIGURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mat": lambda t: t[..., 0] / np.maximum(t[..., 1], 1),
    "tau": lambda t: t[..., 5] / np.maximum(t[..., 6], 1),
    "plain_tokens_per_s": lambda t: t[..., 3] / np.maximum(t[..., 4], 1e-12),
    "tokens_per_s": lambda t: t[..., 0] / np.maximum(t[..., 2], 1e-12),
    "speedup": lambda t: t[..., 0] / np.maximum(t[..., 2], 1e-12) * t[..., 4] / np.maximum(t[..., 3], 1),
}


def spread(figure: str, totals_Nx7: np.ndarray, draws: int = 2000) -> list[float] | None:
    """A 95 % interval of a figure by resampling conversations, plain and speculative together; or None.

    None where fewer than two had a round: nothing can be resampled.
    """
    ran = totals_Nx7[totals_Nx7[:, 1] > 0]
    if len(ran) < 2:
        return None
    pick = np.random.default_rng(0).integers(0, len(ran), (draws, len(ran)))
    return np.quantile(FIGURES[figure](ran[pick].sum(axis=1)), [0.025, 0.975]).tolist()


def figures(
    plain: Sequence[Record],
    speculative: Sequence[Record],
    conversations: Sequence[int],
    block_size: int,
    queues: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """A row's figures.

    Args:
        plain, speculative: the answers, in one order.
        conversations: which conversation each belongs to; whole ones are resampled.
        queues: seconds of the whole queue, plain and speculative, where answers were decoded side by side.
    """
    accepted = [r["accepted"] for r in speculative]
    speeds = speed(plain), speed(speculative)
    if queues is not None:
        emitted = (sum(len(r["tokens"]) for r in side) for side in (plain, speculative))
        speeds = tuple(ratio(count, seconds) for count, seconds in zip(emitted, queues, strict=True))
    by_conversation: dict[int, list[int]] = {}
    for at, conversation in enumerate(conversations):
        by_conversation.setdefault(conversation, []).append(at)
    counted = counts(plain, speculative)
    each = np.array([totals([counted[at] for at in places]) for places in by_conversation.values()])

    def timed(figure: str) -> list[float] | None:
        # Answers side by side share their seconds: a queue's speed has no share for each of them.
        return None if queues is not None else spread(figure, each)

    same = sum(a["tokens"] == b["tokens"] for a, b in zip(plain, speculative, strict=True))
    return {
        "n": len(plain),
        "conversations": len(by_conversation),
        "plain_tokens_per_s": speeds[0],
        "plain_tokens_per_s_spread": timed("plain_tokens_per_s"),
        "speculative_tokens_per_s": speeds[1],
        "speculative_tokens_per_s_spread": timed("tokens_per_s"),
        "speedup": ratio(speeds[1], speeds[0]),
        "speedup_spread": timed("speedup"),
        "speedup_of_means": ratio(seconds_a_token(plain), seconds_a_token(speculative)),
        "mat": mat(accepted),
        "mat_spread": spread("mat", each),
        "tau": tau(accepted),
        "tau_spread": spread("tau", each),
        "survival": prefix_survival(accepted, block_size),
        "histogram": histogram(accepted, block_size),
        "ms_per_round": 1e3 * ratio(float(each[:, 2].sum()), float(each[:, 1].sum())),
        "plain_prefill_ms": 1e3 * float(np.mean([r["prefill_seconds"] for r in plain])),
        "prefill_ms": 1e3 * float(np.mean([r["prefill_seconds"] for r in speculative])),
        "identical": same,
        "identical_percent": 100 * same / len(plain),
    }
