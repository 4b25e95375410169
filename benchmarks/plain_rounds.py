"""What rounds cost in a program of several block sizes, beside programs of one: is 1 worth having among them?

    python benchmarks/plain_rounds.py DRAFTER [--dtype bfloat16] [--sizes 1 3 6] [--repeats 5]

Forces each size of the program by turns (`fixed`), over one row and over four: milliseconds a round.
`plain` and `B` are programs of one size. On XLA:CPU a round of one slot and one row copies its caches; with
`plain_rows 2` it computes two slots instead.
"""

import argparse
import statistics

from dscout_jax.decode import Decoder, fixed
from infer.load import load_decoder

TOKENS = 17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("drafter")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 3, 6])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    loaded, full = load_decoder(options.target, options.drafter, dtype=options.dtype)
    *smaller, largest = sorted(options.sizes)
    decoders = {f"plain, {rows} row(s) a sequence": full.plain(rows) for rows in (1, 2)}
    decoders |= {f"B={size} alone": full.resize(size) for size in (*smaller, largest) if size > 1}
    for rows in (1, 2):
        for i, size in enumerate((*smaller, largest)):
            name = f"B={size} of {tuple(sorted(options.sizes))}, plain_rows {rows}"
            decoders[name] = full.resize(largest, smaller=smaller, policy=fixed(i), plain_rows=rows)
    for count in options.rows:
        times: dict[str, list[float]] = {name: [] for name in decoders}
        for _ in range(options.repeats + 1):
            for name, decoder in decoders.items():
                times[name].append(_round_ms(decoder, count, loaded.config.vocab_size))
        print(f"{count} row(s):")
        for name, values in times.items():
            print(f"  {name}: {statistics.median(values[1:]):.2f} ms", flush=True)


def _round_ms(decoder: Decoder, rows: int, vocab: int) -> float:
    prompts = [[(7 * i + row) % (vocab - 1) for i in range(100)] for row in range(rows)]
    answers = decoder.generate(prompts, TOKENS, stop_ids=[[]] * rows)
    return answers[0].decode_seconds * 1e3 / max(answer.rounds for answer in answers)


if __name__ == "__main__":
    main()
