"""Random programs of views, copies and writes in place, over state that stays from call to call: as they come, followed
and captured, against NumPy, whose views and copies are these. What a call gave is held, and looked at again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit

ROWS = 3


class Step(NamedTuple):
    """One of a random program; `i` and `j` are numbers of values."""

    kind: int
    i: int
    j: int
    number: float
    row: int


VALUES = 12  # kinds that give another value; the others write
KINDS = 24
READ = 23


def program(seed: int) -> list[Step]:
    rng, steps, count = np.random.default_rng(seed), list[Step](), 4
    for _ in range(rng.integers(3, 11)):
        i, j = (int(k) for k in rng.integers(count, size=2))
        steps.append(Step(int(rng.integers(KINDS)), i, j, float(rng.integers(-2, 4)), int(rng.integers(ROWS))))
        count += steps[-1].kind < VALUES
    return steps


def run(steps: Sequence[Step], values: list[Any], places: Any, reads: bool = True) -> list[Any]:
    """The values after `steps`; those of a Tensor have the names of NumPy, or of `As`."""
    for kind, i, j, number, row in steps:
        a, b = values[i], values[j]
        if kind == 0:
            values.append(a + b)
        elif kind == 1:
            values.append(a * number)
        elif kind == 2:
            values.append(a.T)
        elif kind == 3:
            values.append(a.reshape(ROWS * ROWS).reshape(ROWS, ROWS))
        elif kind == 4:
            values.append(a[:])
        elif kind == 5:
            values.append(a.detach() if isinstance(a, Tensor) else a[:])
        elif kind == 6:
            values.append(a.clone() if isinstance(a, Tensor) else a.copy())
        elif kind == 7:
            values.append(a.flip(0) if isinstance(a, Tensor) else a[::-1].copy())
        elif kind == 8:
            values.append((a > b).where(a, b) if isinstance(a, Tensor) else np.where(a > b, a, b))
        elif kind == 9:
            values.append(a.T.flatten() if isinstance(a, Tensor) else a.T.reshape(-1))
            values[-1] = values[-1].reshape(ROWS, ROWS)
        elif kind == 10:
            values.append(a[places])
        elif kind == 11:
            values.append(a[row:].sum() + a)
        elif kind == 12:
            a += b
        elif kind == 13:
            a *= 0.5
        elif kind == 14:
            a[:] = b
        elif kind == 15:
            a[row] = b[0]
        elif kind == 16:
            a[:, row] = number
        elif kind == 17:
            a[row:] = b[row:]
        elif kind == 18:
            a[:] = 0.0
        elif kind == 19:
            a[a > 0] = number
        elif kind == 20:
            t = a.T
            t += b.clone() if isinstance(b, Tensor) else b.copy()
        elif kind == 21:
            a[places] = b.clone() if isinstance(b, Tensor) else b.copy()
        elif kind == 22:
            a += number
        elif kind == READ and reads and isinstance(a, Tensor):
            a.tolist()
    return values[2:]


def overlapping(steps: Sequence[Step]) -> bool:
    """Whether a value may be written with another one of the same memory: NumPy copies, or does not, as it lies."""
    memory = list(range(4))
    for s in steps:
        if s.kind < VALUES:
            memory.append(memory[s.i] if s.kind in (2, 3, 4, 5, 9) else len(memory))
        elif s.kind in (12, 14, 15, 17) and memory[s.i] == memory[s.j]:
            return True
    return False


def results(steps: Sequence[Step], seed: int, make: Callable[[np.ndarray], Any], wrap: Callable[[Any], Any]) -> Any:
    """What every call gives, the state after it, and what all of them hold at the end."""
    rng = np.random.default_rng(seed)
    states = [make(rng.integers(-3, 4, (ROWS, ROWS)).astype(np.float64)) for _ in range(2)]
    call = wrap(lambda x, y, places: [*run(steps, [*states, x, y], places), x + y])  # (a capture computes something)
    found, held = [], []
    for _ in range(6):
        x, y = (make(rng.integers(-3, 4, (ROWS, ROWS)).astype(np.float64)) for _ in range(2))
        out = call(x, y, make(rng.permutation(ROWS)))
        held += out
        found.append([t.tolist() for t in (*out, *states, x, y)])
    return found, [t.tolist() for t in held]


def realized(a: np.ndarray) -> Tensor:
    return Tensor(a).realize()


@pytest.mark.parametrize("way", ["as they come", "followed", "captured"])
def test_random_programs(way: str) -> None:
    count = 0
    for seed in range(220):
        steps = [s for s in program(seed) if way != "captured" or s.kind != READ]
        if overlapping(steps):
            continue
        expected = results(steps, seed, np.copy, lambda f: f)
        with Context(FOLLOW=0) if way == "as they come" else nullcontext():
            make = realized if way == "captured" or seed % 2 else Tensor
            found = results(steps, seed, make, TinyJit if way == "captured" else lambda f: f)
        for k, (a, b) in enumerate(zip(found[0], expected[0])):
            assert a == b, (seed, k, steps)
        assert found[1] == expected[1], (seed, steps)
        count += 1
    assert count > 100
