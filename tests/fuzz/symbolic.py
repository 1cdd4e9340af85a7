"""Programs over a dim whose size a Variable says give what NumPy gives for the number that it is bound to: slices as
Python takes them, joins, orders, triangles, reductions and gradients, computed plainly and by one capture for all
numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, Variable
from manygrad.nn import functional as F
from tests.fuzz.kernels import Watch, watched

EXAMPLES = 25
MOST = (1, 2, 7, 8, 9, 16, 17, 33, 40, 65)
WIDTHS = (1, 2, 3, 8, 17)
PLACES = (None, -40, -17, -8, -3, -2, -1, 0, 1, 2, 3, 8, 17, 40)
LIMIT = 500  # values stay below it, so that sums and products of two are exact
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    most = draw(st.sampled_from(MOST))
    number = st.integers(0, 99)
    return {
        "most": most,
        "least": draw(st.integers(0, most)),
        "width": draw(st.sampled_from(WIDTHS)),
        "numbers": draw(st.lists(st.integers(0, most), min_size=1, max_size=4)),
        "steps": draw(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), number, number), min_size=1, max_size=4)),
        "end": draw(st.sampled_from(sorted(ENDS))),
        "gradient": draw(st.booleans()),
        "seed": draw(st.integers(0, 9999)),
    }


def _slice(a: int, b: int) -> slice:
    return slice(PLACES[a % len(PLACES)], PLACES[b % len(PLACES)])


def _small(t: Any) -> Any:
    return t.clip(-LIMIT, LIMIT)


def _places(t: Any) -> Any:
    """The number of each row, as a column."""
    if isinstance(t, Tensor):
        return Tensor.arange(t.shape[0]).reshape(-1, 1).float()
    return np.arange(len(t), dtype=np.float64).reshape(-1, 1)


def _cat(parts: list[Any]) -> Any:
    return Tensor.cat(*parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)


def _as_float(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) else x.astype(np.float64)


Both = Callable[[Any, int, int], Any]  # of a Tensor, or of an array
STEPS: dict[str, Both] = {
    "slice": lambda t, a, b: t[_slice(a, b)],
    "flip": lambda t, a, b: t.flip(0) if isinstance(t, Tensor) else np.flip(t, 0),
    "numbered": lambda t, a, b: t + _places(t),
    "below": lambda t, a, b: t * _as_float(_places(t) < a % 20),
    "cat": lambda t, a, b: _cat([t, t[_slice(a, b)]]),
    "cat before": lambda t, a, b: _cat([t[: 1 + a % 3] * 2, t]),
    "pad": lambda t, a, b: (
        F.pad(t, (0, 0, a % 18, b % 18)) if isinstance(t, Tensor) else np.pad(t, ((a % 18, b % 18), (0, 0)))
    ),
    "repeat": lambda t, a, b: t.repeat(2, 1) if isinstance(t, Tensor) else np.tile(t, (2, 1)),
    "cumsum": lambda t, a, b: _small(t.cumsum(0)),
    "sort": lambda t, a, b: t.sort(0).values if isinstance(t, Tensor) else np.sort(t, 0),
    "stored": lambda t, a, b: t.contiguous() if isinstance(t, Tensor) else t,
    "product": lambda t, a, b: _small(t @ (_clip3(t).T @ _clip3(t))),
    "turned": lambda t, a, b: t.T.flip(0).T if isinstance(t, Tensor) else np.flip(t.T, 0).T,
}
ENDS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(0),
    "all": lambda t: t.sum(),
    "weighted": lambda t: (t * (_places(t) + 1)).sum(0),
    "product": lambda t: _clip3(t).T @ _clip3(t),
    "flat": lambda t: t.reshape(-1).sum(),
    "column": lambda t: _cat([t[:, 0], t[:2, -1]]).sum(),
    "columns": lambda t: (_cat([t[:, -1], t[:, 0]]) * _cat([t[1:, 0], t[:, 0], t[:1, 0]])).sum(),
    "flat cat": lambda t: _cat([t.reshape(-1), t[:1].reshape(-1)])[1:].sum(),
    "largest": lambda t: _largest(_cat([_row_of_ones(t), t])),
}


def _clip3(t: Any) -> Any:
    return t.clip(-3, 3)


def _row_of_ones(t: Any) -> Any:
    return (Tensor if isinstance(t, Tensor) else np).ones((1, t.shape[1]))


def _largest(t: Any) -> Any:
    return t.amax(0) if isinstance(t, Tensor) else t.max(0)


def _run(p: Program, x: Any, n: Any) -> Any:
    t = x[:n]
    for name, a, b in p["steps"]:
        t = STEPS[name](t, a, b)
        if not isinstance(t, Tensor) and t.shape[0] > 400:
            raise _TooLarge
    return ENDS[p["end"]](t)


class _TooLarge(Exception):
    """A program whose values grow too large to be checked."""


def check(p: Program) -> None:
    rng = np.random.default_rng(p["seed"])
    x = rng.integers(-3, 4, (p["most"], p["width"])).astype(np.float64)
    given = Tensor(x.astype(np.float32)).realize()
    bound = Variable("n", p["least"], p["most"])
    watch = Watch(random.Random(p["seed"]))
    captured = TinyJit(lambda n: _run(p, given, n).realize())
    with Context(DEVICE="CPU"):
        for n in sorted({max(n, p["least"]) for n in p["numbers"]}):
            try:
                want = _run(p, x, n)
            except _TooLarge:
                return
            with watched(watch) if not watch.kernels else nullcontext():
                np.testing.assert_array_equal(_run(p, given, bound.bind(n)).numpy(), want)
            np.testing.assert_array_equal(captured(bound.bind(n)).numpy(), want)
            if p["gradient"]:
                _check_gradient(p, x, bound.bind(n), n)


def _check_gradient(p: Program, x: np.ndarray, bound: Any, n: int) -> None:
    """That of the same program over a number."""
    found = []
    for size in (bound, n):
        t = Tensor(x.astype(np.float32), requires_grad=True)
        result = _run(p, t, size).square().sum()
        found.append(result.gradient(t)[0].numpy())
    np.testing.assert_allclose(*found, rtol=1e-5)
