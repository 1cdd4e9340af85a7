"""lower_collectives: a collective becomes the calls that carry it out on this worker.

Precondition: items in order. Postcondition: what a collective's item calls holds a LINEAR of its calls: SEND, RECEIVE,
RELEASE and SETTLE, COPY, and kernels that reduce; its arguments are the results, the sources, and the temporaries of
these calls.

    all_reduce (out, in)    ==>    all_reduce of (SEND in[2:3]; s = RECEIVE; out[0:2] = in[0:2] + s; ...) (out, in)

The calls are over PARAMs: equal collectives of one program share them, and their kernels. By which algorithm and in
which messages follows from the size and the links alone, which are the same on every worker (`collectives/lower`).
With SPEC=1 the calls of all workers are proved to carry it out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from manygrad.multi.world import World
from manygrad.schedule.facts.buffers import Temps
from manygrad.schedule.facts.items import Item
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import SPEC
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.track import made_from

if TYPE_CHECKING:
    from manygrad.collectives.lower import Body


def lower_collectives(items: list[Item], me: World, temps: Temps) -> list[Item]:
    bodies: dict[Any, Body] = {}
    return [_lowered(item, me, temps, bodies) if item.is_comm else item for item in items]


def _lowered(item: Item, me: World, temps: Temps, bodies: dict[Any, Body]) -> Item:
    body = _body(item.what, me, bodies)
    what = item.what.replace(src=(body.linear,))
    made_from(what, item.what, line=item.line)
    own = [temps.new((t.size,), t.dtype, t.device) for t in body.temps]
    return replace(item, what=what, args=[*item.args, *own], writes=[*item.writes, *own])


def _body(what: UOp, me: World, bodies: dict[Any, Body]) -> Body:
    from manygrad.collectives.lower import choose_for  # (a worker alone has no use for it)

    arg = what.arg
    key = (what.op, what.dtype, arg._replace(members=(arg.members.devices, arg.members.mine)))
    if key not in bodies:
        choice = choose_for(what, me, engine().on_host)
        bodies[key] = choice.body(arg.members.mine, engine().on_host)
        if SPEC:
            from manygrad.collectives.check_calls import prove

            prove(choice, engine().on_host)
    return bodies[key]
