"""The compiled form of a collective's run: one worker's calls (`collectives/lower`) as numbered steps.

| kind | place | besides |
|---|---|---|
| SEND | what is sent | peer, message |
| RECEIVE | what is borrowed has its place here | peer, message |
| RECEIVE_INTO | whereto the message is copied | peer, message |
| RELEASE | | `of`: the step that received what is given back |
| SETTLE | | `of`: the step that sent what may be written again |
| COPY | whereto | `source`: the place that is copied |
| KERNEL | | kernel, and the places that it takes |

Two interpreters run them: Python's (`exchange.py`) has deadlines and errors, and serves links between hosts; native
code (`native_exchange.py`, `native/ir/exchange.ll`) does what goes well on one host. Both count steps alike, so what
the one began the other goes on with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from manygrad.native.exchange import COPY, KERNEL, RECEIVE, RECEIVE_INTO, RELEASE, SEND, SETTLE
from manygrad.runtime.devices import Kernel
from manygrad.runtime.exchange.memory import BoundMemory
from manygrad.tensor.uop import MessageArg, Ops, UOp

MESSAGES = (SEND, RECEIVE, RECEIVE_INTO)


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """See the table above. `name` is for a profile."""

    kind: int
    name: str
    place: int = -1
    nbytes: int = 0
    message: MessageArg | None = None  # of SEND, RECEIVE, RECEIVE_INTO, and the one of SETTLE
    dtype: str = ""
    of: int = -1
    source: int = -1
    kernel: Kernel | None = None
    places: tuple[int, ...] = ()

    @property
    def peer(self) -> int:
        assert self.message is not None
        return self.message.peer

    @property
    def number(self) -> int:
        """Number of the message among those of its pair."""
        assert self.message is not None
        return self.message.number

    @property
    def waits_for_readers(self) -> bool:
        """Not for those who write."""
        return self.kind == SETTLE and self.message is not None and not self.message.is_written


def compile_steps(body: UOp, memory: BoundMemory) -> list[ExchangeStep]:
    """The steps of a LINEAR of calls. Raises what the compilation of a kernel raises."""
    steps: list[ExchangeStep] = []
    sent: dict[MessageArg, int] = {}
    received: dict[int, int] = {}  # by the place of what is borrowed
    for call in body.src:
        what, *args = call.src
        at = [memory.numbers[a] for a in args]
        nbytes = memory.places[at[0]].nbytes if at else 0
        if what.op is Ops.SEND:
            m = what.arg
            sent[m] = len(steps)
            steps.append(ExchangeStep(SEND, f"send {nbytes} to {m.peer}", at[0], nbytes, m, what.dtype.name))
        elif what.op is Ops.RECEIVE:
            kind = RECEIVE_INTO if memory.places[at[0]].base is not None else RECEIVE
            received[at[0]] = len(steps)
            name = f"receive {nbytes} from {what.arg.peer}"
            steps.append(ExchangeStep(kind, name, at[0], nbytes, what.arg, what.dtype.name))
        elif what.op is Ops.RELEASE:
            steps.append(ExchangeStep(RELEASE, "release", of=received.pop(at[0])))
        elif what.op is Ops.SETTLE:
            steps += [ExchangeStep(SETTLE, "wait for readers", message=m, of=sent[m]) for m in what.arg]
        elif what.op is Ops.COPY:
            steps.append(ExchangeStep(COPY, f"copy {nbytes}", at[0], nbytes, source=at[1]))
        else:
            kernel = memory.places[at[0]].device.compile(what)
            steps.append(ExchangeStep(KERNEL, kernel.name, kernel=kernel, places=tuple(at)))
    return steps


def messages_of(steps: Iterable[ExchangeStep], kinds: tuple[int, ...], far: Callable[[int], bool]) -> dict[int, int]:
    """How many messages of such steps go to each worker of another host (`far`), or come from it."""
    count = Counter(s.peer for s in steps if s.kind in kinds)
    return {peer: n for peer, n in count.items() if far(peer)}


def sent_first(steps: Iterable[ExchangeStep], far: dict[int, int], most_nbytes: int) -> tuple[int, int]:
    """How many sends stand first, which may go out before collectives that began earlier are finished, and their bytes:
    between hosts, where messages are told apart by their numbers, and as much as every receiver grants, whatever it is
    waiting for."""
    first = list(takewhile(lambda s: s.kind == SEND and s.peer in far, steps))
    nbytes = sum(s.nbytes for s in first)
    return (len(first), nbytes) if nbytes <= most_nbytes else (0, 0)
