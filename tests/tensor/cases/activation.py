"""torch.nn.functional's activations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, along, array, elementwise, shapes
from tests.tensor.cases.special import each

ALL = ("float16", "bfloat16", "float32", "float64")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray, beta: float = 1, threshold: float = 20) -> np.ndarray:
    return np.where(x * beta > threshold, x, np.log1p(np.exp(np.minimum(x * beta, 50))) / beta)


def softmax(x: np.ndarray, dim: int) -> np.ndarray:
    if not x.size:
        return x
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + each(math.erf)(x / math.sqrt(2)))


def with_args(*args: Any, **named: Any) -> Any:
    def samples(draw: Draw) -> Sample:
        return Sample(
            (array(draw, shapes(draw)),),
            tuple(draw(st.sampled_from(a)) for a in args),
            {k: draw(st.sampled_from(v)) for k, v in named.items()},
        )

    return samples


def halves(draw: Draw) -> Sample:
    shape = list(shapes(draw, 1))
    d = draw(st.integers(-len(shape), len(shape) - 1))
    shape[d] *= 2
    return Sample((array(draw, tuple(shape)),), (d,))


def slopes(draw: Draw) -> Sample:
    shape = shapes(draw, 2)
    return Sample((array(draw, shape), array(draw, (shape[1],) if shape[1] and draw(st.booleans()) else (1,))))


def prelu(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, x * (w if w.size == 1 else w.reshape(1, -1, *(1,) * (x.ndim - 2))))


def elu(x: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def glu(x: np.ndarray, dim: int) -> np.ndarray:
    a, b = np.split(x, 2, dim)
    return a * sigmoid(b)


def f(name: str, oracle: Any, samples: Any = None, **options: Any) -> Case:
    return Case(f"functional.{name}", oracle, samples or elementwise(), **options)


CASES = [
    f("relu", lambda x: np.maximum(x, 0), dtypes=ALL),
    f("relu6", lambda x: np.clip(x, 0, 6), elementwise(low=-9, high=9)),
    f("threshold", lambda x, t, v: np.where(x > t, x, v), with_args([0.123], [-1.0])),
    f("hardtanh", np.clip, with_args([-1.01], [1.234])),
    f("leaky_relu", lambda x, s: np.where(x > 0, x, s * x), with_args([0.01, 0.3])), f("prelu", prelu, slopes),
    f("elu", elu, with_args([1.0, 0.7])),
    f("selu", lambda x: 1.0507009873554805 * elu(x, 1.6732632423543772)),
    f("celu", lambda x, a: np.maximum(x, 0) + np.minimum(0, a * np.expm1(x / a)), with_args([1.0, 0.7])),
    f("rrelu", lambda x: np.where(x > 0, x, x * (1 / 8 + 1 / 3) / 2)), f("glu", glu, halves),
    f("sigmoid", sigmoid, elementwise(low=-9, high=9), dtypes=ALL),
    f("tanh", np.tanh), f("logsigmoid", lambda x: -softplus(-x)),
    f("hardsigmoid", lambda x: np.clip(x + 3.001 - 0.001, 0, 6) / 6, elementwise(low=-5, high=5)),
    f("silu", lambda x: x * sigmoid(x), dtypes=ALL),
    f("hardswish", lambda x: x * np.clip(x + 3, 0, 6) / 6, elementwise(low=-5, high=5)),
    f("mish", lambda x: x * np.tanh(softplus(x))), f("gelu", gelu, with_args(approximate=["none", "tanh"]), dtypes=ALL),
    f("softplus", softplus, with_args([1, 2.5], [20, 3])), f("softsign", lambda x: x / (1 + np.abs(x))),
    f("tanhshrink", lambda x: x - np.tanh(x)),
    f("hardshrink", lambda x, v: np.where(np.abs(x) <= v, 0, x), with_args([0.5, 0.0])),
    f("softshrink", lambda x, v: np.sign(x) * np.maximum(np.abs(x) - v, 0), with_args([0.5])),
    f("softmax", softmax, along(), dtypes=ALL), f("softmin", lambda x, dim: softmax(-x, dim), along()),
    f("log_softmax", lambda x, dim: np.log(softmax(x, dim)), along()),
    Case("Tensor.softmax", softmax, along()),
    Case("Tensor.log_softmax", lambda x, dim: np.log(softmax(x, dim)), along()),
    Case("Tensor.relu", lambda x: np.maximum(x, 0), elementwise()),
    Case("Tensor.sigmoid", sigmoid, elementwise()), Case("Tensor.prelu", prelu, slopes),
    Case("Tensor.hardshrink", lambda x, v: np.where(np.abs(x) <= v, 0, x), with_args([0.5])),
    Case("Tensor.logit", lambda x: np.log(x / (1 - x)), elementwise(low=0.06, high=0.95)),
    Case("Tensor.logit", lambda x, eps: np.log(np.clip(x, eps, 1 - eps) / (1 - np.clip(x, eps, 1 - eps))),
         with_args([0.0612]), variant="eps"),
]  # fmt: skip
