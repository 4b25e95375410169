"""The laboratory: a small target, its tokenizer and its prompts, all made on the spot."""
