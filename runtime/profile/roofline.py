"""The machine's limits, measured: float32 multiply-adds of all threads, and bytes moved by a large copy.

`share(flops, nbytes, seconds)` is how much of the lower of both limits a kernel reaches: its roofline,
in DEBUG=2's last column.

    least seconds = max(flops / peak flops, bytes / peak bandwidth);   share = least seconds / seconds

Measured once for a machine and number of threads (about 0.3 s, the best of a few runs), then read from the disk cache.
Above 100%: the bytes came from a cache and not from memory, or the estimate counts operations that need not be done.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from manygrad.native.compiler import compiler
from manygrad.native.team import Team
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.cpu.threads import team, wanted_threads
from manygrad.runtime.devices.target import host_target

INNER = 4096  # multiply-adds of each accumulator in one index
COPY_BYTES = 96 << 20
LEAST_S = 2e-3  # a run of the multiply-adds is made at least so long
RUNS = 31  # over a tenth of a second: a processor may be away for one, and of two threads be one


class Peaks(NamedTuple):
    """Per second, all threads together."""

    flops: float
    bandwidth: float


def share(flops: int, nbytes: int, seconds: float, peaks: Peaks) -> float:
    """The part of the limit that is reached; 1.0 is all of it."""
    return max(flops / peaks.flops, nbytes / peaks.bandwidth) / seconds if seconds > 0 else 0.0


def peaks_of(kind: str) -> Peaks | None:
    """The limits of a kind of device; None where they are not measured."""
    return _peaks(wanted_threads()) if kind == "CPU" else None


@cache
def _peaks(threads: int) -> Peaks:
    kept = DiskCache("roofline")
    about = f"{platform.node()} {os.cpu_count()} {threads}".encode() + host_target().key + Path(__file__).read_bytes()
    key = hashlib.sha256(about).digest()
    found = kept.get(key)
    if found is not None:
        return Peaks(*json.loads(found))
    peaks = measure()
    kept.put(key, json.dumps(peaks).encode())
    return peaks


def measure() -> Peaks:
    """Runs both benchmarks on the thread team."""
    machine = host_target().machine
    lanes = machine.vector_bytes // 4
    accumulators = machine.registers // 2
    names = compiler().functions(module(machine), ["roofline_fma", "roofline_copy"])
    native = team()
    pieces = 4 * wanted_threads()
    each = 2 * lanes * accumulators * INNER

    def multiply(n: int) -> float:
        return _seconds(native, names["roofline_fma"], None, n, max(1, n // pieces))

    n = pieces
    while multiply(n) < LEAST_S:
        n *= 2
    flops = each * n / min(multiply(n) for _ in range(RUNS))
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    buffers = (ctypes.c_void_p * 2)(target.ctypes.data, source.ctypes.data)
    blocks = COPY_BYTES // machine.vector_bytes
    seconds = min(_seconds(native, names["roofline_copy"], buffers, blocks, blocks // pieces) for _ in range(RUNS))
    return Peaks(flops, 2 * COPY_BYTES / seconds)


def _seconds(
    native: Team, address: int, buffers: ctypes.Array[ctypes.c_void_p] | None, total: int, grain: int
) -> float:
    scratch = native.ready()
    start = time.perf_counter()
    native.run(address, buffers, None, total, grain, scratch)
    return time.perf_counter() - start


def module(machine: Machine) -> str:
    """LLVM IR of both loops. The multiply-adds: half of the registers are accumulators, none waits for another."""
    lanes, count = machine.vector_bytes // 4, machine.registers // 2
    vector = f"<{lanes} x float>"

    def lines(make: Callable[[int], str]) -> str:
        return "\n".join("  " + make(i) for i in range(count))

    def number(x: float) -> str:
        return f"<{', '.join([f'float {x:.2f}'] * lanes)}>"

    half, quarter = f"{vector} {number(0.5)}", f"{vector} {number(0.25)}"
    return f"""
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})

define void @roofline_fma(ptr %buffers, ptr %variables, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %indices = sub i64 %end, %begin
  %total = mul i64 %indices, {INNER}
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i1, %loop ]
{lines(lambda k: f"%a{k} = phi {vector} [ {number(k)}, %entry ], [ %b{k}, %loop ]")}
{lines(lambda k: f"%b{k} = call {vector} @llvm.fma.v{lanes}f32({vector} %a{k}, {half}, {quarter})")}
  %i1 = add i64 %i, 1
  %again = icmp slt i64 %i1, %total
  br i1 %again, label %loop, label %done
done:
{lines(lambda k: f"%p{k} = getelementptr {vector}, ptr %scratch, i64 {k}")}
{lines(lambda k: f"store {vector} %b{k}, ptr %p{k}, align {machine.vector_bytes}")}
  ret void
}}

define void @roofline_copy(ptr %buffers, ptr %variables, i64 %begin, i64 %end, ptr %scratch) {{
entry:
  %second = getelementptr ptr, ptr %buffers, i64 1
  %target = load ptr, ptr %buffers
  %source = load ptr, ptr %second
  br label %loop
loop:
  %i = phi i64 [ %begin, %entry ], [ %i1, %loop ]
  %from = getelementptr {vector}, ptr %source, i64 %i
  %to = getelementptr {vector}, ptr %target, i64 %i
  %x = load {vector}, ptr %from, align 4
  store {vector} %x, ptr %to, align 4
  %i1 = add i64 %i, 1
  %again = icmp slt i64 %i1, %end
  br i1 %again, label %loop, label %done
done:
  ret void
}}
"""
