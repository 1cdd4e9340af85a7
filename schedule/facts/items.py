"""Item: a CALL in the making, from `split_kernels` on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from manygrad.tensor.source import line_of
from manygrad.tensor.uop import GroupOp, Ops, UOp


@dataclass(frozen=True)
class Item:
    """One CALL in the making.

    `effects`: the graph's STOREs and CALLs that it carries out, first the one whose line errors name. `writes`: its
    buffers. `reads`: (buffer, effects that must have happened). `after`: keys of the items that come before it, from
    `order_items` on. A pass that changes an item keeps its key; one that joins items redirects the edges to them.
    """

    effects: tuple[UOp, ...]
    what: UOp
    args: list[UOp]
    writes: list[UOp]
    reads: list[tuple[UOp, frozenset[UOp]]]
    after: tuple[object, ...] = ()
    key: object = field(default_factory=object, repr=False, compare=False)

    @property
    def line(self) -> str:
        return line_of(self.effects[0])

    @property
    def is_comm(self) -> bool:
        return self.what.op in GroupOp.COLLECTIVE


def edges_of(members: Sequence[Item], joined: Mapping[object, object]) -> tuple[object, ...]:
    """Edges of the item that `members` become; `joined`: key of an item -> key of the one it has become."""
    own = {m.key for m in members}
    return tuple(dict.fromkeys(joined.get(a, a) for m in members for a in m.after if a not in own))


def kernels_of(call: UOp) -> tuple[UOp, ...]:
    """The kernels that a CALL runs."""
    what = call.src[0]
    if what.op in GroupOp.COLLECTIVE:
        return tuple(dict.fromkeys(k for body in what.src for inner in body.src for k in kernels_of(inner)))
    return what.src if what.op is Ops.CHAIN else (what,) if what.op is Ops.SINK else ()


def leaves_the_worker(what: UOp) -> bool:
    """Whether what is called is a collective in which other workers take part."""
    return what.op in GroupOp.COLLECTIVE and len(what.arg.members.mine) < len(what.arg.members.devices)
