"""Counts in XLA's optimised HLO: what a compiled step runs and moves, without running it."""

import math
import re

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "s64": 8, "f64": 8}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+)\[([\d,]*)\]")
# What moves no bytes itself.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_HOST = re.compile(r"\b(?:infeed|outfeed|send|recv)\(|callback|MoveToHost|MoveToDevice")


def size_of(shape: str) -> int:
    """Bytes of a shape as HLO writes it; of a tuple the sum."""
    total = 0
    for dtype, dimensions in _SHAPE.findall(shape):
        numbers = math.prod(int(d) for d in dimensions.split(",") if d)
        total += numbers * (1 if dtype.startswith("f8") else _BYTES.get(dtype, 4))
    return total


def counts(text: str) -> dict[str, int]:
    """Count in the module's text.

    Returns:
        `kernels`: fusions and library calls that the step starts one by one; `bytes`: operands and
        results of all that it runs; `copies` and `copied_bytes`: of arrays above 16 KiB, so of
        parameters and their slots; `conditionals`, `loops` and `host_transfers` anywhere.
    """
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    sizes: dict[str, int] = {}
    found = dict.fromkeys(("kernels", "bytes", "copies", "copied_bytes"), 0)
    for line in entry.splitlines()[1:]:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, operation, rest = match.groups()
        sizes[name] = size_of(shape)
        if operation in _FREE:
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        found["bytes"] += sizes[name] + sum(sizes.get(o, 0) for o in operands)
        library = operation == "custom-call" and ("__cu" in rest or "__triton" in rest)
        if library or (
            operation == "fusion" and re.search(r"kind=k(?:Loop|Input|Output|Custom)", rest)
        ):
            found["kernels"] += 1
        # A TPU's copies into its vector memory, S(1), and out of it are how it loads and stores.
        moves = operation in ("copy", "copy-start") and "S(1)" not in shape
        if moves and sizes[name] > 2**14:
            found["copies"] += 1
            found["copied_bytes"] += sizes[name]
    found["conditionals"] = len(re.findall(r" conditional\(", text))
    found["loops"] = len(re.findall(r" while\(", text))
    found["host_transfers"] = len(_HOST.findall(text))
    return found


def collectives(text: str, name: str) -> list[int]:
    """Bytes of the results of each collective of a kind, such as "all-gather".

    A collective that XLA runs beside other work stands in the text once for each part of that work,
    every time with the same channel.
    """
    found: dict[str, int] = {}
    channels: dict[str, str] = {}  # of what is started in one place and done in another
    pattern = rf"%([\w.\-]+) = (\(.*?\)|\S+) {name}(-start|-done)?\(%?([\w.\-]*)(.*)"
    for instruction, shape, suffix, operand, rest in re.findall(pattern, text):
        channel = re.search(r"channel_id=(\d+)", rest)
        key = channels.get(operand, "") if suffix == "-done" else instruction
        key = channel.group(1) if channel else key
        channels[instruction] = key
        if suffix != "-start":
            found[key] = min(size_of(shape), found.get(key, 2**63))
    return list(found.values())
