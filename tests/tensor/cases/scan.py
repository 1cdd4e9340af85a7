"""Scans along a dim, short and in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, along, array, distinct, shapes


def long(draw: Draw) -> Sample:
    """A dim of several blocks, with a rest."""
    shape = [draw(st.integers(1, 2)), draw(st.integers(1, 2))]
    d = draw(st.integers(0, 1))
    shape[d] = draw(st.sampled_from([33, 47, 70]))
    return Sample((array(draw, tuple(shape), low=-1, high=1),), (), {"dim": d})


def zeros(draw: Draw) -> Sample:
    s = along(1)(draw)
    x = s.arrays[0]
    return Sample(
        (np.where(np.random.default_rng(draw(st.integers(0, 99))).random(x.shape) < 0.3, 0.0, x),), (), s.kwargs
    )


def no_ties(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    return Sample((distinct(draw, shape),), (), {"dim": draw(st.integers(-len(shape), len(shape) - 1))})


def repeated(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    return Sample((array(draw, shape, "int64", 0, 3),), (), {"dim": draw(st.integers(-len(shape), len(shape) - 1))})


def running(f: Any) -> Any:
    """(values, last index of them) of a running extreme."""

    def oracle(x: np.ndarray, dim: int) -> Any:
        values = f.accumulate(x, axis=dim)
        places = np.arange(x.shape[dim]).reshape([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)])
        return values, np.maximum.accumulate(np.where(x == values, places, -1), axis=dim) if x.size else np.zeros(
            x.shape, np.int64
        )

    return oracle


def differences(x: np.ndarray, n: int, dim: int) -> np.ndarray:
    return np.diff(x, n=min(n, x.shape[dim]), axis=dim)


def joined(draw: Draw) -> Sample:
    n = draw(st.integers(1, 4))
    return Sample((array(draw, (3, n)), array(draw, (3, 2)), array(draw, (3, 1))))


CASES = [
    *(Case(f"Tensor.{name}", f, samples, variant=variant)
      for name, f in {"cumsum": lambda x, dim: np.cumsum(x, dim), "cumprod": lambda x, dim: np.cumprod(x, dim),
                      "logcumsumexp": lambda x, dim: np.logaddexp.accumulate(x, dim)}.items()
      for variant, samples in {"": along(), "long": long}.items()),
    Case("Tensor.cumsum", lambda x, dim: np.cumsum(x, dim), repeated, variant="integers", grad=False),
    Case("Tensor.cumprod", lambda x, dim: np.cumprod(x, dim), zeros, variant="zeros"),
    *(Case(f"Tensor.{name}", running(f), samples, variant=variant, grad=not variant)
      for name, f in {"cummax": np.maximum, "cummin": np.minimum}.items()
      for variant, samples in {"": no_ties, "long": long, "ties": repeated}.items()),
    Case("Tensor.diff", differences, lambda d: Sample((s := along()(d)).arrays, (d(st.integers(0, 3)),), s.kwargs)),
    Case("Tensor.diff", lambda x, a, b: np.diff(x, prepend=a, append=b), joined, variant="joined",
         call=lambda lib, x, a, b: x.diff(prepend=a, append=b)),
]  # fmt: skip
