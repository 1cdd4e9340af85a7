"""Item: a CALL in the making, from `split_kernels` on."""

from __future__ import annotations

from dataclasses import dataclass, field

from manygrad.tensor.source import line_of
from manygrad.tensor.uop import GroupOp, Ops, UOp


@dataclass
class Item:
    """One CALL in the making. `reads` are (buffer, effects that must have happened); `writes` its buffers."""

    effect: UOp
    what: UOp
    args: list[UOp]
    writes: list[UOp]
    reads: list[tuple[UOp, frozenset[UOp]]]
    after: set[int] = field(default_factory=set)

    @property
    def line(self) -> str:
        return line_of(self.effect)

    @property
    def is_comm(self) -> bool:
        return self.what.op in GroupOp.COLLECTIVE


def kernels_of(call: UOp) -> tuple[UOp, ...]:
    """The kernels that a CALL runs."""
    what = call.src[0]
    if what.op in GroupOp.COLLECTIVE:
        return tuple(dict.fromkeys(k for body in what.src for inner in body.src for k in kernels_of(inner)))
    return what.src if what.op is Ops.CHAIN else (what,) if what.op is Ops.SINK else ()


def leaves_the_worker(what: UOp) -> bool:
    """Whether what is called is a collective in which other workers take part."""
    return what.op in GroupOp.COLLECTIVE and len(what.arg.members.mine) < len(what.arg.members.devices)
