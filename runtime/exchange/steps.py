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

from manygrad.collectives.transport.endpoint import Endpoint
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
    # of the message of SEND, RECEIVE, RECEIVE_INTO: its peer, its number among those of the pair, its type; and whether
    # the peer does not read but write there, of SEND and SETTLE
    peer: int = -1
    number: int = -1
    dtype: str = ""
    is_written: bool = False
    of: int = -1
    source: int = -1
    kernel: Kernel | None = None
    places: tuple[int, ...] = ()

    @property
    def waits_for_readers(self) -> bool:
        """Not for those who write."""
        return self.kind == SETTLE and not self.is_written


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
            peer, number, is_written = what.arg
            sent[what.arg] = len(steps)
            name = f"send {nbytes} to {peer}"
            steps.append(ExchangeStep(SEND, name, at[0], nbytes, peer, number, what.dtype.name, is_written))
        elif what.op is Ops.RECEIVE:
            kind = RECEIVE_INTO if memory.places[at[0]].base is not None else RECEIVE
            received[at[0]] = len(steps)
            peer, number, _ = what.arg
            name = f"receive {nbytes} from {peer}"
            steps.append(ExchangeStep(kind, name, at[0], nbytes, peer, number, what.dtype.name))
        elif what.op is Ops.RELEASE:
            steps.append(ExchangeStep(RELEASE, "release", of=received.pop(at[0])))
        elif what.op is Ops.SETTLE:
            name = "wait for readers"
            steps += [ExchangeStep(SETTLE, name, of=sent[m], is_written=m.is_written) for m in what.arg]
        elif what.op is Ops.COPY:
            steps.append(ExchangeStep(COPY, f"copy {nbytes}", at[0], nbytes, source=at[1]))
        else:
            kernel = memory.places[at[0]].device.compile(what)
            steps.append(ExchangeStep(KERNEL, kernel.name, kernel=kernel, places=tuple(at)))
    return steps


class FarNumbers:
    """Numbers of the messages of a run between hosts: `reserved` and `expected`, how many go to each worker there and
    come from it; `first` and `first_in`, the numbers of this run's first ones. They are taken in the order in which
    exchanges begin."""

    def __init__(self, steps: Iterable[ExchangeStep], is_far: Callable[[int], bool]) -> None:
        sent = Counter(s.peer for s in steps if s.kind == SEND)
        got = Counter(s.peer for s in steps if s.kind in (RECEIVE, RECEIVE_INTO))
        self.reserved, self.expected = ({p: n for p, n in count.items() if is_far(p)} for count in (sent, got))
        self.there_are = bool(self.reserved or self.expected)
        self.first: dict[int, int] = {}
        self.first_in: dict[int, int] = {}

    def begin(self, endpoint: Endpoint) -> None:
        """Takes the numbers of a run."""
        for peer, count in self.reserved.items():
            self.first[peer] = endpoint.reserve(peer, count)
        for peer, count in self.expected.items():
            self.first_in[peer] = endpoint.expect(peer, count)


def sent_first(steps: Iterable[ExchangeStep], far: dict[int, int], most_nbytes: int) -> tuple[int, int]:
    """How many sends stand first, which may go out before collectives that began earlier are finished, and their bytes:
    between hosts, where messages are told apart by their numbers, and as much as every receiver grants, whatever it is
    waiting for."""
    first = list(takewhile(lambda s: s.kind == SEND and s.peer in far, steps))
    nbytes = sum(s.nbytes for s in first)
    return (len(first), nbytes) if nbytes <= most_nbytes else (0, 0)
