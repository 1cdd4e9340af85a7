"""compile_linear and run_linear: from a LINEAR to executors, and running them.

`pm_exec` chooses the executor of a CALL by what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.devices import Device
from manygrad.runtime.executors.items import (
    CopyItem,
    ExecItem,
    KernelItem,
    StagedKernelItem,
    Vars,
    ZeroItem,
    is_foreign,
    run_items,
    variable_names,
    writes_zeros,
)
from manygrad.runtime.storage import storage
from manygrad.schedule.facts.items import kernels_of
from manygrad.schedule.order.plan_memory import MemoryPlan
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DEBUG, FAILED_STEPS
from manygrad.tensor.source import line_of
from manygrad.tensor.storage import kept
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.show import show


class Recording:
    """Recording of a JIT. `outside`: tensors from before that are not computed; if a step that is recorded is about to
    overwrite what one of them reads, it is computed first, and that is no part of the step."""

    def __init__(self, outside: Iterable[Tensor], is_dry: bool = False) -> None:
        """`is_dry`: what is recorded is not run."""
        self.taken: list[tuple[list[ExecItem], Vars]] = []
        self.outside = {id(t): (t, t.uop) for t in outside}  # as long as the step does not give them another value
        self.is_paused = False
        self.is_dry = is_dry

    def holds(self, t: Tensor) -> bool:
        """Whether `t` is from outside and still what it was."""
        before = self.outside.get(id(t))
        return before is not None and (t.uop is before[1] or t.uop is kept(before[1]))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


capture: list[Recording] = []  # a JIT that is recording


class Arguments:
    """The Buffers of a LINEAR's arguments, for one run: PARAMs from outside, temporaries in freshly allocated pools.

    (A class, not nested functions that call themselves: those would keep the pools until a garbage collection.)
    """

    def __init__(self, linear: UOp, outside: list[UOp]):
        plan = linear.arg
        assert isinstance(plan, MemoryPlan)
        self.outside = outside
        pools = [Buffer(p.device, p.nbytes, dtypes.uint8) for p in plan.pools]
        self.where = {b.uid: (pools[b.pool], b.offset) for b in plan.buffers}
        self.temps: dict[UOp, Buffer] = {}

    def buffer_of(self, u: UOp) -> Buffer:
        if u.op is Ops.VIEW:
            return exec_view(u, self.buffer_of(u.src[0]))
        if u.op is Ops.PARAM:
            found = storage(self.outside[u.arg.uid])
            assert isinstance(found, Buffer)
            return found
        if u.op is Ops.MSELECT:
            parts = storage(self.outside[u.src[0].arg.uid])
            assert isinstance(parts, list)
            part = parts[u.arg]
            assert part is not None, "a buffer of another worker"
            return part
        if u not in self.temps:
            pool, offset = self.where[u.arg.uid]
            self.temps[u] = pool.view(numel(u.arg.shape), u.dtype, offset)
        return self.temps[u]


def exec_kernel(call: UOp, buffers: list[Buffer], plan: int) -> ExecItem:
    ast = call.src[0]
    device = buffers[0].device
    kernel = device.compile(ast)
    kind: type[KernelItem | StagedKernelItem] = ZeroItem if writes_zeros(ast) else KernelItem
    if any(is_foreign(b, device) for b in buffers):
        kind = StagedKernelItem
    return kind(ast, kernel, buffers, variable_names(ast), line_of(call))


def exec_chain(call: UOp, buffers: list[Buffer], plan: int) -> ExecItem:
    """Kernels block by block: one item, whose only variable is its own."""
    return KernelItem(call.src[0], buffers[0].device.compile(call.src[0]), buffers, (), line_of(call))


def exec_view(view: UOp, buffer: Buffer) -> Buffer:
    """A part of a buffer in place: resolved when the calls are made, nothing to run."""
    return buffer.view(numel(view.arg.shape), view.dtype, view.arg.offset * view.dtype.itemsize)


def exec_copy(call: UOp, buffers: list[Buffer], plan: int) -> ExecItem:
    return CopyItem(buffers[0], buffers[1], line_of(call))


def exec_collective(call: UOp, buffers: list[Buffer], plan: int) -> ExecItem:
    from manygrad.runtime.executors.collective import CollectiveItem

    return CollectiveItem(call.src[0], buffers, plan)


pm_exec: dict[Ops, Callable[[UOp, list[Buffer], int], ExecItem]] = {
    Ops.SINK: exec_kernel,
    Ops.CHAIN: exec_chain,
    Ops.COPY: exec_copy,
    **dict.fromkeys(GroupOp.COLLECTIVE, exec_collective),
}


def compile_linear(linear: UOp, outside: list[UOp], plan: int = 0) -> list[ExecItem]:
    """Executors for every CALL, in order; kernels without a binary are compiled.
    `plan`: the key of the communication with other workers."""
    arguments = Arguments(linear, outside)
    buffers = [[arguments.buffer_of(a) for a in call.src[1:]] for call in linear.src]
    kernels: dict[str, tuple[Device, list[UOp]]] = {}
    for call, passed in zip(linear.src, buffers):
        if found := kernels_of(call):
            kernels.setdefault(passed[0].device.kind, (passed[0].device, []))[1].extend(found)
    for device, asts in kernels.values():
        device.compile_all(asts)
    items = []
    for call, passed in zip(linear.src, buffers):
        if DEBUG >= 3:
            print(_shown(call.src[0]))
        items.append(pm_exec[call.src[0].op](call, passed, plan))
        for ast in kernels_of(call) if DEBUG >= 3 else ():
            kernel = passed[0].device.compile(ast)
            print(f"{kernel.name}: {' '.join(map(repr, kernel.opts)) or 'as written'}")
            if DEBUG >= 4:
                print(kernel.source)
    return _beside_each_other(items) if plan and not FAILED_STEPS.value else items


def _shown(what: UOp) -> str:
    if what.op not in GroupOp.COLLECTIVE:
        return show(what)
    from manygrad.collectives.show import show_calls

    return "\n  ".join([f"{what.op.name} {what.dtype.name}:", *show_calls(what.src[0], len(what.arg.members.mine))])


def _beside_each_other(items: list[ExecItem]) -> list[ExecItem]:
    from manygrad.runtime.executors.overlap import overlapped

    return overlapped(items)


def run_linear(items: list[ExecItem], vars: Vars, left: Iterable[ExecItem] | None = None) -> None:
    """Runs the executors; a recording JIT keeps them. `left`, an iterator of them,
    tells the caller how many had begun if one fails."""
    for recording in capture:
        if not recording.is_paused:
            recording.taken.append((items, vars))
            if recording.is_dry:
                return
    run_items(items if left is None else left, vars)
