"""A corpus of kernels and of the instructions they are lowered to, to hold a change of code generation to: what was
meant to move code alone must leave every one of them as it was.

    python -m tests.runtime.codegen.corpus collect FOLDER benchmarks/gemm.py  # kernels that a script compiles
    python -m tests.runtime.codegen.corpus dump FOLDER  # before the change
    python -m tests.runtime.codegen.corpus compare FOLDER  # after it

For each kernel: the Opts chosen for four processors, and lists some random steps of the search away from them. A
dump keeps the lists and a digest of each program; `show FOLDER KERNEL NUMBER` prints one of them, for `diff`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import runpy
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram, show
from manygrad.runtime.codegen.opts import Opt, Opts, named, neighbours
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.serial import NotStorable, decode, encode
from manygrad.tensor.uop.uop import UOp

MACHINES = {
    "avx512": Machine(
        64,
        32,
        1 << 20,
        True,
        2,
        (Dot(dtypes.uint8, dtypes.int8, 64), Dot(dtypes.bfloat16, dtypes.bfloat16, 64)),
        4 << 10,
    ),
    "avx512 of many cores": Machine(64, 32, 2 << 20, True, 16),
    "avx2": Machine(32, 16, 512 << 10, False, 2, (), 4 << 10),
    "neon": Machine(16, 32, 1 << 20, False, 4, tuple(Dot(d, d, 16) for d in (dtypes.int8, dtypes.uint8))),
}
WALKS, STEPS = 3, 3  # random lists a kernel, and how many decisions away from what is chosen each ends


def collect(folder: Path, command: list[str]) -> None:
    """Runs a script; the kernels that this process compiles are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    record(folder)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent.absolute()))
    runpy.run_path(command[0], run_name="__main__")


def record(folder: Path) -> None:
    from manygrad.runtime.devices.compile import compiled, together

    found: dict[bytes, bytes] = {}

    def prepared(ast: UOp, *args: object, **kwargs: object) -> object:
        if ast.key not in found:
            try:
                found[ast.key] = encode(ast)
            except NotStorable:
                found[ast.key] = b""
        return prepare(ast, *args, **kwargs)  # type: ignore[arg-type]

    compiled.prepare = together.prepare = prepared  # type: ignore[assignment, attr-defined]

    def write() -> None:
        for key, data in found.items():
            path = folder / f"{key.hex()[:32]}.kernel"
            if data and not path.exists():
                path.write_bytes(data)

    atexit.register(write)


def kernel(folder: Path, name: str) -> UOp:
    return decode((folder / f"{name}.kernel").read_bytes())[0]


ORDERED = frozenset(
    (Low.LOOP, Low.IF, Low.ELSE, Low.END, Low.ACC, Low.GET, Low.SET, Low.LOAD, Low.STORE, Low.STREAM, Low.PREFETCH)
)


def digest(ast: UOp, machine: Machine, opts: Opts | None) -> tuple[Opts, str]:
    prepared = prepare(ast, machine, opts)
    return prepared.opts, canonical(prepared.program())


def canonical(program: LoweredProgram) -> str:
    """A digest in which only what has an effect, or sees one, has a place in its block: the order of mere arithmetic is
    the compiler's, and what nothing reads is gone."""

    def hashed(x: object) -> str:
        return hashlib.sha256(repr(x).encode()).hexdigest()[:20]

    names: dict[Inst, str] = {}
    blocks: list[list[str]] = [[]]
    needed = set[Inst]()
    for inst in reversed(program.insts):
        if inst in needed or inst.op in ORDERED - {Low.LOAD, Low.GET}:
            needed.update((inst, *inst.src))
    out: list[object] = [program.name, [(n.key, step) for n, step in program.parallel], program.scratch_bytes]
    for inst in (i for i in program.insts if i in needed):
        place = len(out) if inst.op in ORDERED else None
        names[inst] = hashed((inst.op.name, inst.dtype, inst.lanes, [names[s] for s in inst.src], inst.arg, place))
        if place is None:
            blocks[-1].append(names[inst])
            continue
        if inst.op in (Low.ELSE, Low.END):
            out.append(sorted(blocks.pop()))
        out.append(names[inst])
        if inst.op in (Low.LOOP, Low.IF, Low.ELSE):
            blocks.append([])
    return hashed((out, sorted(blocks.pop())))


def read(listed: list[Any]) -> Opt:
    """An Opt as a dump holds it."""
    kind, *values = listed
    return named(kind, *values)


def lists(folder: Path, name: str) -> list[tuple[str, list[list[Any]], str]]:
    """(processor, Opts, digest) of the programs of a kernel, Opts chosen here."""
    ast, rng, found = kernel(folder, name), random.Random(name), []
    for processor, machine in MACHINES.items():
        opts, text = digest(ast, machine, None)
        found.append((processor, [[o.kind, *o.values] for o in opts], text))
    machine = MACHINES["avx512"]
    sig = signature(prepare(ast, machine).ast)
    for _ in range(WALKS):
        opts = prepare(ast, machine).opts
        for _ in range(STEPS):
            near = neighbours(sig, opts, 16, sums_may_change=True)
            opts = rng.choice(near) if near else opts
        try:
            found.append(("avx512", [[o.kind, *o.values] for o in opts], digest(ast, machine, opts)[1]))
        except Exception as error:
            print(f"{name}: {opts}: {type(error).__name__}: {error}", flush=True)
    return found


def again(folder: Path, name: str, dumped: list[tuple[str, list[list[Any]], str]]) -> list[str]:
    """What differs now from a kernel's dump."""
    ast, wrong = kernel(folder, name), []
    for i, (processor, listed, before) in enumerate(dumped):
        opts = tuple(map(read, listed))
        try:
            chosen, text = digest(ast, MACHINES[processor], None if i < len(MACHINES) else opts)
        except Exception as error:
            wrong.append(f"{name} {i} ({processor}): {type(error).__name__}: {error}")
            continue
        if chosen != opts:
            wrong.append(f"{name} {i} ({processor}): chosen {list(chosen)}, before {list(opts)}")
        elif text != before:
            wrong.append(f"{name} {i} ({processor}): other instructions under {list(opts)}")
    return wrong


def main(command: str, folder: Path, *rest: str) -> int:
    names = sorted(p.stem for p in folder.glob("*.kernel"))
    began, report = time.monotonic(), folder / "dump.json"
    if command == "collect":
        collect(folder, list(rest))
        return 0
    if command == "show":
        processor, listed, _ = json.loads(report.read_text())[rest[0]][int(rest[1])]
        print(show(prepare(kernel(folder, rest[0]), MACHINES[processor], tuple(map(read, listed))).program()))
        return 0
    workers = int(rest[0]) if rest else os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        if command == "dump":
            dumped = dict(zip(names, pool.map(lists, [folder] * len(names), names, chunksize=8)))
            report.write_text(json.dumps(dumped))
            print(
                f"{len(names)} kernels, {sum(map(len, dumped.values()))} programs in {time.monotonic() - began:.0f} s"
            )
            return 0
        before = json.loads(report.read_text())
        wrong = [
            w for found in pool.map(again, [folder] * len(before), before, before.values(), chunksize=8) for w in found
        ]
        print("\n".join(wrong[:20]))
        print(
            f"{len(wrong)} of {sum(map(len, before.values()))} programs of {len(before)} kernels differ "
            f"({time.monotonic() - began:.0f} s)"
        )
        return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
