"""Recipes: three factors and their options, put together by function."""

import dataclasses

from dscout_jax.errors import UserError
from dscout_jax.objective import inclusion, prediction, weighting
from dscout_jax.objective.inclusion import HorizonLaw, Unmask
from dscout_jax.objective.prediction import Prediction
from dscout_jax.objective.weighting import Weighting


@dataclasses.dataclass(frozen=True)
class Objective:
    """L = sum m sg(w) l / sum m sg(w) (+ chain).

    name: for logs. horizon, unmask: the inclusion m. weighting: w. prediction: l.
    chain: coefficient of the additive chain term, which stands outside the three factors; 0 leaves it out.
    Any inclusion goes with any weighting and any prediction.

    Raises:
        UserError: a negative chain, which would reward errors.
    """

    name: str
    horizon: HorizonLaw
    unmask: Unmask = inclusion.no_unmasking
    weighting: Weighting = weighting.uniform
    prediction: Prediction = prediction.ce
    chain: float = 0.0

    def __post_init__(self) -> None:
        if not self.chain >= 0:
            raise UserError(f"objective {self.name!r}: chain {self.chain} must be 0 or more")

    @property
    def sees_target(self) -> bool:
        """Whether the loss needs the target's hidden states beside the text."""
        return self.prediction.sees_target or getattr(self.weighting, "sees_target", False)


def _quarters(block_size: int) -> tuple[int, ...]:
    """{B/4, B/2, 3B/4, B}: {4, 8, 12, 16} for 16 and {2, 4, 6, 8} for 8."""
    if block_size < 8:
        return tuple(range(2, block_size + 1))
    return tuple(block_size * i // 4 for i in range(1, 5))


def dflash(block_size: int) -> Objective:
    """Fixed horizon, decay, cross-entropy."""
    return Objective("dflash", inclusion.fixed(block_size), weighting=weighting.decay())


def dscout(block_size: int) -> Objective:
    """Many short blocks beside a few whole ones; acceptance-weighted, decaying cross-entropy.

    Twelve blocks of 4 to each of `block_size`; of blocks up to 4, each horizon alike. Of what
    docs/results/ladder.md compares, the best.
    """
    few = block_size <= 4
    horizon = inclusion.every(block_size) if few else inclusion.mixed((4, block_size), (12.0, 1.0))
    weights = weighting.product(weighting.awl(eps=0.25), weighting.decay())
    return Objective("dscout", horizon, weighting=weights)


def published_dscout(block_size: int) -> Objective:
    """Mixed horizons, prefix unmasking, acceptance-weighted cross-entropy: the recipe as it was published."""
    return Objective(
        "published-dscout",
        inclusion.mixed(_quarters(block_size)),
        inclusion.prefix_unmasking(),
        weighting.awl(),
    )


def dpace(block_size: int) -> Objective:
    """Fixed horizon, D-PACE's suffix-sum weights."""
    return Objective("dpace", inclusion.fixed(block_size), weighting=weighting.dpace())


def auf(block_size: int) -> Objective:
    """Fixed horizon, supervision up to the first greedy error."""
    return Objective("auf", inclusion.fixed(block_size), weighting=weighting.auf)
