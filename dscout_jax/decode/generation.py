"""Answers, read from a state on the host."""

import dataclasses

import jax
import numpy as np

from dscout_jax.decode.state import DecodeState
from dscout_jax.decode.stats import mat, prefix_survival


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer.

    tokens: emitted ids, a stop id included.
    text: of the tokens; None without a detokenizer.
    accepted: drafts accepted in each round; `sum(a + 1) + 1 == len(tokens)`, the first token being the
        prefill's.
    block_size: slots of a round at the most.
    finish: "stop" or "length".
    prefill_seconds, decode_seconds: of the whole batch, compilation excluded.
    done_seconds: from the start of the batch or queue to this answer's end, compilation excluded.
    """

    tokens: list[int]
    text: str | None
    accepted: list[int]
    block_size: int
    finish: str
    prefill_seconds: float
    decode_seconds: float
    done_seconds: float

    @property
    def rounds(self) -> int:
        """Rounds that the answer took."""
        return len(self.accepted)

    @property
    def mat(self) -> float:
        """Tokens committed a round, the bonus included."""
        return mat([self.accepted])

    @property
    def survival(self) -> list[float]:
        """S_k for k = 1..block_size-1: the share of rounds that committed their first k drafts."""
        return prefix_survival([self.accepted], self.block_size)


def to_host(state: DecodeState) -> DecodeState:
    """The state without its caches, as numpy copies: the device's buffers are donated to the next round."""
    return jax.tree.map(np.array, state._replace(target=None, context=None))
