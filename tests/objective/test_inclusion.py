"""Inclusion: which slots of which blocks are supervised, by every law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_tools import MASK, blocks_of

from dscout_jax.errors import UserError
from dscout_jax.objective import inclusion

LAWS = [
    inclusion.fixed(8),
    inclusion.mixed((2, 4, 6, 8)),
    inclusion.inverse((2, 4, 8)),
    inclusion.every(8),
    inclusion.nested((4, 8)),
]

REVEALS = [inclusion.no_unmasking, inclusion.prefix_unmasking(), inclusion.random_unmasking()]


def test_revealed_slots_show_their_token_and_the_rest_the_mask():
    tokens = np.arange(2 * 40).reshape(2, 40) % 60
    for unmask in REVEALS[1:]:
        blocks = blocks_of(tokens, np.ones((2, 40), bool), N=8, unmask=unmask)
        shown = np.asarray(blocks.revealed).copy()
        assert shown.any() and not shown[..., 0].any()
        shown[..., 0] = True
        at = np.asarray(blocks.anchors)[..., None] + np.arange(8)
        rows = np.arange(2)[:, None, None]
        expected = np.where(shown, tokens[rows, np.minimum(at, 39)], MASK)
        np.testing.assert_array_equal(np.asarray(blocks.inputs), expected)


@pytest.mark.parametrize(("rho", "beta"), [(0.5, 0.9), (0.25, 0.6)])
def test_prefix_unmasking_reveals_a_prefix_by_its_law(rho, beta):
    N, W, H = 80_000, 12, 10
    horizons = jnp.where(jnp.arange(N) % 2 == 0, H, 2)
    shown = np.asarray(inclusion.prefix_unmasking(rho, beta)(jax.random.key(3), horizons, W))
    lengths, slots = shown.sum(1), np.arange(W)
    np.testing.assert_array_equal(shown, (slots >= 1) & (slots <= lengths[:, None]))
    assert not shown[1::2].any()  # a block of two slots has none to show
    lengths = lengths[::2]
    assert abs((lengths > 0).mean() - rho) < 0.02
    law = beta ** np.arange(1.0, H - 1)
    found = np.bincount(lengths[lengths > 0], minlength=W)
    assert not found[H - 1 :].any()
    np.testing.assert_allclose(found[1 : H - 1] / found.sum(), law / law.sum(), atol=0.02)


def test_nested_horizons_share_their_anchor():
    blocks = blocks_of(
        np.zeros((3, 40), int), np.ones((3, 40), bool), N=9, horizon=inclusion.nested((2, 5, 8))
    )
    for anchors, horizons in zip(np.asarray(blocks.anchors), np.asarray(blocks.horizons), strict=True):
        assert len(set(anchors)) == 3
        for anchor in set(anchors):
            assert sorted(horizons[anchors == anchor]) == [2, 5, 8]


def test_labels_are_the_token_at_anchor_plus_slot():
    tokens = np.arange(2 * 40).reshape(2, 40) % 60
    blocks = blocks_of(tokens, np.ones((2, 40), bool), N=8)
    for b, n, k in np.ndindex(2, 8, 8):
        at = int(blocks.anchors[b, n]) + k
        assert blocks.labels[b, n, k] == (tokens[b, at] if at < 40 else 0)
    assert not blocks.mask[..., 0].any()
    np.testing.assert_array_equal(blocks.inputs[..., 0], blocks.labels[..., 0])
    assert (blocks.inputs[..., 1:] == MASK).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    law=st.sampled_from(LAWS),
    unmask=st.sampled_from(REVEALS),
    start=st.integers(0, 30),
    length=st.integers(0, 30),
)
def test_inclusion_laws(seed, law, unmask, start, length):
    answer = np.zeros((1, 32), bool)
    answer[0, start : start + length] = True
    blocks = blocks_of(np.arange(32)[None] + 1, answer, N=8, horizon=law, unmask=unmask, seed=seed)
    anchors, keep, mask = (np.asarray(x[0]) for x in (blocks.anchors, blocks.keep, blocks.mask))
    legal = [t for t in range(31) if answer[0, t] and answer[0, t + 1]]
    assert set(anchors[keep]) <= set(legal)
    if not law.nested:
        assert len(set(anchors[keep])) == keep.sum() == min(8, len(legal))
    for n, k in np.ndindex(8, 8):
        inside = anchors[n] + k < 32 and answer[0, anchors[n] : anchors[n] + k + 1].all()
        expected = keep[n] and 1 <= k < blocks.horizons[0, n] and not blocks.revealed[0, n, k] and inside
        assert mask[n, k] == expected
    assert not blocks.revealed[0, :, 0].any()
    assert (np.asarray(blocks.revealed[0]).sum(-1) <= np.maximum(np.asarray(blocks.horizons[0]) - 2, 0)).all()


def test_same_step_and_row_draw_the_same_blocks_in_any_batch():
    tokens, answer = np.arange(8 * 40).reshape(8, 40) % 60, np.ones((8, 40), bool)
    whole = blocks_of(tokens, answer, horizon=LAWS[1], unmask=REVEALS[1])
    part = blocks_of(tokens[4:], answer[4:], horizon=LAWS[1], unmask=REVEALS[1], row_ids=jnp.arange(4, 8))
    jax.tree.map(lambda w, p: np.testing.assert_array_equal(w[4:], p), whole, part)


@settings(max_examples=50, deadline=None)
@given(law=st.sampled_from(LAWS), budget=st.integers(40, 600))
def test_a_query_budget_is_spent_by_every_law_and_no_slot_more(law, budget):
    count = law.most(budget)
    horizons = law.spread(count)
    assert budget - 16 < horizons.sum() <= budget
    wanted = np.array(law.weights) / sum(law.weights) * count
    shares = [(horizons == choice).sum() for choice in law.choices]
    assert np.abs(shares - wanted).max() < 1
    groups = law.groups(count)
    assert [blocks.start for _, blocks in groups[1:]] == [blocks.stop for _, blocks in groups[:-1]]
    assert groups[0][1].start == 0 and groups[-1][1].stop == count and len(groups) <= 4
    assert all(width == horizons[blocks].max() for width, blocks in groups)


def test_short_answers_starve_no_horizon():
    tokens, answer = np.zeros((400, 40), int), np.arange(40) < 9
    blocks = blocks_of(tokens, np.broadcast_to(answer, (400, 40)), N=16, horizon=LAWS[1])
    kept = np.asarray(blocks.keep).reshape(400, 4, 4).sum((0, 2))
    assert kept.sum() == 400 * 8 and (np.abs(kept - 800) < 100).all()


def test_too_few_blocks_for_the_horizons_are_refused():
    with pytest.raises(UserError, match="2 blocks a row are too few"):
        inclusion.every(8).spread(2)


@pytest.mark.parametrize("unmask", [inclusion.no_unmasking, inclusion.prefix_unmasking(rho=1.0)])
def test_no_block_reaches_over_a_gap_in_the_answer(unmask):
    """Several turns, or documents, in a row: what lies behind a gap is another text's."""
    S, W = 40, 8
    answer = np.zeros((1, S), bool)
    answer[0, 4:12] = answer[0, 15:16] = answer[0, 20:37] = True
    tokens = np.arange(S)[None] % 60
    legal = set(np.flatnonzero(answer[0, :-1] & answer[0, 1:]))
    blocks = blocks_of(tokens, answer, N=S - 1, unmask=unmask, horizon=inclusion.fixed(W))
    anchors = np.asarray(blocks.anchors[0])[np.asarray(blocks.keep[0])]
    assert set(anchors) == legal and len(anchors) == len(legal)
    for n in np.flatnonzero(blocks.keep[0]):
        a = int(blocks.anchors[0, n])
        end = 12 if a < 12 else 37
        learnt, shown = (np.flatnonzero(part[0, n]) for part in (blocks.mask, blocks.revealed))
        assert all(a + k < end for k in [*learnt, *shown]) and len(learnt)
        hidden = [k for k in range(1, min(W, end - a)) if k not in shown]
        assert list(learnt) == hidden
    assert not np.asarray(blocks.mask[0])[~np.asarray(blocks.keep[0])].any()


def test_a_block_at_the_answers_end_keeps_a_slot_to_learn():
    answer = np.zeros((1, 30), bool)
    answer[0, 10:14] = True
    for unmask in (inclusion.prefix_unmasking(rho=1.0), inclusion.random_unmasking(rho=1.0, share=1.0)):
        blocks = blocks_of(np.ones((1, 30), int), answer, N=3, unmask=unmask)
        assert (np.asarray(blocks.mask)[np.asarray(blocks.keep)].sum(-1) >= 1).all()
        assert not np.asarray(blocks.revealed)[0, np.asarray(blocks.anchors)[0] == 12].any()
