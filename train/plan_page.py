"""A plan as a page, and what to change where it does not fit."""

from typing import Any

from train.settings import TrainSettings

_GIB = 2**30

_ASSUMPTIONS = """\
Memory, and which collectives there are, come from the compiler. Operations are counted from shapes: needed
ones leave out masked scores and recomputation, and MFU is theirs. The step time is a bound, not a
measurement: products at the chip's published bf16 peak, then fp32 scores and logits through its published
memory bandwidth; collectives, as rings at its published one-way interconnect bandwidth, hidden behind both.
Tokens are those of the sequences, padding included."""


def advice(settings: TrainSettings, mesh: dict[str, int]) -> str:
    """The next setting to change, the cheapest first, where a program does not fit."""
    rows = settings.batch // settings.accumulation // (mesh["data"] * mesh["fsdp"])
    if rows > 1:
        return f"{rows} rows a chip at a time: raise accumulation"
    if settings.remat == "none":
        return "set remat='layer': the backward pass then computes the draft layers again"
    if settings.attention_chunk is None or settings.attention_chunk > 16:
        return f"lower attention_chunk (now {settings.attention_chunk}) to 16"
    if settings.chunk > 256:
        return f"lower chunk (now {settings.chunk}) to 256"
    if not settings.scan_layers:
        return "set scan_layers=True: one layer's weights are then gathered at a time"
    if mesh["data"] > 1:
        return f"split the weights further: mesh (1, {mesh['data'] * mesh['fsdp']}, {mesh['tensor']})"
    if settings.remat == "layer":
        return "set remat='all'"
    return "lower num_anchors or seq_len, or take chips with more memory"


def page(record: dict[str, Any]) -> str:
    """The record of `train.plan.plan` as Markdown."""
    gib = lambda n: f"{n / _GIB:.2f} GiB"  # noqa: E731
    size = " x ".join(f"{name} {count}" for name, count in record["mesh"].items())
    verdict = {True: "fits", False: "does not fit", None: "compiles"}[record["fits"]]
    lines = [
        f"# {record['target']} on {record['topology']}: {verdict}",
        "",
        f"{record['chips']} chips ({size}), global batch {record['global_batch']}, sequence "
        f"{record['sequence']}, {record['anchors']} anchors x {record['block_size']}, "
        f"{record['draft_layers']} draft layers, {record['recipe']}, {record['dtype']}; remat "
        f"{record['remat']}, head chunk {record['chunk']}, attention chunk {record['attention_chunk']}, "
        f"anchor chunk {record['anchor_chunk']}.",
        "",
    ]
    if "compiler" in record:
        lines += [f"The compiler gave up: {record['compiler']}", ""]
    if "advice" in record:
        lines += [f"To make it fit: {record['advice']}.", ""]
    if record["peak_bytes"] is not None:
        names_ = ("arguments", "temporaries", "results", "resident", "peak")
        lines += [f"| per chip | {' | '.join(names_)} |", "|---" * 6 + "|"]
        for name, memory in record["memory"].items():
            lines.append(f"| {name} | {' | '.join(gib(memory[k]) for k in names_)} |")
        of = f" of {gib(record['hbm_bytes'])}" if record["hbm_bytes"] else ""
        lines += ["", f"Peak {gib(record['peak_bytes'])}{of}; resident is what a program does not use.", ""]
        lines += ["| collective | count | bytes sent by a chip |", "|---|---|---|"]
        for kind, found in record["collectives"].items():
            lines.append(f"| {kind} | {found['count']} | {gib(found['bytes'])} |")
        lines += [f"| all | | {gib(record['collective_bytes_per_chip'])} |", ""]
    parts = ", ".join(
        f"{name} {n / record['flops_per_step']:.0%}" for name, n in record["flops_by_part"].items()
    )
    lines += [
        f"{record['flops_per_step'] / 1e12:.0f} TFLOP a step needed ({parts}), "
        f"{record['flops_executed'] / 1e12:.0f} executed.",
        "",
    ]
    if "roofline" in record:
        r = record["roofline"]
        lines += [
            f"At best {r['step']:.3f} s a step (products {r['products']:.3f}, scores {r['scores']:.3f}, "
            f"network {r['network']:.3f} hidden behind them), MFU {r['mfu']:.0%}, "
            f"{r['tokens_a_day'] / 1e9:.1f} G tokens a day.",
            "",
        ]
    return "\n".join([*lines, _ASSUMPTIONS, ""])
