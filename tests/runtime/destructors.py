"""Destructors that use tensors, wherever a garbage collection may run them. It is no part of the tests' package:
`test_destructors.py` runs it as a program, which hangs where somebody holds a lock that they need, too."""

import faulthandler
import gc
import sys
import threading

import numpy as np

from manygrad import Tensor, TinyJit
from manygrad.collectives.transport.arena import Arena
from manygrad.runtime.devices import Devices

faulthandler.dump_traceback_later(200, exit=True)
wrong, ends, busy = list[float](), 0, threading.local()
arena = Arena(1 << 20)


class Cycle:
    """Garbage that is found by collections only, and makes the next one."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        global ends
        if getattr(busy, "is_inside", False) or ends >= ENDS:
            return
        busy.is_inside = True
        ends += 1
        work(2 * ends + 1)
        busy.is_inside = False
        Cycle()


def work(n: int) -> None:
    """Kernels that no other has are built, linked and loaded; a device is opened; memory is taken and given back."""
    x = Tensor(np.ones(n, np.float32)).realize()
    if (x * 2).sum().item() != 2 * n:
        wrong.append(n)
    if n % 8 < 2:
        step = TinyJit(lambda t: (t + 1).sum().realize())
        if [step(x).item() for _ in range(3)] != [2.0 * n] * 3:
            wrong.append(n)
        Devices().get(f"CPU:{n}")
    blocks = [arena.alloc(1000 * k) for k in range(1, 6)]
    for at in (*blocks[::2], *blocks[1::2]):
        arena.free(at)


ENDS = int(sys.argv[1])
gc.set_threshold(int(sys.argv[2]))
Cycle()
n = 0
while ends < ENDS:
    work(n := n + 2)
gc.set_threshold(700)
assert arena.used_nbytes == 0 and arena.alloc(arena.nbytes) == 0, arena._free.by_size
print("wrong:", wrong)
