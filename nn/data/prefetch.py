"""Values computed ahead by background threads, handed out in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

from manygrad.tensor.lock import is_mine
from manygrad.tensor.threads import Threads


def prefetched(count: int, load: Callable[[int], Any], threads: int, ahead: int, timeout_s: float) -> Iterator[Any]:
    """load(0), load(1), ... load(count − 1), at most `ahead` of them before they are asked for.

    `load` runs in the modes (`Context`, `Tensor.train`) of the one who iterates. An error of `load` is raised where its
    value is due. TimeoutError if a value takes longer than timeout_s. When the iterator ends or is closed, the threads
    stop after what they are doing.
    """
    ready: dict[int, tuple[Any, BaseException | None]] = {}
    change = threading.Condition()
    state = {"next": 0, "taken": 0, "stop": False}

    def work() -> None:
        while True:
            with change:
                while not state["stop"] and state["next"] < count and state["next"] >= state["taken"] + ahead:
                    change.wait()
                if state["stop"] or state["next"] >= count:
                    return
                i = state["next"]
                state["next"] += 1
            try:
                result: tuple[Any, BaseException | None] = load(i), None
            except BaseException as error:  # whatever the dataset raises; it is raised in the consumer, in its turn
                result = None, error
            with change:
                ready[i] = result
                change.notify_all()

    def stop() -> None:
        with change:
            state["stop"] = True
            change.notify_all()

    workers = Threads()
    for n in range(threads):
        workers.start(f"manygrad-loader-{n}", copy_context().run, work, stop=stop)
    late = False
    try:
        for i in range(count):
            deadline = time.monotonic() + timeout_s
            with change:
                while i not in ready:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        late = True
                        raise TimeoutError(
                            f"batch {i} was not loaded within {timeout_s} s; look at what the dataset waits for, "
                            "or raise timeout_s"
                        )
                    change.wait(left)
                value, error = ready.pop(i)
                state["taken"] = i + 1
                change.notify_all()
            if error is not None:
                raise error
            yield value
    finally:
        # (a collection may end the iterator while this thread holds what the others wait for)
        workers.close(0.0 if late or is_mine() else timeout_s)
