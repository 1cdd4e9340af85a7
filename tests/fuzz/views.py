"""Views, writes and reads in random order show what NumPy's views show, whether the storage is computed or not, sharded
or not, in a TinyJit or `@function` or out of it. A value that was read before a write keeps what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, function, set_grad_enabled
from manygrad.tensor.storage import PENDING

EXAMPLES = 80
ROWS, COLUMNS = 4, 6
DEVICES = ("CPU:0", "CPU:1")
FLAT = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)

BASES: list[tuple[Callable[[], Tensor], Callable[[], np.ndarray]]] = [
    (lambda: Tensor(FLAT.copy()), lambda: FLAT.copy()),
    (lambda: Tensor.zeros(ROWS, COLUMNS), lambda: np.zeros((ROWS, COLUMNS), np.float32)),
    # equal to the last: another storage
    (lambda: Tensor.zeros(ROWS, COLUMNS), lambda: np.zeros((ROWS, COLUMNS), np.float32)),
    (lambda: Tensor(FLAT.copy()) + 1, lambda: FLAT + 1),
    (lambda: Tensor.arange(ROWS * COLUMNS).float().reshape(ROWS, COLUMNS), lambda: FLAT.copy()),
    (
        lambda: Tensor(FLAT.copy()).sum(1, keepdim=True).expand(ROWS, COLUMNS) * 1,
        lambda: np.repeat(FLAT.sum(1, keepdims=True), COLUMNS, 1),
    ),
]


def _half(a: Any, k: int) -> Any:
    """A slice along the first dim, never empty."""
    return a[k % a.shape[0] :] if a.ndim else a


def _flat(a: Any, k: int) -> Any:
    return a.reshape(-1)


def _regrouped(a: Any, k: int) -> Any:
    n = int(np.prod(a.shape))
    d = [d for d in (1, 2, 3, 4) if n % d == 0][k % len([d for d in (1, 2, 3, 4) if n % d == 0])]
    return a.reshape(d, n // d)


def _bits(a: Any, k: int) -> Any:
    return a.view("int32") if isinstance(a, Tensor) else a.view(np.int32)


def _bytes(a: Any, k: int) -> Any:
    """(NumPy has no such view where the last dim does not lie in order: of the columns of all others.)"""
    return a.view("uint8") if isinstance(a, Tensor) else a.view(np.uint8)


VIEWS: list[Callable[[Any, int], Any]] = [
    _half,
    lambda a, k: a[k % a.shape[0]] if a.ndim else a,
    lambda a, k: a[..., : 1 + k % a.shape[-1]] if a.ndim else a,
    lambda a, k: a[..., k % a.shape[-1]] if a.ndim else a,
    lambda a, k: a.T if a.ndim == 2 else a,
    lambda a, k: a[:: 1 + k % 3] if a.ndim else a,
    lambda a, k: a[..., ::-1] if a.ndim else a,
    _flat,
    _regrouped,
    lambda a, k: a.detach() if isinstance(a, Tensor) else a[...],
    lambda a, k: a.data if isinstance(a, Tensor) else a[...],
    lambda a, k: a[None] if a.ndim < 3 else a,
    _bits,
    _bytes,
]
RESHAPES = _flat, _regrouped
COPIES: list[Callable[[Any], Any]] = [
    lambda a: a.clone() if isinstance(a, Tensor) else a.copy(),
    lambda a: a * 1,
    lambda a: a.rot90(0) if isinstance(a, Tensor) and a.ndim > 1 else a * 1,
    lambda a: a.narrow_copy(0, 0, a.shape[0]) if isinstance(a, Tensor) and a.ndim else a * 1,
    lambda a: a.flip(0) if isinstance(a, Tensor) and a.ndim else np.flip(a, 0).copy() if a.ndim else a * 1,
]
CONSTANTS = {"float32": (0, 1, -3, 7), "int32": (0, 1, 0x40000000), "uint8": (0, 63, 64)}


def _rows(a: Any, v: int) -> np.ndarray:
    """Four rows for `a`, each of one small number."""
    return (np.arange(4) + v % 8).reshape(4, *(1,) * (a.ndim - 1)) * np.ones(a.shape[1:])


WRITES: list[Callable[[Any, Any], Any]] = [
    lambda a, v: a.fill_(v) if isinstance(a, Tensor) else a.fill(v),
    lambda a, v: a.__setitem__(..., v),
    lambda a, v: a.assign(v) if isinstance(a, Tensor) else a.__setitem__(..., v),
    lambda a, v: a.__setitem__(0, v) if a.ndim else a.__setitem__(..., v),
    lambda a, v: a.__setitem__(slice(1, None), v) if a.ndim else a.__setitem__(..., v),
    lambda a, v: a.__setitem__([0, -1], v) if a.ndim else a.__setitem__(..., v),
    # the last value for a row stays
    lambda a, v: a.__setitem__([0, -1, 0, -1], _rows(a, v)) if a.ndim else a.__setitem__(..., v),
]
UPDATES: list[Callable[[Any, Any], Any]] = [  # arithmetic: not on bits
    lambda a, v: a.__iadd__(v + 1),  # (x + 0 is x: also where x is -0.0, which NumPy would make 0.0)
    lambda a, v: a.__imul__(-1),
    lambda a, v: a.assign(a * 2 - (v + 1)) if isinstance(a, Tensor) else a.__setitem__(..., a * 2 - (v + 1)),
    lambda a, v: a.__setitem__(slice(1, None), a[:-1] + (v + 1)) if a.ndim else a.__iadd__(v),
]


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    def step(kinds: list[str]) -> tuple[str, int, int, int]:
        return draw(st.sampled_from(kinds)), draw(st.integers(0, 9)), draw(st.integers(0, 19)), draw(st.integers(0, 7))

    return {
        "bases": draw(st.lists(st.integers(0, len(BASES) - 1), min_size=1, max_size=3)),
        "axis": draw(st.sampled_from([None, None, None, 0, 1])),
        "mode": draw(st.sampled_from(["plain", "plain", "jit", "function"])),
        "grad": draw(st.booleans()),
        "before": [
            step(["view", "view", "write", "copy", "realize", "forget", "read"]) for _ in range(draw(st.integers(0, 4)))
        ],
        "body": [
            step(["view", "write", "write", "update", "copy", "read", "transfer"])
            for _ in range(draw(st.integers(1, 6)))
        ],
    }


Value = Any  # a Tensor or the array that it is to equal
Step = Callable[[list[Value], list[Value]], None]  # over (values so far, what has been read)


def _planned(steps: list[tuple[str, int, int, int]], arrays: list[np.ndarray]) -> list[Step]:
    """The steps with their choices made (by the shapes, types and strides of the arrays),
    to be taken with tensors and arrays alike."""
    out: list[Step] = []
    pool, values = list(arrays), [a.copy() for a in arrays]
    for kind, which, i, k in steps:
        step = _step(kind, which % len(pool), i, k, pool)
        step(pool, [])
        out.append(step)
    for a, was in zip(arrays, values):
        a[...] = was
    return out


def _is_whole(b: np.ndarray, a: np.ndarray) -> bool:
    """Whether `b` is all of the memory that `a` is a view of, in order."""
    return (
        a.base is not None and b.flags.c_contiguous and (b is a.base or b.base is a.base) and b.nbytes == a.base.nbytes
    )


def _step(kind: str, at: int, i: int, k: int, pool: list[np.ndarray]) -> Step:
    a = pool[at]
    v = CONSTANTS[str(a.dtype)][k % len(CONSTANTS[str(a.dtype)])]
    number = a.dtype == np.float32
    if kind == "view":
        of = VIEWS[i % len(VIEWS)]
        if of in (_bits, _bytes) and (not number or not a.ndim or (of is _bytes and a.strides[-1] != 4)):
            of = _half
        if of in RESHAPES and not a.flags.c_contiguous and not any(_is_whole(b, a) for b in pool):
            of = _half  # a view that nobody holds the whole of lies on its own (docs/pytorch.md): a view, no copy
        if a.ndim == 1 and not isinstance(of(a, k), np.ndarray):  # NumPy gives a number, no view
            return lambda pool, reads: pool.append(pool[at][k % a.shape[0] : k % a.shape[0] + 1].reshape(()))
        return lambda pool, reads: pool.append(of(pool[at], k))
    if kind == "copy":
        copy = COPIES[i % len(COPIES)]
        return lambda pool, reads: pool.append(
            copy(pool[at]) if isinstance(pool[at], Tensor) else np.array(copy(pool[at]))
        )
    if kind == "write" or (kind == "update" and not number):
        write = WRITES[i % len(WRITES)]
        return lambda pool, reads: _ignore(write(pool[at], v))
    if kind == "update":
        update = UPDATES[i % len(UPDATES)]
        return lambda pool, reads: _ignore(update(pool[at], v))
    if kind == "transfer":
        fits = [j for j, b in enumerate(pool) if b.shape == a.shape and b.dtype == a.dtype]
        other = fits[i % len(fits)]
        return lambda pool, reads: _ignore(
            pool[at].copy_(pool[other])
            if isinstance(pool[at], Tensor)
            else pool[at].__setitem__(..., pool[other].copy())
        )
    if kind == "forget" and len(pool) > 1:
        return lambda pool, reads: _ignore(pool.pop(at))
    if kind == "realize":
        return lambda pool, reads: _ignore(pool[at].realize() if isinstance(pool[at], Tensor) else None)
    return lambda pool, reads: reads.append(pool[at] * 2 if number else pool[at] * 1)


def _ignore(x: Any) -> None:
    """(A step returns nothing.)"""


def check(program: dict[str, Any]) -> None:
    try:
        with Context(DEVICE="CPU"), set_grad_enabled(program["grad"]):
            _check(program)
    finally:
        for t in list(PENDING):
            PENDING.discard(t)


def _check(program: dict[str, Any]) -> None:
    tensors: list[Value] = []
    arrays: list[Value] = []
    for i in program["bases"]:
        t, a = (make() for make in BASES[i])
        tensors.append(t if program["axis"] is None else t.shard(DEVICES, program["axis"]))
        arrays.append(a)
    read: list[Value] = []
    expected: list[Value] = []
    for step in _planned(program["before"], arrays):
        step(tensors, read)
        step(arrays, expected)
    body = _planned(program["body"], arrays)

    def steps(x: Tensor) -> list[Tensor]:
        reads: list[Value] = [x + 1]
        pool = list(tensors)
        for step in body:
            step(pool, reads)
        return reads

    run: Any = {"jit": TinyJit, "function": function, "plain": lambda f: f}[program["mode"]](steps)
    for n in range(1 if program["mode"] == "plain" else 4):
        found = run(Tensor([float(n)]).realize())
        want: list[Value] = [np.array([n + 1.0], np.float32)]
        pool = list(arrays)
        for step in body:
            step(pool, want)
        for t, a in zip(found, want, strict=True):
            np.testing.assert_array_equal(t.numpy(), a)
    for t, a in zip([*tensors, *read], [*arrays, *expected], strict=True):
        np.testing.assert_array_equal(t.numpy(), a)
