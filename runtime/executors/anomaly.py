"""Looks at what a kernel has written (DETECT_ANOMALY): AnomalyError names the op that made NaN or infinity.

A kernel is run on its device. Where a result is not finite, the kernel is interpreted on what it had read
(`runtime/devices/python.py`), and from the element that is wrong the graph is walked down to the first op of which all
that it was applied to is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad.errors import AnomalyError
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.codegen.analysis.describe import evaluate_int
from manygrad.runtime.devices.compile.chain import block_variables, written
from manygrad.runtime.devices.python import COMBINE, Interpreter, PythonKernel
from manygrad.tensor.anomaly import INFINITY
from manygrad.tensor.environment import DETECT_ANOMALY
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.table import memo

Test = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class LookedAt:
    """A run of the kernel (or CHAIN) `ast`, whose results are looked at; `values` are those of its variables."""

    ast: UOp
    name: str
    buffers: list[Buffer]
    values: tuple[int, ...]
    line: str

    def run(self, kernel: Callable[[], object]) -> None:
        """Calls `kernel`; AnomalyError where it makes what is not finite."""
        read = loaded(self.ast)
        results = sorted(i for i in written(self.ast) if self.buffers[i].dtype.is_float)
        before = {i: b.copyout() for i, b in enumerate(self.buffers)}
        marked = {i: _mark(self.buffers[i], before[i]) for i in results if i not in read}
        kernel()
        after = {i: _unmark(self.buffers[i], before[i], marked.get(i)) for i in results}
        nodes = [u for k in kernels(self.ast) for u in k.toposort()]
        constants = [u.arg for u in nodes if u.op is Ops.CONST and isinstance(u.arg, float)]
        sources = [before[i] for i in read if self.buffers[i].dtype.is_float]
        for i in results if not any(map(np.isnan, constants)) else ():
            old = np.isnan(before[i]) if i in read else False
            if bad := int((np.isnan(after[i]) & ~np.asarray(old)).sum()):
                passed = any(np.isnan(x).any() for x in sources)
                raise AnomalyError(self._text("NaN", bad, after[i], passed, before, np.isnan))
        if DETECT_ANOMALY >= INFINITY and not any(map(np.isinf, constants)):
            for i in results if not any(np.isinf(x).any() for x in sources) else ():
                if bad := int(np.isinf(after[i]).sum()):
                    raise AnomalyError(self._text("infinity", bad, after[i], False, before, np.isinf))

    def _text(
        self, what: str, bad: int, result: np.ndarray, passed: bool, before: dict[int, np.ndarray], test: Test
    ) -> str:
        """`what` is in `bad` elements of a result; `passed`: it was in something that the kernel read."""
        maker = _maker(self.ast, before, self.values, test)
        line = self.line if self.line not in ("", "?") else "an unknown line"
        elements = f"{bad} of {result.size} {result.dtype.name}"
        where = f"at {line} (kernel {self.name} on {self.buffers[0].device.name}, {elements})"
        if passed and (maker is None or maker[0].op is Ops.LOAD):
            return (
                f"{what} was read {where}, from data or from what was computed before: look at its inputs, or begin "
                "detect_anomaly() earlier"
            )
        if maker is None:
            return f"{what} was made {where}; the interpreter gives finite numbers: compare with VALIDATE_WITH_CPU=1"
        u, operands, is_infinite = maker
        came = " came of infinity, which" if is_infinite and what == "NaN" else ""
        applied = f" of {', '.join(operands)}" if operands else ""
        advice = "clamp what it is applied to, or mask it before, not after"
        return f"{what}{came} was made by {u.op.name}{applied} {where}; {advice}"


def kernels(ast: UOp) -> tuple[UOp, ...]:
    return ast.src if ast.op is Ops.CHAIN else (ast,)


@memo
def loaded(ast: UOp) -> frozenset[int]:
    """The arguments of which a kernel, or CHAIN, reads elements, a chain's temporaries left out."""
    if ast.op is Ops.CHAIN:
        temps = {t.argument for t in ast.arg.temps}
        return frozenset(own[i] for kernel, own in zip(ast.src, ast.arg.slots) for i in loaded(kernel)) - temps
    nodes = ast.toposort()
    combined = {u.src[0].src[0].arg for u in nodes if u.op is Ops.STORE and u.arg in COMBINE}
    return frozenset({u.src[0].src[0].arg for u in nodes if u.op is Ops.LOAD} | combined)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def _mark(buffer: Buffer, old: np.ndarray) -> np.ndarray:
    """What is not finite in memory that will be written is that of others, or of nobody: it is replaced by a NaN that
    no kernel makes, so that it is seen afterwards which of it was written. Returns where."""
    found = ~np.isfinite(old)
    if found.any():
        marked = old.copy()
        _bits(marked)[found] = np.iinfo(_bits(marked).dtype).max
        buffer.copyin(marked)
    return found


