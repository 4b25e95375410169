"""Acceptance figures, all from the number of accepted drafts per round."""

from collections.abc import Sequence

import numpy as np

Accepted = Sequence[int]
"""Accepted drafts of each round of one answer; a round commits one token more (the bonus)."""


def mat(answers: Sequence[Accepted]) -> float:
    """Mean accepted tokens a round, the bonus included: committed tokens / rounds over all answers."""
    rounds = [a for answer in answers for a in answer]
    return float(np.mean(rounds)) + 1.0 if rounds else 1.0


def tau(answers: Sequence[Accepted]) -> float:
    """Mean over answers of the answer's own mean, as the DFlash papers report it."""
    means = [float(np.mean(answer)) + 1.0 for answer in answers if len(answer)]
    return float(np.mean(means)) if means else 1.0


def prefix_survival(answers: Sequence[Accepted], block_size: int) -> list[float]:
    """S_k for k = 1..block_size-1: the share of rounds whose first k drafts were all committed.

    A round cut by a stop id or the budget counts what it committed, so `mat = 1 + sum_k S_k` holds exactly.
    """
    rounds = np.array([a for answer in answers for a in answer], np.int64)
    return [float(np.mean(rounds >= k)) if rounds.size else 0.0 for k in range(1, block_size)]


def mat_interval(answers: Sequence[Accepted], draws: int = 1000, seed: int = 0) -> tuple[float, float] | None:
    """A 95 % interval of MAT by resampling the answers; None without a round."""
    rounds = np.array([len(a) for a in answers])
    if not rounds.sum():
        return None
    committed = np.array([sum(a) for a in answers]) + rounds
    pick = np.random.default_rng(seed).integers(0, len(rounds), (draws, len(rounds)))
    totals = rounds[pick].sum(axis=1)
    means = committed[pick].sum(axis=1)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
