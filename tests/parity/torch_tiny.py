"""Tiny random targets of transformers, made on the spot."""

from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models

# The models are far too small for threads, and those of torch spin while they wait.
torch.set_num_threads(1)


def target(kind: str, tied: bool, vocab_size: int = 96, spread: float = 0.2) -> torch.nn.Module:
    """A random target in fp32: "qwen3", or "llama" with plain, "llama3" or "linear" RoPE.

    spread: of the weights; at 1 the argmax wanders and does not settle on one token.
    """
    torch.manual_seed(0)
    model = _build(kind, tied, vocab_size, spread).float().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:  # all ones would hide a norm that is left out
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def _build(kind: str, tied: bool, vocab_size: int, spread: float) -> torch.nn.Module:
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": spread,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": None,
    }
    if kind == "qwen3":
        config = transformers.Qwen3Config(
            **sizes, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
        )
        return transformers.Qwen3ForCausalLM(config)
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    if kind == "llama3":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": 4.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))


def write_tokenizer(folder: Path) -> None:
    """Three tokens: targets refuse a tokenizer that knows more ids than they do."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("ab")}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<end>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
