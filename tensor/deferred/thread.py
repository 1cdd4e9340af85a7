"""The trace of this thread, as the rest of the program sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from manygrad.tensor.deferred.endings import end_with_step
from manygrad.tensor.deferred.trace import PUT_OFF, THREAD, begin, flush_writers
from manygrad.tensor.deferred.tree import TREES
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.tensor import Tensor


def flush_trace() -> bool:
    """Makes the calls that are put off, in all threads: something is about to be computed that may see what they write,
    or write what they read. Whether there were any."""
    if not PUT_OFF:  # (asked before each replay)
        return False
    waiting = [trace for trace in list(PUT_OFF.values()) if not trace.is_busy]
    for trace in waiting:
        trace.flush("something else is computed")
    return bool(waiting)


def end_trace() -> None:
    """A captured step runs: calls before it are made, and what this thread calls after it is another trace. (A loop
    that computes by a captured step alone has no other ending, and its trace would hold all inputs there ever were.)"""
    flush_trace()
    trace = THREAD.trace
    node = trace.node
    if (trace.is_off or node is not trace.tree.root) and not THREAD.is_inside:
        if not node.is_plain:  # (calls that lead here alone are made in any case, and sooner as they come)
            node.note_plain()
        begin(trace.tree)


@contextmanager
def at_once() -> Iterator[None]:
    """Calls inside are made as they come: what traces, captures or follows a function sees them all."""
    flush_trace()
    before, THREAD.is_inside = THREAD.is_inside, True
    try:
        yield
    finally:
        THREAD.is_inside = before


def forget_traces() -> None:
    """Forgets what was captured of loops, in all threads: it cannot be replayed any more."""
    flush_trace()
    for tree in list(TREES):
        tree.forget()
    begin(THREAD.trace.tree)  # (this one's nodes would be of no tree)


def step(
    optimizer: Any,
    prepare: Callable[[], Any],
    fn: Callable[[], Any],
    params: list[Tensor],
    memories: Callable[[], list[Tensor]],
) -> None:
    """A step of an optimiser ends this thread's trace, and is a part of it, but for what it does to `prepare`.
    `memories`: what it reads besides gradients."""
    if not FOLLOW or THREAD.is_inside:
        fn()
    else:
        flush_writers(THREAD.trace)
        end_with_step(THREAD.trace, optimizer, prepare, fn, params, memories)


__all__ = ["THREAD", "at_once", "end_trace", "flush_trace", "forget_traces", "step"]
