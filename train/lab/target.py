"""The laboratory's target: a Qwen3-shaped model of two million weights, trained from scratch in minutes."""

import json
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import trange

from dscout_jax import ops
from dscout_jax.config import RopeConfig, TargetConfig
from dscout_jax.decode import Decoder
from dscout_jax.errors import UserError
from dscout_jax.interop import LoadedTarget, load_target, save_target
from dscout_jax.models import Target, target_head
from train.lab.records import Record, records
from train.regenerate import regenerate

END, PAD, MASK = "<|end|>", "<|pad|>", "<|mask|>"
TEMPLATE = "{{ messages[-1]['content'] + '\\n' }}"
SEQ = 288
PROMPTS, HELDOUT, TEXTS = 1, 2, 3  # seeds of the records


def make_lab(
    out: str | Path,
    *,
    steps: int = 450,
    batch: int = 16,
    learning_rate: float = 1.5e-2,
    prompts: int = 3072,
    heldout: int = 128,
    seed: int = 0,
) -> Path:
    """Makes `out/target` (a Hugging Face folder), prompts.jsonl, its answers.jsonl, and heldout.jsonl.

    What is there already is kept. Prints how good and how varied the held-out answers are.

    Raises:
        UserError: `out` is a file.
    """
    out = Path(out)
    if out.is_file():
        raise UserError(f"{out} is a file; name a folder")
    out.mkdir(parents=True, exist_ok=True)
    for name, count, stream in (("prompts", prompts, PROMPTS), ("heldout", heldout, HELDOUT)):
        rows = [
            {"id": f"{name}/{i}", "turns": [r.header]} for i, r in enumerate(islice(records(stream), count))
        ]
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not (out / "target").is_dir():
        train_target(out / "target", steps=steps, batch=batch, learning_rate=learning_rate, seed=seed)
    target = load_target(out / "target", jnp.float32)
    report = quality(target, list(islice(records(HELDOUT), 32)))
    (out / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    said = (
        "held-out answers: {alike:.0%} of the characters right, {exact:.0%} right throughout, "
        "{tokens:.0f} tokens, distinct-4 ratio {distinct4:.2f}"
    )
    print(said.format(**report))
    regenerate(
        target, out / "prompts.jsonl", out / "answers.jsonl", max_new_tokens=256, batch=min(96, prompts)
    )
    return out


def make_tokenizer(texts: Sequence[str], size: int = 512) -> Tokenizer:
    """Byte-level BPE of `size` ids, learnt from the texts, single digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(token, special=True, normalized=False) for token in (END, PAD, MASK)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_target(folder: Path, *, steps: int, batch: int, learning_rate: float, seed: int) -> None:
    """Next-token training on endless documents; the folder appears when it is whole."""
    stream = records(TEXTS)
    tokenizer = make_tokenizer([f"{r.header}\n{r.body}" for r in islice(stream, 2000)])
    ids = {token: tokenizer.token_to_id(token) for token in (END, PAD, MASK)}
    config = TargetConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        max_position=1024,
        qk_norm=True,
        tie_embeddings=True,
        eos_ids=(ids[END],),
    )
    model = Target(config)
    params = model.init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, max(1, steps // 20), steps)
    # AdamW needs far more steps until values are copied from the header.
    rates = [lambda step, most=most: most * schedule(step) for most in (learning_rate, learning_rate / 5)]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.contrib.muon(rates[0], adam_learning_rate=rates[1])
    )
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, tokens_BxS):
        def loss(params):
            hidden = model.apply({"params": params}, tokens_BxS).hidden[:, :-1]
            logits = ops.head_logits(hidden, target_head(params))
            real = tokens_BxS[:, 1:] != ids[PAD]
            costs = optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BxS[:, 1:])
            return (costs * real).sum() / real.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state_ = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state_, value

    bar = trange(steps, desc="lab target", disable=None)
    for _ in bar:
        rows = np.full((batch, SEQ), ids[PAD], np.int32)
        for row, record in zip(rows, stream, strict=False):
            text = [*tokenizer.encode(f"{record.header}\n{record.body}").ids[: SEQ - 1], ids[END]]
            row[: len(text)] = text
        params, opt_state, value = step(params, opt_state, rows)
        bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    special = {"eos_token": END, "pad_token": PAD, "mask_token": MASK}
    save_target(folder, config, params, tokenizer, {**special, "chat_template": TEMPLATE})


def quality(target: LoadedTarget, asked: Sequence[Record]) -> dict[str, float]:
    """How right and how varied greedy answers are.

    alike: characters in common with the document (difflib's ratio). exact: share equal to it.
    tokens: mean length. distinct4: different runs of four tokens over all runs of an answer, a mean over
    answers; near 0 where answers loop.
    """
    decoder = Decoder(Target(target.config), target.params, stop_ids=target.tokenizer.stop_ids)
    prompts = [target.tokenizer.chat([{"role": "user", "content": r.header}]) for r in asked]
    answers = decoder.generate(prompts, SEQ)
    texts = [target.tokenizer.decode(a.tokens) for a in answers]
    runs = [Counter(zip(*(a.tokens[i:] for i in range(4)), strict=False)) for a in answers]
    pairs = [(text, r.body) for text, r in zip(texts, asked, strict=True)]
    return {
        "alike": float(np.mean([SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs])),
        "exact": float(np.mean([text == body for text, body in pairs])),
        "tokens": float(np.mean([len(a.tokens) for a in answers])),
        "distinct4": float(np.mean([len(r) / max(1, r.total()) for r in runs])),
    }
