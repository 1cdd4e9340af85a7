"""`assert_equal` and `broadcast_`: for values that every rank must hold alike."""

from __future__ import annotations

from manygrad.runtime.agreement.agreement import digest, values_may_differ
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.storage import storage
from manygrad.tensor.source import user_line
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops


def assert_equal(*tensors: Tensor) -> None:
    """Raises `PlanMismatch` on every rank unless all ranks hold the same bits in `tensors`; every rank must call it.

    Each is a tensor on this worker's own device, or one replicated over `world.devices`. Cost: one pass over their
    memory and one answer of the launcher. In a process alone it does nothing. Raises ValueError for a tensor that is
    cut, whose parts differ by nature.
    """
    values = []
    for i, t in enumerate(tensors):
        _check_whole("assert_equal", t)
        held = t if t.realize().uop.op is Ops.BUFFER else t.clone().realize()
        values.append(
            (i, digest(_memory(held)), f"{t.dtype.name} {t.shape}, tensor {i} of assert_equal at {user_line()}")
        )
    communication = current().communication
    if current().world.size == 1 or communication.hooks is None:
        return
    n = communication.checks = communication.checks + 1
    communication.hooks.compare_values(f"assert_equal {n}", values)
    communication.hooks.make_plan(n, f"assert_equal of {len(tensors)} tensors at {user_line()}", "")()


def broadcast_(*tensors: Tensor, src: int = 0) -> None:
    """Overwrites `tensors` on every rank with what rank `src` holds; every rank must call it.

    Each is a tensor on this worker's own device, or one replicated over `world.devices`. Cost: one broadcast a tensor.
    """
    world = current().world
    if not 0 <= src < world.size:
        raise ValueError(f"broadcast_: src is {src}, but the ranks are 0..{world.size - 1}")
    if world.size == 1:
        return
    root = world.node_devices(src)[0]
    with values_may_differ():
        for t in tensors:
            _check_whole("broadcast_", t)
            t.realize()
            everywhere = t.detach() if isinstance(t.device, tuple) else t.detach().shard(world.devices)
            own = t.device if isinstance(t.device, str) else root.partition("@")[0]
            value = everywhere.to(root).to(own)
            t.detach().assign(value.shard(t.device) if isinstance(t.device, tuple) else value).realize()


def _check_whole(name: str, t: Tensor) -> None:
    from manygrad.tensor.engine import engine

    if isinstance(t.device, tuple) and engine().sharding_axis(t.uop) is not None:
        raise ValueError(
            f"{name}: a tensor of shape {t.shape} is cut over {len(t.device)} devices, its parts differ by nature; "
            "pass replicated or local tensors"
        )


def _memory(t: Tensor) -> Buffer:
    found = storage(t.uop)
    return found if isinstance(found, Buffer) else next(b for b in found if b is not None)
