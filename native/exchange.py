"""The calls of a collective over shared memory as tables, for one native call to run (`ir/exchange.ll`); and graphs of
kernels with such collectives between them, for one native call to run all of them (`ir/joined.ll`).

Python runs the same calls (`runtime/exchange/exchange.py`) and knows what to do when a peer is late, gone, or sends
something else; the native run does what goes well, and says at which step it stopped. Words are 64-bit integers and
addresses:

| table | words |
|---|---|
| run | steps, their count, addresses of places, sequence, spins and limit of a wait, arena's address, team, scratch |
| link | one peer's mailboxes, interest codes and arena, and the numbers of the next message out and in |
| step | kind; link, place, header, number; the step of the message; whereto; or a kernel, its places and its loop |
| all | rows, their count, the one at hand; where the last one stopped; what all have alike; addresses of counters |
| row | a graph's table and its jobs; or, with -1 jobs, a run, how often it ran, its text's number; what it counts |

The steps are those of `runtime/exchange/steps.py`, one row each. A header is that of `wire.py`, whose plan, sequence,
number and place are filled in.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from manygrad.native.additions import AMOUNT_WORDS, TEXT_BITS
from manygrad.native.compiler import compiler
from manygrad.native.processor import processor
from manygrad.native.sequence import constants
from manygrad.native.source import module, pause
from manygrad.native.words import WordLayout

SEND, RECEIVE, RECEIVE_INTO, RELEASE, SETTLE, COPY, KERNEL = range(7)
RUN = WordLayout(("STEPS", "STEP_COUNT", "PLACES", "SEQUENCE", "SPINS", "LIMIT", "ARENA", "TEAM", "SCRATCH"))
LINK = WordLayout(
    (
        *("OUT_TAIL", "OUT_ACKS", "OUT_SLOTS", "THEIR_BELL", "THEIR_INTEREST", "MY_TAIL", "MY_ACK"),
        *("IN_TAIL", "IN_ACKS", "IN_SLOTS", "MY_BELL", "MY_INTEREST", "CODE_TAIL", "CODE_ACK"),
        *("REMOTE_BASE", "REMOTE_NBYTES", "OUT_NUMBER", "IN_NUMBER"),
    )
)
ALL = WordLayout(
    (
        *("ROWS", "ROW_COUNT", "AT", "STOPPED", "STOP", "GRAPH", "ALL_SCRATCH", "ALL_SPINS", "ALL_LIMIT", "VARIABLES"),
        *("ENTERED", "SPENT_IN"),
    )
)
ROW = WordLayout(("TABLE", "JOBS", "COUNTER", "TEXT", "ADDITIONS", "ADDITION_COUNT"))
SPENT_COUNT = 4  # counters of seconds
STEP_WORDS = 8
# words of a step; the same one has another meaning for another kind
STEP = {
    "KIND": 0,
    **{"LINK": 1, "PLACE": 2, "HEADER": 3, "NUMBER": 4, "OF": 5, "NBYTES": 6, "TO": 7},
    **{"FUNCTION": 1, "BUFFERS": 2, "ARGS": 3, "COUNT": 4, "TOTAL": 5, "GRAIN": 6},
}
HEADER = {"AT_PLAN": 3, "AT_SEQUENCE": 4, "AT_NUMBER": 6, "AT_TOTAL": 7, "AT_OFFSET": 8}


class ExchangeFunctions(NamedTuple):
    """`exchange(run)` gives the step at which it stopped; `joined(all)` writes it, and the row, into its table."""

    exchange: Any
    joined: Any


@cache
def functions(ring: int, slot_nbytes: int, header_nbytes: int) -> ExchangeFunctions:
    """`ring`, a power of two, is how many messages a mailbox has slots for."""
    words = {**RUN.numbers, **LINK.numbers, **ALL.numbers, **ROW.numbers}
    text = module(
        "futex", "clock", pause(processor().architecture), "sequence", "words", "exchange", "additions", "joined",
        **constants(), **words, **STEP, **HEADER, RING=ring, LAST_SLOT=ring - 1, BEFORE=ring - 1,
        SLOT_NBYTES=slot_nbytes, HEADER_NBYTES=header_nbytes, STEP_WORDS=STEP_WORDS, ROW_WORDS=len(ROW), SEND=SEND,
        RECEIVE=RECEIVE, RECEIVE_INTO=RECEIVE_INTO, RELEASE=RELEASE, SETTLE=SETTLE, COPY=COPY, KERNEL=KERNEL,
        SPENT_COUNT=SPENT_COUNT, TEXT_BITS=TEXT_BITS, AMOUNT_WORDS=AMOUNT_WORDS,
    )  # fmt: skip
    at = compiler().functions(text, ExchangeFunctions._fields)
    return ExchangeFunctions(
        ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(at["exchange"]),
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at["joined"]),
    )