def _unmark(buffer: Buffer, old: np.ndarray, marked: np.ndarray | None) -> np.ndarray:
    """What a kernel has written, with 0 where it has not; the rest of the memory gets its old values back."""
    new = buffer.copyout()
    if marked is None or not marked.any():
        return new
    untouched = marked & (_bits(new) == np.iinfo(_bits(new).dtype).max)
    if untouched.any():
        back = new.copy()
        back[untouched] = old[untouched]
        buffer.copyin(back)
        new[untouched] = 0
    return new


def _maker(
    ast: UOp, before: dict[int, np.ndarray], values: tuple[int, ...], test: Test
) -> tuple[UOp, list[str], bool] | None:
    """The op that makes the first wrong element of the kernel, what it is applied to, and whether it makes infinity."""
    memory = {i: a.copy() for i, a in before.items()}
    for kernel, slots, variables in _calls(ast, values):
        for interpreter in _blocks(PythonKernel(kernel), {i: memory[own] for i, own in enumerate(slots)}, variables):
            for store in interpreter.sig.stores:
                found = interpreter.values[store.src[1]]
                bad = test(found) if store.src[1].dtype.is_float else np.zeros(1, bool)
                if len(store.src[0].src) == 3:
                    bad = bad & interpreter.values[store.src[0].src[2]]
                if bad.any():
                    return _walk(interpreter, store.src[1], np.argwhere(bad)[0], test)
    return None


def _calls(ast: UOp, values: tuple[int, ...]) -> Iterator[tuple[UOp, tuple[int, ...], tuple[int, ...]]]:
    """(kernel, the arguments that are its own, its variables) in the order in which they run."""
    if ast.op is not Ops.CHAIN:
        yield ast, tuple(range(max(u.arg for u in ast.toposort() if u.op is Ops.PARAM) + 1)), values
        return
    for block in range(ast.arg.blocks):
        for kernel, own, variables in zip(ast.src, ast.arg.slots, block_variables(ast)):
            yield kernel, own, (block,) * len(variables)


def _blocks(kernel: PythonKernel, memory: dict[int, np.ndarray], vars: tuple[int, ...]) -> Iterator[Interpreter]:
    """The interpreter after each block of the kernel's iterations."""
    variables = dict(zip(kernel.sig.variables, vars, strict=True))
    by_name = {v.arg.name: n for v, n in variables.items()}
    interpreter = Interpreter(kernel.sig, kernel.axes, memory, variables)
    sizes = {r: evaluate_int(r.src[0], by_name) for r in kernel.axes}
    with np.errstate(all="ignore"):
        for starts, extent in kernel.blocks(sizes):
            interpreter.run(starts, extent)
            yield interpreter


def _walk(interpreter: Interpreter, u: UOp, at: np.ndarray, test: Test) -> tuple[UOp, list[str], bool]:
    """From an element that is wrong down to the op that made it; `at` has an index for each axis."""
    while True:
        sources, at = _sources(interpreter, u, at, test)
        below = [s for s in sources if s.dtype.is_float and test(_element(interpreter, s, at))]
        if not below:
            break
        u = below[0]
    if test is np.isnan:  # made of infinity, which was perhaps made here, too
        sources, there = _sources(interpreter, u, at, np.isinf)
        for s in sources:
            if s.dtype.is_float and np.isinf(_element(interpreter, s, there)):
                earlier = _walk(interpreter, s, there, np.isinf)
                if earlier[0].op not in (Ops.LOAD, Ops.CONST):
                    return earlier
    if u.op is Ops.REDUCE:
        x = interpreter.values[u.src[0]][_reduced(interpreter, u, at)]
        return u, [f"{x.size} elements, of {x.min()} to {x.max()}"], test is np.isinf
    return u, [f"{_element(interpreter, s, at)}" for s in sources], test is np.isinf


def _sources(interpreter: Interpreter, u: UOp, at: np.ndarray, test: Test) -> tuple[list[UOp], np.ndarray]:
    """The nodes of which element `at` of `u` is made, and where they are to be looked at: the branch that WHERE took, a
    wrong element of those that are reduced."""
    if u.op is Ops.LOAD:
        return [], at
    if u.op is Ops.WHERE:
        return [u.src[1] if _element(interpreter, u.src[0], at) else u.src[2]], at
    if u.op is Ops.REDUCE:
        axes = {interpreter.axes[r] for r in u.src[1:]}
        wrong = np.argwhere(test(interpreter.values[u.src[0]][_reduced(interpreter, u, at)]))
        if len(wrong):
            at = np.array([w if i in axes else j for i, (w, j) in enumerate(zip(wrong[0], at))])
        return [u.src[0]], at
    return [s for s in u.src if s in interpreter.values], at


def _reduced(interpreter: Interpreter, u: UOp, at: np.ndarray) -> tuple[slice, ...]:
    """Where the elements stand that a REDUCE makes its element `at` of."""
    axes = {interpreter.axes[r] for r in u.src[1:]}
    shape = interpreter.values[u.src[0]].shape
    first = [min(j, n - 1) for j, n in zip(at, shape)]
    return tuple(slice(None) if i in axes else slice(j, j + 1) for i, j in enumerate(first))


def _element(interpreter: Interpreter, u: UOp, at: np.ndarray) -> Any:
    x = interpreter.values[u]
    return x[tuple(min(i, n - 1) for i, n in zip(at, x.shape))]
