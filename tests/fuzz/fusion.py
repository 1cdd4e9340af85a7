"""Random programs give what NumPy gives, however they are cut into kernels: shared values, reductions of reductions,
gathers, joins and padding in one graph, several outputs, parts of it computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor

EXAMPLES = 250
N = 4  # every value is (N, N): any op fits any value
ROWS = np.array([2, 0, 3, 3])
Op = tuple[Callable[..., Any], Callable[..., Any]]

UNARY: list[Op] = [
    (lambda t: t * 2 - 1, lambda a: a * 2 - 1),
    (lambda t: t.tanh(), np.tanh),
    (lambda t: t.relu(), lambda a: np.maximum(a, 0)),
    (lambda t: t.T, lambda a: a.T),
    (lambda t: t.flip(0), lambda a: a[::-1]),
    (
        lambda t: t.reshape(2, 2 * N).reshape(2, 2, N).permute(1, 0, 2).reshape(N, N),
        lambda a: a.reshape(2, 2, N).transpose(1, 0, 2).reshape(N, N),
    ),
    (lambda t: t.pad((1, 0))[:, :N], lambda a: np.pad(a, ((0, 0), (1, 0)))[:, :N]),
    (lambda t: t[1:].cat(t[:1]), lambda a: np.roll(a, -1, 0)),
    (lambda t: t[Tensor(ROWS)], lambda a: a[ROWS]),
    (lambda t: t.sum(1, keepdim=True).expand(N, N), lambda a: np.broadcast_to(a.sum(1, keepdims=True), (N, N))),
    (lambda t: t - t.amax(0, keepdim=True), lambda a: a - a.max(0)),
    (lambda t: t.softmax(1), lambda a: (e := np.exp(a - a.max(1, keepdims=True))) / e.sum(1, keepdims=True)),
    (lambda t: t / (t.square().sum() + 1), lambda a: a / ((a * a).sum() + 1)),
    (lambda t: t.contiguous(), lambda a: a),
    (lambda t: t.cumsum(1) * 0.5, lambda a: a.cumsum(1) * 0.5),
    (lambda t: t.tril(), np.tril),
    (lambda t: (t > 0).where(t, -0.5), lambda a: np.where(a > 0, a, -0.5)),
    (
        lambda t: t.unfold_windows((2,), (1,), (1,)).amax(-1).pad((0, 1)),
        lambda a: np.pad(np.maximum(a[:, 1:], a[:, :-1]), ((0, 0), (0, 1))),
    ),
]
BINARY: list[Op] = [
    (lambda s, t: s + t, np.add),
    (lambda s, t: s * t, np.multiply),
    (lambda s, t: (s @ t) * 0.25, lambda a, b: (a @ b) * 0.25),
    (lambda s, t: s.maximum(t), np.maximum),
    (lambda s, t: s[:2].cat(t[2:]), lambda a, b: np.concatenate([a[:2], b[2:]])),
    (lambda s, t: s - t.mean(0, keepdim=True), lambda a, b: a - b.mean(0)),
    (
        lambda s, t: s.sum(1, keepdim=True) * t.sum(0, keepdim=True) * 0.1,
        lambda a, b: a.sum(1, keepdims=True) * b.sum(0, keepdims=True) * 0.1,
    ),
    (lambda s, t: s.scatter_add(0, Tensor(ROWS).unsqueeze(1).expand(N, N), t), lambda a, b: _scattered(a, b)),
]


def _scattered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = a.copy()
    np.add.at(out, ROWS, b)
    return out


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], set[int], list[int]]:
    """(op, source, source) of each value; which are realized at once; which are asked for at the end."""
    n = draw(st.integers(1, 14))
    steps = [
        (draw(st.integers(0, len(UNARY) + len(BINARY) - 1)), draw(st.integers(0, i + 1)), draw(st.integers(0, i + 1)))
        for i in range(n)
    ]
    return (
        steps,
        draw(st.sets(st.integers(2, n + 1), max_size=2)),
        draw(st.lists(st.integers(0, n + 1), min_size=1, max_size=4)),
    )


def check(program: tuple[list[tuple[int, int, int]], set[int], list[int]]) -> None:
    steps, early, wanted = program
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((N, N)) for _ in range(2)]
    with Context(DEVICE="PYTHON"):
        tensors = [Tensor(a) for a in arrays]
        for at, (op, i, j) in enumerate(steps):
            if op < len(UNARY):
                f, g = UNARY[op]
                tensors.append(f(tensors[i]))
                arrays.append(np.asarray(g(arrays[i])))
            else:
                f, g = BINARY[op - len(UNARY)]
                tensors.append(f(tensors[i], tensors[j]))
                arrays.append(np.asarray(g(arrays[i], arrays[j])))
            if at + 2 in early:
                tensors[-1].realize()
        outs = [tensors[i] for i in [*wanted, len(tensors) - 1]]
        outs[0].realize(*outs[1:])
        for i in [*wanted, len(tensors) - 1]:
            np.testing.assert_allclose(tensors[i].numpy(), arrays[i], rtol=1e-9, atol=1e-9)
