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


_SECTOR = 64  # bytes that a GPU's memory hands out at once


def _computations(text: str) -> dict[str, list[re.Match]]:
    """The instructions of each computation, by its name; of the main one by "ENTRY"."""
    found: dict[str, list[re.Match]] = {}
    name = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = "ENTRY" if header.group(1) else header.group(2)
            found[name] = []
        elif name and (instruction := _INSTRUCTION.match(line)):
            found[name].append(instruction)
    return found


def _operands(instruction: re.Match) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.group(4).split("), ")[0])


def _sliced(instructions: list[re.Match], index: int) -> int | None:
    """Bytes that a fusion reads of an operand if it takes nothing but slices; None if it does."""
    names: set[str] = set()
    read = 0
    for instruction in instructions:
        name, shape, operation, rest = instruction.groups()
        if operation == "parameter" and rest.startswith(f"{index})"):
            names.add(name)
        elif not names.isdisjoint(_operands(instruction)):
            if operation in ("bitcast", "convert"):
                names.add(name)
            elif operation == "slice":
                last = rest.split("slice={")[1].split("}")[0].split("[")[-1].rstrip("]").split(":")
                stride = int(last[2]) if len(last) > 2 else 1
                size = _BYTES.get(_SHAPE.search(shape).group(1), 4)
                read += size_of(shape) // size * min(_SECTOR, stride * size)
            else:
                return None
    return read


def _moved(name: str, computations: dict[str, list[re.Match]]) -> int:
    """Bytes of operands and results of all that a computation runs; see `counts`."""
    sizes: dict[str, int] = {}
    moved = 0
    for instruction in computations[name]:
        result, shape, operation, rest = instruction.groups()
        sizes[result] = size_of(shape)
        if operation in _FREE:
            continue
        moved += sizes[result]
        if operation == "conditional":
            branches = re.search(r"branch_computations=\{(.*?)\}", rest)
            pair = re.findall(r"(?:true|false)_computation=%([\w.\-]+)", rest)
            names = re.findall(r"%([\w.\-]+)", branches.group(1)) if branches else pair
            moved += max(_moved(each, computations) for each in names)
            continue
        called = re.search(r"calls=%([\w.\-]+)", rest) if operation == "fusion" else None
        for index, operand in enumerate(_operands(instruction)):
            size = sizes.get(operand, 0)
            part = _sliced(computations[called.group(1)], index) if called else None
            moved += size if part is None else min(part, size)
    return moved


def counts(text: str) -> dict[str, int]:
    """Count in the module's text.

    Returns:
        `kernels`: fusions and library calls that the step starts one by one; `bytes`: operands and
        results of all that it runs, of a slice those that it touches, of a conditional those of the
        larger branch; `copies` and `copied_bytes`: of arrays above 16 KiB, so of parameters and
        their slots; `conditionals`, `loops` and `host_transfers` anywhere.
    """
    computations = _computations(text)
    found = dict.fromkeys(("kernels", "copies", "copied_bytes"), 0)
    found["bytes"] = _moved("ENTRY", computations)
    for instruction in computations["ENTRY"]:
        _, shape, operation, rest = instruction.groups()
        library = operation == "custom-call" and ("__cu" in rest or "__triton" in rest)
        if library or (
            operation == "fusion" and re.search(r"kind=k(?:Loop|Input|Output|Custom)", rest)
        ):
            found["kernels"] += 1
        # A TPU's copies into its vector memory, S(1), and out of it are how it loads and stores.
        moves = operation in ("copy", "copy-start") and "S(1)" not in shape
        if moves and size_of(shape) > 2**14:
            found["copies"] += 1
            found["copied_bytes"] += size_of(shape)
    found["conditionals"] = len(re.findall(r" conditional\(", text))
    found["loops"] = len(re.findall(r" while\(", text))
    found["host_transfers"] = len(_HOST.findall(text))
    return found


def collectives(text: str, name: str) -> list[int]:
    """Bytes of the results of each collective of a kind, such as "all-gather".

    A collective that XLA runs beside other work stands in the text once for each part of that work,
    every time with the same channel. Channel 1 is given to different collectives, such as those of
    `shard_map`: they are told apart by their shapes.
    """
    found: dict[str, int] = {}
    channels: dict[str, str] = {}  # of what is started in one place and done in another
    pattern = rf"%([\w.\-]+) = (\(.*?\)|\S+) {name}(-start|-done)?\(%?([\w.\-]*)(.*)"
    for instruction, shape, suffix, operand, rest in re.findall(pattern, text):
        channel = re.search(r"channel_id=(\d+)", rest)
        key = channels.get(operand, "") if suffix == "-done" else instruction
        if channel:
            key = f"1 {shape}" if channel.group(1) == "1" else channel.group(1)
        channels[instruction] = key
        if suffix != "-start":
            found[key] = min(size_of(shape), found.get(key, 2**63))
    return list(found.values())
