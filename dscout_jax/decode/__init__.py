"""The jitted decoding loop: draft, verify, accept, commit."""

from dscout_jax.decode.adapt import Adaptive
from dscout_jax.decode.api import Decoder
from dscout_jax.decode.batch import Request
from dscout_jax.decode.draft import NO_TOKEN, Draft, block_draft, no_draft
from dscout_jax.decode.generation import Generation
from dscout_jax.decode.lookup import lookup_draft, lookup_or
from dscout_jax.decode.loop import extend_context, make_loop, make_round, prefill
from dscout_jax.decode.policy import Policy, fixed, greedy
from dscout_jax.decode.queue import serve
from dscout_jax.decode.sampling import Proposals, Sampling, seed_of
from dscout_jax.decode.state import Acceptance, DecodeState, Learnt, Weights
from dscout_jax.decode.stats import mat, mat_interval, prefix_survival, tau
from dscout_jax.decode.verify import Commit, accept

__all__ = [
    "NO_TOKEN",
    "Acceptance",
    "Adaptive",
    "Commit",
    "DecodeState",
    "Decoder",
    "Draft",
    "Generation",
    "Learnt",
    "Policy",
    "Proposals",
    "Request",
    "Sampling",
    "Weights",
    "accept",
    "block_draft",
    "extend_context",
    "fixed",
    "greedy",
    "lookup_draft",
    "lookup_or",
    "make_loop",
    "make_round",
    "mat",
    "mat_interval",
    "no_draft",
    "prefill",
    "prefix_survival",
    "seed_of",
    "serve",
    "tau",
]
