"""The training program: answers, data, step, loop, checkpoints."""
