"""Eight devices give the tokens of one."""

import jax.numpy as jnp
import numpy as np
import pytest
from decoding_tools import ANSWER, BLOCK_MAX, CAPACITY, check, oracle, puppeteer
from jax.sharding import PartitionSpec

from dscout_jax.decode import Proposals, Request, Sampling, block_draft, serve
from dscout_jax.sharding import make_mesh


@pytest.fixture(scope="module")
def sharded(build, drafter, drafter_params, prompts, answers):
    """The drafter drafts, and two positions of three are put right: a random one is hardly ever right."""

    def draft(block_size):
        own, played = block_draft(drafter, block_size), oracle(block_size)

        def both(weights, state):
            drafted, right = own(weights, state), played(weights, state)
            return Proposals(jnp.where(right.confidence > 0, right.ids, drafted.ids), drafted.confidence)

        return both

    decoder = build(drafter, drafter_params, draft=draft, mesh=make_mesh(data=4, tensor=2))
    return puppeteer(decoder, prompts, answers)(BLOCK_MAX, np.arange(CAPACITY) % 3 > 0)


def test_a_sharded_batch(sharded, prompts, answers, plain):
    mixed = [Sampling(), Sampling(), Sampling(), Sampling(0.8, seed=2)]
    state, _ = sharded.prefill(sharded.requests(prompts, ANSWER, sampling=mixed))
    assert state.target.k[0].sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
    assert state.context.v[0].addressable_shards[0].data.shape[:2] == (1, 1)
    weight = sharded.weights.target["layers_0"]["mlp"]["gate_proj"]["weight"]
    assert weight.addressable_shards[0].data.shape[0] == weight.shape[0] // 2
    generations = sharded.generate(prompts, ANSWER, sampling=mixed)
    for generation, answer in zip(generations[:3], answers[:3], strict=True):
        check(generation, answer, ANSWER)
        assert max(generation.accepted) >= 2 and min(generation.accepted) < BLOCK_MAX - 1
    [drawn] = plain.generate([prompts[3]], ANSWER, sampling=mixed[3], rows=len(prompts))
    assert generations[3].tokens == drawn.tokens


def test_a_sharded_queue(sharded, prompts, answers):
    """One prompt alone is prefilled whole on every group of devices, and put among the sharded rows."""
    requests = [Request(prompt, 1 + 3 * i) for i, prompt in enumerate([*prompts, prompts[0]])]
    for index, generation in serve(sharded, requests, slots=4):
        check(generation, answers[index % 4], 1 + 3 * index)
        assert index < 3 or max(generation.accepted) > 0
