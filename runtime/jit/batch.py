"""Makes fewer calls of what was recorded: runs of kernels as graphs, graphs and collectives beside each other."""

from __future__ import annotations

from collections.abc import Collection

from manygrad.runtime.current import current
from manygrad.runtime.devices.numbers import Variables
from manygrad.runtime.executors.items import ExecItem, GraphItem, KernelItem, Vars
from manygrad.tensor.environment import DETECT_ANOMALY, VALIDATE_WITH_CPU


def beside_each_other(flat: list[tuple[ExecItem, Vars]]) -> list[tuple[ExecItem, Vars]]:
    """A step may have been recorded in several realizes, each of which waits for its collectives at its end; a replay
    need not."""
    if current().communication.endpoint is None:
        return flat
    from manygrad.runtime.executors.overlap import StartItem, in_order, overlapped

    of = {id(i.item if isinstance(i, StartItem) else i): v for i, v in flat}
    items = overlapped(in_order([i for i, _ in flat]))
    return [(i, of.get(id(i.item if isinstance(i, StartItem) else i), {})) for i in items]


def joined_calls(items: list[ExecItem]) -> list[ExecItem]:
    """With graphs and collectives as native calls, where there are other workers."""
    if current().communication.endpoint is None:
        return items
    from manygrad.runtime.executors.joined import joined

    return joined(items)


def batch_kernels(flat: list[tuple[ExecItem, Vars]], asked: Collection[str] = ()) -> list[ExecItem]:
    """Runs of kernels on one kind of device become graphs, a single one too: a graph reads inputs where they lie.
    `asked`: the variables whose values each replay gives."""
    out: list[ExecItem] = []
    run: list[KernelItem] = []
    vars: Vars = {}
    variables: dict[frozenset[tuple[str, int]], Variables] = {}

    def close() -> None:
        nonlocal run
        if run and not (VALIDATE_WITH_CPU or DETECT_ANOMALY):
            known = variables.setdefault(frozenset(vars.items()), Variables(vars, asked))
            out.append(GraphItem(run, known))
        else:
            out.extend(run)
        run = []

    def fits(item: ExecItem) -> bool:
        return isinstance(item, KernelItem) and (
            item.buffers[0].device.queue.binds or set(item.names).isdisjoint(asked)
        )

    for item, v in flat:
        if not fits(item):
            close()
            out.append(item)
            continue
        assert isinstance(item, KernelItem)
        if run and not (item.buffers[0].device.kind == run[0].buffers[0].device.kind and dict(v) == dict(vars)):
            close()
        vars = v
        run.append(item)
    close()
    return out
