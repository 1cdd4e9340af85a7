"""Executors: one class for each kind of CALL, with everything resolved to run it again and again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from manygrad.errors import OutOfBoundsError
from manygrad.native.additions import Additions
from manygrad.native.replay import NativeCall
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.codegen.analysis.describe import estimate_at, signature, size_max
from manygrad.runtime.current import current
from manygrad.runtime.devices import Device, Kernel, get_device
from manygrad.runtime.devices.base import Graph
from manygrad.runtime.devices.compile.chain import written
from manygrad.runtime.devices.numbers import Variables
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import Counters, GlobalCounters
from manygrad.tensor.environment import DEBUG, DETECT_ANOMALY, VALIDATE_WITH_CPU
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.table import memo

Vars = Mapping[str, int]


def report(name: str, device: str, seconds: float, flops: int, nbytes: int, line: str) -> None:
    """One line of DEBUG=2; the last figure is the part of the machine's limit that was reached
    (`runtime/profile/roofline.py`)."""
    from manygrad.runtime.profile.roofline import peaks_of, share  # (it loads the compiler)

    GlobalCounters.time_sum_s += seconds
    rate = f"{flops / seconds * 1e-9:9.2f} GFLOPS {nbytes / seconds * 1e-9:8.2f} GB/s" if seconds > 0 else ""
    peaks = peaks_of(device.partition(":")[0]) if rate else None
    if peaks is not None:
        rate += f" {share(flops, nbytes, seconds, peaks):6.1%} of limit"
    print(f"*** {device:<8} {GlobalCounters.kernel_count:5d} {name:<40} {seconds * 1e6:10.2f} us {rate}  {line}")


class ExecItem:
    """`run(vars)` does the work; `line` is the user's source line."""

    line: str
    buffers: list[Buffer]

    track = "kernels"  # of a profile
    name = ""

    def allocate(self) -> None:
        """Its buffers have memory from now on."""
        for b in self.buffers:
            _ = b.handle

    def run(self, vars: Vars) -> None:
        raise NotImplementedError

    def run_profiled(self, vars: Vars) -> None:
        """`run`, told to the active profiles."""
        start = time.perf_counter()
        self.run(vars)
        profile.record(self.track, self.name, start, time.perf_counter(), self.facts())

    def wake(self) -> None:
        """It is about to run: what takes its time to wake may begin."""

    def facts(self) -> dict[str, Any]:
        """Facts for a profile."""
        return {"line": self.line}

    def native_call(self, vars: Vars) -> tuple[NativeCall, Additions] | None:
        """`run(vars)` as native code makes it in this thread, and what that counts besides; None where it needs
        Python."""
        return None

    def go_on(self, vars: Vars) -> None:
        """All that is left after a native call that stopped before its end."""
        raise NotImplementedError

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        """A function of the handle of other memory: it has the item read that instead of `buffer`, of which the item
        reads all or parts. None where that cannot be."""
        return None

    @property
    def written(self) -> list[Buffer]:
        """The buffers it writes."""
        return self.buffers[:1]


