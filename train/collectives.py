"""What a compiled program moves between devices, read from its text (XLA's HLO)."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_OPERATION = re.compile(rf"= (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_SHAPE = re.compile(r"\b(pred|[subf]\w*?(\d+)\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")
_PIECE = re.compile(r"channel_id=(\d+).*chain_id=")
_HEAD = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")


class Moved(NamedTuple):
    """Collectives of one kind in one run of a program: how many, and bytes that one device sends."""

    count: int
    bytes: float


def moved(text: str, devices: int) -> dict[str, Moved]:
    """Collectives by kind.

    Bytes are those of ring algorithms among g devices: (g - 1) / g of the larger side for a gather, a scatter
    and an exchange, twice that for a sum everywhere. What stands in a loop counts once an iteration; a loop's
    count is the one the compiler knows, or the constant that its condition compares with. A collective
    that the TPU compiler spreads over several fusions, to hide it, counts once, as often as its outermost
    piece runs.

    Args:
        text: `compiled.as_text()`. devices: that the program runs on.
    """
    bodies, entry = _computations(text)
    found: dict[str, Moved] = {}
    steps = [step for step in _walk(entry, bodies, 1) if _OPERATION.search(step[0])]
    outermost: dict[str, int] = {}
    for line, times, _ in steps:
        if piece := _PIECE.search(line):
            outermost[piece[1]] = min(times, outermost.get(piece[1], times))
    for line, times, place in steps:
        match = _OPERATION.search(line)
        if piece := _PIECE.search(line):
            if piece[1] not in outermost:
                continue
            times = outermost.pop(piece[1])
        kind, size, group = match["kind"], _bytes(match["type"]), _group(line, devices)
        if group == 1:
            continue
        if match["start"] and kind != "all-reduce":
            # The type of an asynchronous start holds what goes in beside what comes out.
            size *= {"all-gather": group / (group + 1), "reduce-scatter": group / (group + 1)}.get(kind, 0.5)
        elif kind == "reduce-scatter":
            size *= group
        if "all-reduce-scatter" in place:
            kind = "reduce-scatter"  # how the TPU compiler writes it: a sum fused with taking a slice
        share = 1.0 if kind == "collective-permute" else (group - 1) / group
        share *= 2 if kind == "all-reduce" else 1
        before = found.get(kind, Moved(0, 0.0))
        found[kind] = Moved(before.count + times, before.bytes + times * share * size)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Name -> lines of each computation, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = None
        elif name is not None:
            bodies[name].append(line)
    return bodies, entry


def _walk(name: str, bodies: dict[str, list[str]], times: int) -> Iterator[tuple[str, int, str]]:
    """(line, how often it runs, its computation) of a computation and of all it calls."""
    for line in bodies.get(name, ()):
        yield line, times, name
        calls = [(kind, re.findall(r"%([\w.\-]+)", target)) for kind, target in _CALLS.findall(line)]
        loops = _trips(line, dict(calls), bodies) if " while(" in line else 1
        for kind, targets in calls:
            for target in targets if kind != "condition" else ():
                yield from _walk(target, bodies, times * loops)


def _trips(line: str, calls: dict[str, list[str]], bodies: dict[str, list[str]]) -> int:
    if known := re.search(r"known_trip_count\D*(\d+)", line):
        return int(known[1])
    lines = [text for text, _, _ in _walk(calls["condition"][0], bodies, 1)]
    bounds = [int(n) for text in lines for n in re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)]
    return max(bounds, default=1)


def _bytes(shapes: str) -> int:
    total = 0
    for name, bits, dims in _SHAPE.findall(shapes):
        count = 1
        for size in filter(None, dims.split(",")):
            count *= int(size)
        total += count * (1 if name == "pred" else max(int(bits) // 8, 1))
    return total


def _group(line: str, devices: int) -> int:
    """Devices that take part together."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    return devices
