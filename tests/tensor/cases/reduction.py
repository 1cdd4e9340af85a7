"""Reductions: sums, products, truth, extremes, variances, norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, distinct, elementwise, numpy_dims, reduction, shapes

ALL = ("float16", "bfloat16", "float32", "float64")
NO = {"grad": False}


def holes(draw: Draw, empty: bool = True) -> Sample:
    """Of `reduction`, some elements NaN."""
    s = reduction(empty=empty)(draw)
    x = s.arrays[0]
    return Sample(
        (np.where(np.random.default_rng(draw(st.integers(0, 99))).random(x.shape) < 0.3, np.nan, x),), s.args, s.kwargs
    )


def zeros(draw: Draw) -> Sample:
    """Of `reduction` over one dim, some elements 0."""
    shape = shapes(draw, 1)
    x = array(draw, shape)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return Sample(
        (np.where(rng.random(shape) < 0.3, 0.0, x),),
        (),
        {"dim": draw(st.integers(-len(shape), len(shape) - 1)), "keepdim": draw(st.booleans())},
    )


def truths(draw: Draw) -> Sample:
    s = reduction()(draw)
    return Sample((np.random.default_rng(draw(st.integers(0, 99))).random(s.arrays[0].shape) < 0.7,), s.args, s.kwargs)


def one_dim(min_size: int = 1, keepdim: bool = True) -> Any:
    def samples(draw: Draw) -> Sample:
        shape = list(shapes(draw, 1))
        d = draw(st.integers(-len(shape), len(shape) - 1))
        shape[d] = max(shape[d], min_size)
        return Sample(
            (distinct(draw, tuple(shape)),), (), {"dim": d, **({"keepdim": draw(st.booleans())} if keepdim else {})}
        )

    return samples


def extreme(arg: Any, value: Any) -> Any:
    def oracle(x: np.ndarray, dim: int, keepdim: bool) -> Any:
        return value(x, axis=dim, keepdims=keepdim), arg(x, axis=dim, keepdims=keepdim)

    return oracle


def spread(draw: Draw) -> Sample:
    s = reduction(empty=False)(draw)
    if s.arrays[0].ndim == 0:
        return Sample((array(draw, (5,)),), (), {"correction": 0})
    return Sample(s.arrays, s.args, {**s.kwargs, "correction": 0})


def variance(x: np.ndarray, dim: Any = None, keepdim: bool = False, correction: float = 1) -> np.ndarray:
    return np.var(x, axis=dim, keepdims=keepdim, ddof=correction)


def unbiased(draw: Draw) -> Sample:
    shape = tuple(d + 2 for d in shapes(draw, 1))
    return Sample((array(draw, shape),), (draw(st.sampled_from([None, 0, -1])),))


def norms(draw: Draw) -> Sample:
    s = reduction(empty=False, ties=False)(draw)
    return Sample(s.arrays, (draw(st.sampled_from([0, 1, 2, 3, 2.5, math.inf, -math.inf, "fro"])),), s.kwargs)


def norm(x: np.ndarray, p: Any, dim: Any = None, keepdim: bool = False) -> Any:
    a = np.abs(x)
    if p == "fro":
        p = 2
    if p == 0:
        return (a != 0).astype(x.dtype).sum(axis=dim, keepdims=keepdim)
    if abs(p) == math.inf:
        return (np.max if p > 0 else np.min)(a, axis=dim, keepdims=keepdim)
    return (a**p).sum(axis=dim, keepdims=keepdim) ** (1 / p)


def logsumexp(x: np.ndarray, dim: Any = None, keepdim: bool = False) -> Any:
    return np.log(np.exp(x).sum(axis=dim, keepdims=keepdim))


def needs_dim(draw: Draw) -> Sample:
    s = reduction(empty=False)(draw)
    return Sample(s.arrays, s.args, s.kwargs) if s.kwargs else Sample((array(draw, (4, 3)),), (), {"dim": (0, -1)})


def renorm(x: np.ndarray, p: float, dim: int, maxnorm: float) -> np.ndarray:
    size = (np.abs(x) ** p).sum(axis=tuple(i for i in range(x.ndim) if i != dim % x.ndim), keepdims=True) ** (1 / p)
    return x * np.where(size > maxnorm, maxnorm / (size + 1e-7), 1)


def matrices(draw: Draw) -> Sample:
    return Sample((array(draw, (draw(st.integers(2, 4)), draw(st.integers(3, 6)))),))


def weighted(draw: Draw) -> Sample:
    x = matrices(draw).arrays[0]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return Sample(
        (x, rng.integers(1, 4, x.shape[1]), rng.uniform(0.5, 2, x.shape[1])),
        (),
        {"correction": draw(st.integers(0, 1))},
    )


CASES = [
    Case("Tensor.sum", numpy_dims(np.sum), reduction(), dtypes=ALL),
    Case("Tensor.nansum", numpy_dims(np.nansum), holes, **NO),
    Case("Tensor.prod", np.prod, elementwise(low=0.5, high=1.5)),
    Case("Tensor.prod", numpy_dims(np.prod), zeros, variant="zeros"),
    Case("Tensor.mean", numpy_dims(np.mean), reduction(empty=False), dtypes=ALL),
    Case("Tensor.nanmean", numpy_dims(np.nanmean), lambda d: reduction(empty=False)(d)),
    Case("Tensor.any", numpy_dims(np.any), truths, **NO), Case("Tensor.all", numpy_dims(np.all), truths, **NO),
    Case("Tensor.count_nonzero", lambda x, dim=None: np.count_nonzero(x, axis=dim), lambda d: Sample(truths(d).arrays),
         **NO),
    Case("Tensor.amax", numpy_dims(np.max), reduction(empty=False, ties=False)),
    Case("Tensor.amin", numpy_dims(np.min), reduction(empty=False, ties=False)),
    Case("Tensor.aminmax", lambda x, **k: (numpy_dims(np.min)(x, **k), numpy_dims(np.max)(x, **k)), one_dim()),
    Case("Tensor.max", np.max, lambda d: Sample((distinct(d, shapes(d, empty=False)),))),
    Case("Tensor.max", extreme(np.argmax, np.max), one_dim(), variant="dim"),
    Case("Tensor.min", np.min, lambda d: Sample((distinct(d, shapes(d, empty=False)),))),
    Case("Tensor.min", extreme(np.argmin, np.min), one_dim(), variant="dim"),
    Case("Tensor.max", lambda x, dim, keepdim: np.max(x, dim, keepdims=keepdim),
         holes_dim := (lambda d: Sample((np.where(distinct(d, (3, 4)) > 1, np.nan, distinct(d, (3, 4))),), (),
                                        {"dim": 1, "keepdim": False})),
         variant="NaN", call=lambda lib, x, **k: x.max(**k)[0], **NO),
    Case("Tensor.argmax", numpy_dims(np.argmax), one_dim(), **NO),
    Case("Tensor.argmin", numpy_dims(np.argmin), one_dim(), **NO),
    Case("Tensor.var", variance, spread),
    Case("Tensor.std", lambda x, **k: np.sqrt(variance(x, **k)),
         lambda d: Sample((array(d, tuple(n + 2 for n in shapes(d, 1))),), (), {"correction": 0})),
    Case("Tensor.var", lambda x, dim: variance(x, dim), unbiased, variant="unbiased"),
    Case("Tensor.std", lambda x, dim: np.sqrt(variance(x, dim)), unbiased, variant="unbiased"),
    Case("torch.var_mean", lambda x, dim: (variance(x, dim), x.mean(dim)), unbiased),
    Case("torch.std_mean", lambda x, dim: (np.sqrt(variance(x, dim)), x.mean(dim)), unbiased),
    Case("Tensor.logsumexp", logsumexp, needs_dim), Case("Tensor.norm", norm, norms),
    Case("Tensor.dist", lambda x, y, p: norm(x - y, p),
         lambda d: Sample(((s := matrices(d)).arrays[0], s.arrays[0] * 0.5), (3,))),
    Case("Tensor.renorm", renorm, lambda d: Sample(matrices(d).arrays, (2, d(st.integers(-2, 1)), 4.0))),
    Case("Tensor.trace", np.trace, matrices), Case("Tensor.cov", np.cov, matrices),
    Case("Tensor.corrcoef", np.corrcoef, matrices, grad=False),
    Case("Tensor.cov", lambda x, f, a, correction: np.cov(x, ddof=correction, fweights=f, aweights=a), weighted,
         variant="weights", grad=False,
         call=lambda lib, x, f, a, correction: x.cov(correction=correction, fweights=f, aweights=a)),
]  # fmt: skip
