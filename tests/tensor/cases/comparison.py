"""Comparisons, logic, choice."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.arithmetic import integers, weird
from tests.tensor.cases.case import Case, Draw, Sample, array, broadcastable, elementwise, shapes

NO = {"grad": False}


def close(draw: Draw) -> Sample:
    shape = shapes(draw)
    x = weird(draw).arrays[0]
    x = np.resize(x, shape) if x.size else array(draw, shape)
    return Sample(
        (x, np.asarray(x + np.resize([0, 1e-7, 1e-3], shape))),
        (),
        {"rtol": 1e-5, "atol": 1e-8, "equal_nan": draw(st.booleans())},
    )


def masked(draw: Draw) -> Sample:
    whole, part = broadcastable(draw)
    shape = np.broadcast_shapes(whole, part)
    return Sample((array(draw, shape), array(draw, part, "bool")), (1.5,))


def chosen(draw: Draw) -> Sample:
    x, c, y = broadcastable(draw, 3)
    return Sample((array(draw, x), array(draw, c, "bool"), array(draw, y)))


def compare(name: str, oracle: Any, *aliases: str) -> list[Case]:
    return [Case(f"Tensor.{n}", oracle, integers(low=-2, high=2), dtypes=("float32",), **NO) for n in (name, *aliases)]


CASES = [
    *compare("eq", np.equal), *compare("ne", np.not_equal, "not_equal"), *compare("lt", np.less, "less"),
    *compare("gt", np.greater, "greater"),
    *compare("le", np.less_equal, "less_equal"), *compare("ge", np.greater_equal, "greater_equal"),
    *(Case(f"Tensor.{n}", f, weird, **NO)
      for n, f in {"isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "isposinf": np.isposinf,
                   "isneginf": np.isneginf, "isreal": np.isreal}.items()),
    Case("Tensor.isclose", lambda x, y, **k: np.isclose(x, y, **k), close, dtypes=("float64",), **NO),
    Case("Tensor.allclose", lambda x, y, **k: bool(np.allclose(x, y, **k)), close, dtypes=("float64",), **NO),
    Case("Tensor.equal", lambda x, y: x.shape == y.shape and bool((x == y).all()),
         lambda d: Sample((array(d, (2,), "int32", 0, 1), array(d, (2,), "int32", 0, 1))), **NO),
    *(Case(f"Tensor.logical_{n}", f, integers(low=0, high=1), **NO)
      for n, f in {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.items()),
    Case("Tensor.logical_not", np.logical_not, integers(1, 0, 1), **NO),
    Case("Tensor.where", lambda x, c, y: np.where(c, x, y), chosen),
    Case("torch.where", lambda c, x, y: np.where(c, x, y),
         lambda d: Sample((lambda x, c, y: (c, x, y))(*chosen(d).arrays))),
    Case("Tensor.masked_fill", lambda x, m, v: np.where(m, v, x), masked),
    Case("Tensor.double", lambda x: x, elementwise()),
]  # fmt: skip
