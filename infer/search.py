"""The peak of a curve that rises, then falls, at the price of few of its points."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from dscout_jax.errors import UserError


class Found(NamedTuple):
    """best: the point with the highest value seen. values: of all measured. reason: why it stopped."""

    best: int
    values: dict[int, float]
    reason: str


def peak(measure: Callable[[int], float], points: Sequence[int], within: int = 0) -> Found:
    """Fibonacci search: each measurement cuts what is left by the golden ratio, and none is made twice.

    Of n points about log(n) / log(1.618) are measured, on a curve with one peak the best for so many. Noise
    can mislead it by the points whose values lie closer together than the noise.

    Args:
        measure: the value of a point, dear; such as the throughput of a drafter of that depth, which has one
            peak because MAT rises ever more slowly with depth and latency does not.
        points: ascending, such as depths.
        within: steps that the answer may lie beside the peak. Only each (within + 1)-th point is then looked
            at: their own peak is no farther than that from the whole curve's.
    Raises:
        UserError: no points, not ascending, or `within` below 0.
    """
    if not points or any(a >= b for a, b in pairwise(points)):
        raise UserError(f"the points to search must be one or more and ascend, not {list(points)}")
    if within < 0:
        raise UserError(f"within {within} must be 0 or more steps beside the peak")
    count, points = len(points), list(points[within :: within + 1] or points[-1:])
    values: dict[int, float] = {}

    def at(index: int) -> float:
        if index >= len(points):
            return float("-inf")  # past the end: pads the points to a Fibonacci number
        if points[index] not in values:
            values[points[index]] = measure(points[index])
        return values[points[index]]

    narrow, wide = 1, 1
    while wide - 1 < len(points):
        narrow, wide = wide, narrow + wide
    # The peak lies strictly between `left` and `left + wide`.
    left = -1
    while wide > 2:
        low, high = left + wide - narrow, left + narrow
        if low == high:
            at(low)
            break
        if at(high) > at(low):
            left = low
        narrow, wide = wide - narrow, narrow
    at(left + 1)
    best = max(values, key=values.get)
    index = points.index(best)
    beside = [p for p in points[max(index - 1, 0) : index + 2] if p != best]
    known = [f"{p}: {values[p]:.4g}" for p in beside if p in values]
    reason = f"{best} is the best of {len(values)} measured of {count}"
    reason += f", at most {within} step(s) beside the peak" if within else ""
    return Found(best, values, reason + (f"; beside it {', '.join(known)}" if known else ""))