class KernelItem(ExecItem):
    """exec_kernel: one compiled kernel on its buffers."""

    def __init__(self, ast: UOp, kernel: Kernel, buffers: list[Buffer], names: Sequence[str], line: str):
        self.ast, self.kernel, self.buffers, self.names, self.line = ast, kernel, buffers, tuple(names), line
        self._facts: dict[str, Any] | None = None

    @property
    def written(self) -> list[Buffer]:
        return [self.buffers[i] for i in sorted(written(self.ast))]

    def values(self, vars: Vars) -> tuple[int, ...]:
        return tuple(vars[n] for n in self.names)

    def run_profiled(self, vars: Vars) -> None:
        self.run(vars)  # (told in _run: the kernel's own time)

    def facts(self) -> dict[str, Any]:
        """Loop and reduced sizes, arguments as `type[elements]`, estimated work, optimisations; made once."""
        if self._facts is None:
            k = self.kernel
            sigs = [signature(ast) for ast in (self.ast.src if self.ast.op is Ops.CHAIN else (self.ast,))]
            self._facts = {
                "line": self.line,
                "loops": [size_max(r) for sig in sigs for r in sig.loops],
                "reduces": [size_max(r) for sig in sigs for u in sig.reduces for r in u.src[1:]],
                "buffers": [f"{b.dtype.name}[{b.count}]" for b in self.buffers],
                "flops": k.flops,
                "bytes": k.nbytes,
                "opts": list(map(repr, k.opts)),
            }
        return self._facts

    def _count(self) -> None:
        GlobalCounters.kernel_count += 1
        GlobalCounters.ops += self.kernel.flops
        GlobalCounters.mem += self.kernel.nbytes

    def run(self, vars: Vars) -> None:
        try:
            self._run(vars)
        except OutOfBoundsError as error:
            raise OutOfBoundsError(f"{self.line}: {error}" if self.line else str(error)) from None

    def _run(self, vars: Vars) -> None:
        self._count()
        handles = [b.handle for b in self.buffers]
        if VALIDATE_WITH_CPU and self.buffers[0].device.kind not in ("PYTHON", "NULL"):
            self._run_validated(handles, vars)
        elif DETECT_ANOMALY and self.buffers[0].device.kind != "NULL":
            from manygrad.runtime.executors.anomaly import LookedAt  # (it loads the interpreter)

            values = self.values(vars)
            looked = LookedAt(self.ast, self.kernel.name, self.buffers, values, self.line)
            looked.run(lambda: self.kernel(handles, values))
        elif DEBUG >= 2 or profile.active:
            seconds = self.kernel(handles, self.values(vars), wait=True) or 0.0
            self.tell(time.perf_counter() - seconds, seconds, vars)
        else:
            self.kernel(handles, self.values(vars))

    def tell(self, start: float, seconds: float, vars: Vars) -> None:
        """The line of DEBUG=2, the event of a profile."""
        kernel, device = self.kernel, self.buffers[0].device.name
        if DEBUG >= 2:
            flops, nbytes = kernel.flops, kernel.nbytes
            if self.names and self.ast.op is Ops.SINK:  # (these are of the largest sizes)
                flops, nbytes = estimate_at(self.ast, tuple((n, vars[n]) for n in self.names))
            report(kernel.name, device, seconds, flops, nbytes, self.line)
        if profile.active:
            profile.record(f"kernels {device}", kernel.name, start, start + seconds, self.facts())

    def _run_validated(self, handles: list[Any], vars: Vars) -> None:
        """Runs here and on the PYTHON device; ValueError where the outputs differ."""
        before = [b.copyout() for b in self.buffers]
        self.kernel(handles, self.values(vars))
        oracle = get_device("PYTHON")
        kernel = oracle.compile(self.ast)
        twins = [Buffer("PYTHON", b.count, b.dtype).copyin(x) for b, x in zip(self.buffers, before)]
        kernel([t.handle for t in twins], self.values(vars))
        for slot in sorted(written(self.ast)):
            got, want = self.buffers[slot].copyout(), twins[slot].copyout()
            tolerance = (
                {8: 1e-9, 4: 1e-4, 2: 3e-2}.get(got.dtype.itemsize, 0.0) if self.buffers[slot].dtype.is_float else 0.0
            )
            a, b = (
                (got.astype(np.float64), want.astype(np.float64)) if self.buffers[slot].dtype.is_float else (got, want)
            )
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                worst = int(np.nanargmax(np.abs(a.astype(np.float64) - b.astype(np.float64))))
                raise ValueError(
                    f"kernel {self.kernel.name} ({self.line}) differs from the PYTHON device in argument {slot}: "
                    f"element {worst} is {a[worst]}, expected {b[worst]}; print its code with DEBUG=4, or run with "
                    "NOOPT=1 to see whether an optimisation is at fault"
                )


class ZeroItem(KernelItem):
    """A kernel that writes zeros and nothing else. Memory that has not been allocated yet need not be written: room for
    keys and values, say, takes as much as is used of it."""

    cleared = False  # its buffers hold zeros since they were allocated

    def allocate(self) -> None:
        cleared = [b.clear() for b in self.buffers]
        self.cleared = all(cleared)
        super().allocate()

    def _run(self, vars: Vars) -> None:
        if self.cleared:
            self.cleared = False
            self._count()
        else:
            super()._run(vars)


def writes_zeros(ast: UOp) -> bool:
    """Whether a kernel AST stores nothing but 0 (and not −0)."""
    values = [s.src[1] for s in ast.src]
    return all(v.op is Ops.CONST and v.arg == 0 and math.copysign(1, v.arg) > 0 for v in values)


