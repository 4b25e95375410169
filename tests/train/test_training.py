"""The training program on a tiny random target: what it learns, what it counts, how it resumes."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tokenizers import Tokenizer as Backend
from tokenizers import models

from dscout_jax.config import DrafterConfig, RopeConfig, TargetConfig
from dscout_jax.decode import Decoder
from dscout_jax.errors import UserError
from dscout_jax.initialise import init_drafter
from dscout_jax.interop.tokenizer import Tokenizer
from dscout_jax.models import Drafter, Target, embed, target_head
from dscout_jax.objective import auf, dflash, dpace, inclusion, published_dscout, weighting
from dscout_jax.objective.inclusion import HorizonLaw, prefix_unmasking, sample_blocks
from dscout_jax.objective.prediction import ce, kl, mixture, soft_ce, tv
from dscout_jax.objective.weighting import awl
from dscout_jax.sharding import BATCH, make_mesh
from train.dataset import Batch, batches, load_rows, stack
from train.evaluate import evaluate, make_hits, walk
from train.hosts import mesh_for
from train.log import Speed, record
from train.loop import _show_sample
from train.settings import TrainSettings
from train.step import (
    Frozen,
    first_state,
    learning_rate,
    make_features,
    make_optimizer,
    make_step,
    make_sums,
)

CONFIG = TargetConfig(48, 32, 64, 4, 4, 2, 8, 1e-6, RopeConfig(1e4), 256, False, False, (1,))
B, S = 8, 48


def make(block_size=4, objective=None, **options):
    settings = TrainSettings(
        objective=objective or dflash(block_size),
        data="",
        run="",
        block_size=block_size,
        seq_len=S,
        batch=B,
        **{"steps": 20, "init": "fresh", "chunk": 64, "num_anchors": 6} | options,
    )
    target = Target(CONFIG)
    params = target.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    # Larger weights than the initialiser's, so that the greedy continuations are not one token for ever.
    params = jax.tree.map(lambda w: w * 10 if w.ndim == 2 else w, params)
    shape = DrafterConfig.for_target(
        CONFIG, num_layers=2, block_size=block_size, mask_token_id=47, target_layer_ids=(0, 2)
    )
    return settings, target, params, Drafter(shape)


def start(settings, drafter, params):
    return first_state(settings, drafter.config, params, make_optimizer(settings))


def random_batch(seed=0, empty=False):
    rng = np.random.default_rng(seed)
    answer = np.zeros((B, S), bool)
    if not empty:
        for row in range(B):
            begin = rng.integers(2, 20)
            answer[row, begin : begin + rng.integers(3, 28)] = True
    return Batch(rng.integers(2, 46, (B, S)).astype(np.int32), answer, np.arange(B, dtype=np.int32))


def run_steps(settings, target, params, drafter, batch, count=1, state=None, mesh=None):
    step = make_step(drafter, settings, make_optimizer(settings), mesh)
    frozen = Frozen(params["embed_tokens"], target_head(params))
    features = make_features(target, drafter, False)(params, batch.tokens)
    arrays = (features, *batch)
    if mesh is not None:
        arrays = jax.device_put(arrays, NamedSharding(mesh, BATCH))
    state = state or start(settings, drafter, params)
    for i in range(count):
        state, metrics = step(state, frozen, settings.seed, (i + 1) / (settings.steps + 1), *arrays)
    return state, metrics, step


def test_accumulation_and_devices_give_the_same_gradients():
    batch = random_batch()
    results = []
    for accumulation, sharded in ((1, False), (2, False), (1, True)):
        setup = make(objective=published_dscout(4), accumulation=accumulation)
        state, metrics, _ = run_steps(*setup, batch, mesh=make_mesh(data=8) if sharded else None)
        results.append((metrics["loss"], metrics["grad_norm"], metrics["included"], state.params))
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), results[0], other)


def test_the_logged_figures_are_naive_sums():
    settings, target, params, drafter = make(objective=published_dscout(4))
    # Texts of three ids, which the head prefers: so that a fresh drafter hits now and then.
    batch = random_batch()
    batch = batch._replace(tokens=5 + batch.tokens % 3)
    few = np.isin(np.arange(48), (5, 6, 7))[:, None]
    params = params | {"lm_head": {"weight": params["lm_head"]["weight"] * np.where(few, 1.0, 0.05)}}
    head, learnt = target_head(params), start(settings, drafter, params).params
    _, metrics, _ = run_steps(settings, target, params, drafter, batch)
    line = json.loads(json.dumps(record(1, metrics, Speed(1, 1.0, None))))
    blocks = sample_blocks(
        jax.random.fold_in(jax.random.key(settings.seed), 0),
        *map(jnp.asarray, batch),
        num_anchors=6,
        block_size=4,
        mask_token_id=47,
        horizon=settings.objective.horizon,
        unmask=settings.objective.unmask,
    )
    taps = make_features(target, drafter, False)(params, batch.tokens).taps
    x = embed({"embed_tokens": params["embed_tokens"]}, blocks.inputs)
    hidden = drafter.apply({"params": learnt}, taps, x, blocks.anchors, blocks.horizons)
    logits, labels, mask = hidden @ head.T, np.asarray(blocks.labels), np.asarray(blocks.mask)
    q = np.asarray(jax.nn.softmax(logits))
    true = np.take_along_axis(q, labels[..., None], -1)[..., 0]
    hit = np.asarray(jnp.argmax(logits, -1)) == labels
    pull = np.linalg.norm((q - np.eye(48)[labels]) @ np.asarray(head), axis=-1)
    bare = ~np.asarray(blocks.revealed).any(-1)
    names = ("count", "weight", "loss", "pull", "hits", "reach", "bare", "alive")
    sums, total = {name: np.zeros(4) for name in names}, 0.0
    for b, n, k in zip(*np.nonzero(mask), strict=True):
        before = [j for j in range(k) if mask[b, n, j]]
        w = np.prod([0.5 * true[b, n, j] + 0.5 for j in before])
        total += w * -np.log(true[b, n, k])
        values = (1, w, -np.log(true[b, n, k]), w * pull[b, n, k], hit[b, n, k], bare[b, n])
        values += (bare[b, n] and hit[b, n, k], bare[b, n] and hit[b, n, [*before, k]].all())
        for name, value in zip(names, values, strict=True):
            sums[name][k] += value
    count, reach = np.maximum(sums["count"], 1), np.maximum(sums["reach"], 1)
    expected = {
        "included": sums["count"],
        "weight": sums["weight"] / count,
        "slot_loss": sums["loss"] / count,
        "gradient_share": sums["pull"] / sums["pull"].sum(),
        "accuracy": sums["hits"] / count,
        "bare_accuracy": sums["bare"] / reach,
        "survival": sums["alive"] / reach,
        "loss": total / sums["weight"].sum(),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(line[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    keep = np.asarray(blocks.keep)
    assert (line["blocks"], line["skipped_steps"]) == (keep.sum(), 0)
    assert line["queries"] == np.asarray(blocks.horizons)[keep].sum() < keep.sum() * 4
    assert 0 < sums["bare"].sum() < sums["hits"].sum() < sums["count"].sum()


def test_the_sample_shows_the_template_and_the_end_token(capsys):
    words = {"<|user|>": 0, "hi": 1, "<|end|>": 2, "yo": 3}
    backend = Backend(models.WordLevel(words, unk_token="hi"))
    backend.add_special_tokens(["<|user|>", "<|end|>"])
    row = Batch(np.array([0, 1, 3, 2, 1, 1]), np.array([0, 0, 1, 1, 0, 0], bool), np.int32(0))
    _show_sample(row, SimpleNamespace(tokenizer=Tokenizer(backend)))
    assert "<|user|> hi⟦yo <|end|>⟧\n" in capsys.readouterr().out


def test_chunks_of_anchors_change_nothing_but_the_memory():
    batch, found, peaks = random_batch(), [], {}
    for N, chunk in ((6, None), (48, None), (6, 2), (48, 2), (6, 4)):
        setup = make(
            objective=published_dscout(4), num_anchors=N, anchor_chunk=chunk, attention_chunk=chunk and 1
        )
        settings, target, params, drafter = setup
        if N == 6:
            state, metrics, _ = run_steps(*setup, batch)
            found.append((metrics, state.opt_state[1].mu))
        frozen, sums = Frozen(params["embed_tokens"], target_head(params)), make_sums(drafter, settings)
        features = jax.eval_shape(make_features(target, drafter, False), params, batch.tokens)
        grad = jax.jit(jax.grad(sums, has_aux=True))
        learnt = jax.eval_shape(lambda: start(settings, drafter, params).params)  # noqa: B023
        lowered = grad.lower(learnt, frozen, jax.random.key(0), features, *batch)
        peaks[N, chunk] = lowered.compile().memory_analysis().temp_size_in_bytes
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0], other)
    # What is left grows with the embeddings of the blocks and the rows of the head, not with their layers.
    assert peaks[48, 2] - peaks[6, 2] < (peaks[48, None] - peaks[6, None]) / 20


def test_blocks_computed_at_their_own_width_learn_what_full_blocks_do(monkeypatch):
    batch, found = random_batch(), []
    for most in (4, 2, 1):
        whole = HorizonLaw.groups
        with monkeypatch.context() as patch:
            patch.setattr(HorizonLaw, "groups", lambda law, N, most=most: whole(law, N, most))  # noqa: B023
            state, metrics, _ = run_steps(*make(objective=published_dscout(4)), batch)
        found.append((metrics, state.opt_state[1].mu))
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found[0], other)


def test_no_valid_anchor_and_non_finite_steps_change_nothing():
    settings, target, params, drafter = make()
    before = start(settings, drafter, params)
    kept = jax.tree.map(np.array, before.params)
    state, metrics, _ = run_steps(settings, target, params, drafter, random_batch(empty=True), state=before)
    assert metrics["loss"] == 0 and metrics["blocks"] == 0 and state.skipped == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, kept)
    broken = params | {"embed_tokens": {"weight": jnp.full_like(params["embed_tokens"]["weight"], jnp.nan)}}
    state = start(settings, drafter, params)
    state, metrics, _ = run_steps(settings, target, broken, drafter, random_batch(), state=state)
    assert state.skipped == 1 and metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, kept)


def test_masters_are_fp32_and_take_small_updates():
    settings, target, params, drafter = make(learning_rate=1e-6, warmup=0.0)
    drafter = Drafter(drafter.config, jnp.bfloat16)
    before = start(settings, drafter, params)
    kept = np.array(before.params["layers_0"]["mlp"]["up_proj"]["weight"])
    state, _, _ = run_steps(settings, target, params, drafter, random_batch(), state=before, count=2)
    after = state.params["layers_0"]["mlp"]["up_proj"]["weight"]
    assert after.dtype == jnp.float32
    assert (np.asarray(after) != kept).mean() > 0.9


def test_unlike_batches_compile_once():
    settings, target, params, drafter = make(objective=published_dscout(4))
    state = start(settings, drafter, params)
    step = make_step(drafter, settings, make_optimizer(settings))
    features = make_features(target, drafter, False)
    frozen = Frozen(params["embed_tokens"], target_head(params))
    for seed in range(5):
        batch = random_batch(seed)
        state, _ = step(state, frozen, settings.seed, 0.5, features(params, batch.tokens), *batch)
    assert step._cache_size() == 1


@pytest.fixture(scope="module")
def overfitted():
    """A drafter trained on one greedy answer, and that answer."""
    settings, target, params, drafter = make(steps=300, learning_rate=3e-3, num_anchors=32)
    prompt = [5, 9, 30, 7]
    answer = Decoder(target, params).generate([prompt], 40)[0].tokens
    tokens, mask = np.zeros(S, np.int32), np.zeros(S, bool)
    tokens[:44], mask[4:44] = prompt + answer, True
    row = Batch(tokens, mask, np.int32(0))
    state, _, _ = run_steps(settings, target, params, drafter, stack([row] * B), count=300)
    return target, params, drafter, state.params, prompt, answer, row


def test_one_overfitted_sequence_is_accepted_whole(overfitted):
    target, params, drafter, learnt, prompt, answer, _ = overfitted
    decoder = Decoder(target, params, drafter, learnt)
    result = decoder.generate([prompt], 40)[0]
    assert result.tokens == answer and len(set(answer)) > 10
    assert result.accepted == [3] * 9 + [2]


@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_walked_mat_equals_decoded_mat(overfitted, block_size):
    target, params, drafter, learnt, prompt, _, row = overfitted
    noisy = jax.tree.map(lambda w: w + 0.08 * jax.random.normal(jax.random.key(3), w.shape), learnt)
    result = Decoder(target, params, drafter, noisy, block_size=block_size).generate([prompt], 40)[0]
    taps = make_features(target, drafter, False)(params, row.tokens[None]).taps
    args = (noisy, Frozen(params["embed_tokens"], target_head(params)))
    table = np.asarray(make_hits(drafter, block_size, chunk=50)(*args, taps, row.tokens[None])[0])
    assert walk(table, row.answer) == result.accepted
    scores = evaluate([(row.answer, {block_size: table})])
    np.testing.assert_allclose(scores["mat"][str(block_size)], np.mean(result.accepted) + 1)
    assert 0 < sum(result.accepted) < 36


def test_init_from_the_target_copies_its_last_layers():
    _, _, params, drafter = make()
    made = init_drafter(drafter.config, jax.random.key(0), params, "target")
    last = params["layers_3"]["mlp"]["up_proj"]["weight"]
    np.testing.assert_array_equal(made["layers_1"]["mlp"]["up_proj"]["weight"], last)
    assert made["layers_1"]["self_attn"]["q_norm"]["weight"].shape == (8,)
    with pytest.raises(UserError, match="needs the target"):
        init_drafter(drafter.config, jax.random.key(0), None, "target")


def write_rows(path, count=20):
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for i in range(count):
            row = {"prompt_tokens": rng.integers(2, 46, 5).tolist(), "answer_tokens": [*range(2, 12 + i), 1]}
            file.write(json.dumps({"id": str(i)} | row) + "\n")


def test_rows_supervise_the_answer_and_its_end_token_and_iterate_exactly(tmp_path):
    write_rows(tmp_path / "a.jsonl")
    rows = load_rows(tmp_path / "a.jsonl", S, heldout=4)
    assert len(rows.train) == 16 and len(rows.heldout) == 4
    for row in rows.train:
        supervised = row.tokens[row.answer]
        assert supervised[0] == 2 and supervised[-1] == 1 and row.answer.sum() == 11 + row.row_ids
    first = batches(rows.train, 4, seed=3)
    for _ in range(5):
        next(first)
    state, ahead = first.get_state(), [next(first).row_ids for _ in range(5)]
    second = batches(rows.train, 4, seed=3)
    second.set_state(json.loads(json.dumps(state)))
    np.testing.assert_array_equal(ahead, [next(second).row_ids for _ in range(5)])
    with pytest.raises(UserError, match="none is left"):
        load_rows(tmp_path / "a.jsonl", S, heldout=20)


def test_held_out_prompts_are_not_trained_on_under_another_answer(tmp_path):
    write_rows(tmp_path / "a.jsonl")
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text + text.replace('"id": "', '"id": "1').replace('", "p', '#2", "p'))
    rows = load_rows(tmp_path / "a.jsonl", S, heldout=4)
    names = [json.loads(line)["id"].partition("#")[0] for line in (tmp_path / "a.jsonl").open()]
    train, heldout = ({names[row.row_ids] for row in part} for part in (rows.train, rows.heldout))
    assert len(rows.heldout) == 4 and not train & heldout
    assert len(train | heldout) == len(set(names))


def test_learning_rate_rises_and_comes_down_to_zero():
    settings, *_ = make(learning_rate=2.0, warmup=0.1)
    rates = [float(learning_rate(settings, p)) for p in (0.0, 0.05, 0.1, 0.55, 1.0)]
    np.testing.assert_allclose(rates, [0.0, 1.0, 2.0, 1.0, 0.0], atol=1e-6)


def test_contract_tells_options_of_an_objective_apart():
    def contract(**options):
        objective = dataclasses.replace(published_dscout(4), **options)
        return json.loads(json.dumps(make(objective=objective)[0].contract()["objective"]))

    assert contract() == contract()
    losses = [ce, soft_ce, kl, tv, mixture([(0.5, ce), (0.5, tv)]), mixture([(0.5, ce), (0.5, kl)])]
    losses.append(mixture([(0.4, ce), (0.5, kl)]))
    weights = [weighting.uniform, weighting.auf, weighting.confidence, weighting.dpace(0.1)]
    weights += [weighting.decay(), weighting.decay(2.0), weighting.first_error(), weighting.first_error(2.0)]
    weights += [weighting.first_error(extra=0.1)]
    weights += [
        awl(score, prefix, 0.5)
        for score in ("probability", "hit", "overlap")
        for prefix in ("exclusive", "inclusive", "suffix")
        if (score, prefix) != ("hit", "suffix")
    ]
    said = [contract(prediction=p, weighting=w) for p in losses for w in weights]
    laws = [inclusion.fixed(4), inclusion.mixed((2, 4)), inclusion.inverse((2, 4)), inclusion.nested((2, 4))]
    reveals = [inclusion.no_unmasking, prefix_unmasking(), inclusion.random_unmasking()]
    said += [contract(horizon=h, unmask=u, chain=c) for h in laws for u in reveals for c in (0.0, 0.1)]
    presets = [
        make(objective=preset(4))[0].contract()["objective"]
        for preset in (dflash, published_dscout, dpace, auf)
    ]
    for different in (said, presets, [preset | {"name": ""} for preset in presets]):
        assert len({json.dumps(each) for each in different}) == len(different)
    assert contract(weighting=awl(eps=0.25)) != contract(weighting=awl(eps=0.5)) == contract()
    assert contract(unmask=prefix_unmasking(rho=0.1)) != contract()
    assert contract(prediction=mixture([(0.5, ce), (0.5, tv)])) != contract(prediction=mixture([(0.5, ce)]))


def test_chunks_of_anchors_want_whole_weights():
    settings, target, _, drafter = make(anchor_chunk=2, mesh=(1, 8, 1))
    with pytest.raises(UserError, match="8 devices along fsdp"):
        mesh_for(settings, target.config, drafter.config)


def test_settings_refuse_what_does_not_fit():
    settings, *_ = make()
    for wrong in (
        {"steps": 0},
        {"draft_vocab": 9},
        {"accumulation": 3},
        {"objective": dflash(8)},
        {"num_anchors": 100},
        {"anchor_chunk": 0},
        {"query_budget": 24},
        {"num_anchors": None, "query_budget": 3},
        {"anchor_chunk": 2, "scan_layers": True},
    ):
        with pytest.raises(UserError):
            dataclasses.replace(settings, **wrong)
