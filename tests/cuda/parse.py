"""PTX as LLVM writes it, taken apart: parameters, memory, and basic blocks of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
ENDS = {"bra", "ret", "exit", "barrier", "bar", "brx", "trap"}


@dataclass
class Instruction:
    """`op`: the parts of its name; `args`: operands as text, {a, b} as a tuple."""

    op: tuple[str, ...]
    args: tuple[str | tuple[str, ...], ...]
    predicate: str | None = None
    negated: bool = False
    text: str = ""


@dataclass
class Module:
    """One kernel. `params`: (name, bytes); `memory`: name -> (space, offset) of what is declared; `blocks`: of
    instructions, each of which may only end with a branch, a barrier or an exit, and begin with an exchange."""

    name: str
    params: list[tuple[str, int]] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)  # prefix -> bytes; 0: predicates
    memory: dict[str, tuple[str, int]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=lambda: {"shared": 0, "local": 0, "global": 0})
    data: bytes = b""  # of global memory with values
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: tuple[int, ...] = (1, 1, 1)


def parse(text: str) -> Module:
    text = re.sub(r"//[^\n]*", "", text)
    functions = re.findall(r"\.func\b", text)
    if functions:
        raise NotImplementedError("a function that is called, in PTX")
    entry = re.search(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)\s*(.*?)\{(.*)\}", text, re.S)
    if entry is None:
        raise ValueError("no kernel in this PTX")
    name, params, directives, body = entry.groups()
    module = Module(name)
    for kind, param in re.findall(
        r"\.param\s+\.([a-z0-9]+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?(\w+)", params
    ):
        module.params.append((param, int(re.sub(r"\D", "", kind)) // 8))
    if found := re.search(r"\.(?:reqntid|maxntid)\s+([\d, ]+)", directives):
        sizes = [int(x) for x in found.group(1).split(",")]
        module.threads = (*sizes, 1, 1)[:3]
    _declarations(module, text[: entry.start()])
    _statements(module, body)
    return module


DECLARATION = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?(?:\s*=\s*\{([^}]*)\})?"
)


def _declarations(module: Module, text: str) -> None:
    for space, align, kind, name, count, values in DECLARATION.findall(text):
        size = int(re.sub(r"\D", "", kind)) // 8
        own = "global" if space == "const" else space
        at = -(-module.nbytes[own] // int(align or size)) * int(align or size)
        module.memory[name] = own, at
        module.nbytes[own] = at + size * int(count or 1)
        if own == "global":
            held = np.array([int(v, 0) for v in values.split(",")] if values else [0] * int(count or 1), UNSIGNED[size])
            module.data = module.data.ljust(at, b"\0") + held.tobytes().ljust(size * int(count or 1), b"\0")


def _statements(module: Module, body: str) -> None:
    block: list[Instruction] = []
    module.blocks.append(block)
    for raw in re.findall(r"\$?[\w]+:|[^;{}]*(?:\{[^}]*\}[^;{}]*)*;", body):
        line = " ".join(raw.split()).rstrip(";").strip()
        while found := re.match(r"(\$?\w+):\s*", line):
            block = []
            module.blocks.append(block)
            module.labels[found.group(1)] = len(module.blocks) - 1
            line = line[found.end() :]
        if not line:
            continue
        if line.startswith("."):
            if found := re.match(r"\.reg\s+\.(\w+)\s+%(\w+)<\d+>", line):
                kind, prefix = found.groups()
                module.registers[prefix] = 0 if kind == "pred" else int(re.sub(r"\D", "", kind)) // 8
            elif found := re.match(r"\.reg\s+\.(\w+)\s+%(\w+)$", line):
                kind, prefix = found.groups()
                module.registers[prefix] = int(re.sub(r"\D", "", kind)) // 8
            else:
                _declarations(module, line)
            continue
        one = _instruction(line)
        if one.op[0] == "shfl" and block:  # (threads wait for each other there)
            block = []
            module.blocks.append(block)
        block.append(one)
        if one.op[0] in ENDS:
            block = []
            module.blocks.append(block)


def _instruction(line: str) -> Instruction:
    found = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)$", line)
    if found is None:
        raise ValueError(f"not an instruction: {line}")
    negated, predicate, op, rest = found.groups()
    args: list[str | tuple[str, ...]] = []
    for group, one in re.findall(r"\{([^}]*)\}|([^,{}]+)", rest):
        if group:
            args.append(tuple(x.strip() for x in group.split(",")))
        elif one.strip():
            args.append(one.strip())
    return Instruction(tuple(op.split(".")), tuple(args), predicate, bool(negated), line)