class StagedKernelItem(ExecItem):
    """A kernel that reads memory of another device which its own cannot: copied to it before, each time.

    (A value that is computed from constants alone lies on one device, whoever reads it.)
    """

    def __init__(self, ast: UOp, kernel: Kernel, buffers: list[Buffer], names: Sequence[str], line: str):
        device = buffers[0].device
        twins = {b: Buffer(device.name, b.count, b.dtype) for b in buffers if is_foreign(b, device)}
        self.buffers, self.line, self.copies = buffers, line, [CopyItem(t, b, line) for b, t in twins.items()]
        self.kernel = KernelItem(ast, kernel, [twins.get(b, b) for b in buffers], names, line)
        assert not any(b in twins for b in self.written), f"kernel {kernel.name} writes memory of two devices"

    @property
    def written(self) -> list[Buffer]:
        return self.kernel.written

    def run(self, vars: Vars) -> None:
        run_items([*self.copies, self.kernel], vars)

    def run_profiled(self, vars: Vars) -> None:
        self.run(vars)  # (each tells of itself)


def is_foreign(b: Buffer, device: Device) -> bool:
    """Whether kernels of `device` cannot read `b` where it lies. (NULL reads nothing.)"""
    if b.device is device or device.kind == "NULL":
        return False
    return b.device.allocator.host is None or device.allocator.host is None


class CopyItem(ExecItem):
    """exec_copy: between devices of this worker."""

    def __init__(self, dst: Buffer, src: Buffer, line: str):
        self.buffers, self.line = [dst, src], line
        self.track = f"copies {dst.device.name}"
        self.name = f"copy {dst.nbytes} {src.device.name} -> {dst.device.name}"

    def facts(self) -> dict[str, Any]:
        return {"line": self.line, "bytes": self.buffers[0].nbytes}

    def run(self, vars: Vars) -> None:
        GlobalCounters.kernel_count += 1
        start = time.perf_counter()
        dst, src = self.buffers
        copy_buffer(dst, src)
        if DEBUG >= 2:
            report(self.name, dst.device.name, time.perf_counter() - start, 0, 2 * dst.nbytes, self.line)


class GraphItem(ExecItem):
    """exec_graph: a run of kernels as one native call, on fixed memory. Of their variables those that are asked for
    take the values of each run."""

    call: Graph

    def __init__(self, items: list[KernelItem], variables: Variables):
        self.items, self.line, self.variables = items, items[0].line, variables
        self.asked = any(n in variables.asked for i in items for n in i.names)
        self.buffers = [b for i in items for b in i.buffers]
        device: Device = items[0].buffers[0].device
        calls = [(i.kernel, [b.handle for b in i.buffers], variables.numbers(i.names)) for i in items]
        self.call = device.graph(calls)
        self.flops, self.nbytes = sum(i.kernel.flops for i in items), sum(i.kernel.nbytes for i in items)

    def run_profiled(self, vars: Vars) -> None:
        self.run(vars)

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        return self.call.mover(buffer.handle)

    def native_call(self, vars: Vars) -> tuple[NativeCall, Additions] | None:
        call = None if self.asked else self.call.native_call()
        return None if call is None else (call, Additions(self.amounts))

    @property
    def amounts(self) -> list[tuple[Counters, str, float]]:
        """Amounts that `count` counts."""
        amounts = {"kernel_count": len(self.items), "ops": self.flops, "mem": self.nbytes}
        return [(GlobalCounters, name, n) for name, n in amounts.items()]

    def wake(self) -> None:
        self.call.wake()

    def count(self) -> None:
        c = GlobalCounters
        c.kernel_count += len(self.items)
        c.ops += self.flops
        c.mem += self.nbytes

    def run(self, vars: Vars) -> None:
        self.count()
        if self.asked:
            self.variables.set(vars)
        if not (DEBUG >= 2 or profile.active):
            self.call()
            return
        stamps = self.call(timed=True)  # each kernel's time, from the native call itself
        assert stamps is not None
        for item, start, end in zip(self.items, stamps, stamps[1:]):
            item.tell(start, end - start, vars)


def run_items(items: Iterable[ExecItem], vars: Vars) -> None:
    try:
        if profile.active:
            for item in items:
                item.run_profiled(vars)
        else:
            for item in items:
                item.run(vars)
    except BaseException:
        current().communication.drain()
        raise


@memo
def variable_names(ast: UOp) -> list[str]:
    return sorted({u.arg.name for u in ast.toposort() if u.op is Ops.DEFINE_VAR})
