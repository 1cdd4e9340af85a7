"""Orders, ranks, searches, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, distinct, shapes
from tests.tensor.cases.gathering import integers


def values(draw: Draw, shape: tuple[int, ...], special: bool = False) -> np.ndarray:
    """No ties; or ties, infinities, both zeros and NaN."""
    if not special:
        return distinct(draw, shape)
    x = np.random.default_rng(draw(st.integers(0, 1 << 20))).choice(
        [-np.inf, -1.5, -0.0, 0.0, 0.25, 3.0, np.inf, np.nan], shape
    )
    return np.asarray(x)


def ordered(special: bool = False, min_size: int = 0, **kwargs: Any):
    def samples(draw: Draw) -> Sample:
        shape = list(shapes(draw, 1))
        d = draw(st.integers(-len(shape), len(shape) - 1))
        shape[d] = max(shape[d], min_size)
        return Sample(
            (values(draw, tuple(shape), special),),
            (),
            {"dim": d, **{k: draw(st.sampled_from(v)) for k, v in kwargs.items()}},
        )

    return samples


def np_argsort(x: np.ndarray, dim: int = -1, descending: bool = False, stable: bool = False) -> np.ndarray:
    if not descending:
        return np.argsort(x, dim, kind="stable")
    keys = np.where(np.isnan(x), -np.inf, -x) if x.dtype.kind == "f" else -x
    return np.lexsort((keys, ~np.isnan(x)), axis=dim) if x.dtype.kind == "f" else np.argsort(keys, dim, kind="stable")


def np_sort(x: np.ndarray, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    order = np_argsort(x, dim, descending)
    return np.take_along_axis(x, order, dim), order


def np_topk(x: np.ndarray, k: int, dim: int, largest: bool) -> Any:
    return tuple(np.take(a, range(k), dim) for a in np_sort(x, dim, largest))


def best(draw: Draw) -> Sample:
    s = ordered(largest=[True, False])(draw)
    return Sample(s.arrays, (draw(st.integers(0, s.arrays[0].shape[s.kwargs["dim"]])),), s.kwargs)


def kth(draw: Draw) -> Sample:
    s = ordered(min_size=1, keepdim=[True, False])(draw)
    return Sample(s.arrays, (draw(st.integers(1, s.arrays[0].shape[s.kwargs["dim"]])),), s.kwargs)


def np_kth(x: np.ndarray, k: int, dim: int, keepdim: bool) -> Any:
    return tuple((lambda r: r if keepdim else np.squeeze(r, dim))(np.take(a, [k - 1], dim)) for a in np_sort(x, dim))


def np_median(x: np.ndarray, dim: int, keepdim: bool) -> Any:
    return np_kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def np_nanmedian_all(x: np.ndarray) -> Any:
    y = np.sort(x[~np.isnan(x)])
    return y[(len(y) - 1) // 2] if len(y) else np.float64(np.nan)


def np_median_all(x: np.ndarray) -> Any:
    return np.float64(np.nan) if np.isnan(x).any() or not x.size else np_nanmedian_all(x)


def np_mode(x: np.ndarray, dim: int, keepdim: bool) -> Any:
    def one(row: np.ndarray) -> tuple[Any, int]:
        found, counts = np.unique(row, return_counts=True)
        value = found[counts.argmax()]
        return value, int(np.flatnonzero(row == value)[-1])

    rows = np.moveaxis(x, dim, -1)
    got = [one(r) for r in rows.reshape(-1, rows.shape[-1])]
    out = [np.array([g[k] for g in got], t).reshape(rows.shape[:-1]) for k, t in ((0, x.dtype), (1, np.int64))]
    return tuple(np.expand_dims(o, dim) if keepdim else o for o in out)


def few_values(draw: Draw) -> Sample:
    shape = shapes(draw, 1, empty=False)
    return Sample(
        (integers(draw, shape, 0, 4),),
        (),
        {"dim": draw(st.integers(-len(shape), len(shape) - 1)), "keepdim": draw(st.booleans())},
    )


METHODS = ("linear", "lower", "higher", "midpoint", "nearest")


def quantiles(nan: bool):
    def samples(draw: Draw) -> Sample:
        shape = shapes(draw, 1, empty=False)
        x = distinct(draw, shape)
        if nan:
            x = np.where(np.random.default_rng(draw(st.integers(0, 99))).random(shape) < 0.2, np.nan, x)
        q = draw(st.sampled_from([0.0, 0.13, 0.5, 0.77, 1.0]))  # not at a tie of "nearest"
        dim = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
        return Sample(
            (x,), (q,), {"dim": dim, "keepdim": draw(st.booleans()), "interpolation": draw(st.sampled_from(METHODS))}
        )

    return samples


def np_quantile(f: Any):
    def quantile(x: np.ndarray, q: Any, dim: int | None, keepdim: bool, interpolation: str) -> Any:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f(x, q, axis=dim, keepdims=keepdim, method=interpolation)

    return quantile


def looked_up(draw: Draw) -> Sample:
    lead = shapes(draw, 0, 1)
    a = np.sort(integers(draw, (*lead, draw(st.integers(0, 9))), 0, 6), -1).astype(float)
    v = integers(draw, (*lead, *shapes(draw, 1, 1)) if lead else shapes(draw), -1, 7).astype(float)
    return Sample((a, v), (), {"right": draw(st.booleans())})


def np_searchsorted(a: np.ndarray, v: np.ndarray, right: bool = False) -> np.ndarray:
    side = "right" if right else "left"
    if a.ndim == 1:
        return np.searchsorted(a, v, side).astype(np.int64)
    return np.array([np.searchsorted(r, w, side) for r, w in zip(a, v)], np.int64).reshape(v.shape)


def among(most: int):
    return lambda draw: Sample(
        (integers(draw, shapes(draw), 0, 200), integers(draw, (draw(st.integers(0, most)),), 0, 200)),
        (),
        {"invert": draw(st.booleans())},
    )


def repeated(draw: Draw, dim: bool = False) -> Sample:
    extra = {"return_inverse": draw(st.booleans()), "return_counts": draw(st.booleans())}
    if not dim:
        return Sample((integers(draw, shapes(draw), 0, 4).astype(float),), (), extra)
    shape = shapes(draw, 2, 3, empty=False)
    return Sample(
        (integers(draw, shape, 0, 2).astype(float),),
        (),
        {**extra, "dim": draw(st.integers(-len(shape), len(shape) - 1))},
    )


def np_unique(x: np.ndarray, return_inverse: bool, return_counts: bool, dim: int | None = None) -> Any:
    out = np.unique(x, return_inverse=return_inverse, return_counts=return_counts, axis=dim)
    if return_inverse:
        out = tuple(o.reshape(x.shape if dim is None else -1) if k == 1 else o for k, o in enumerate(out))
    return out


def np_unique_consecutive(x: np.ndarray, return_inverse: bool, return_counts: bool, dim: int | None = None) -> Any:
    rows = x.reshape(-1) if dim is None else np.moveaxis(x, dim, 0)
    first = np.array([i == 0 or not np.array_equal(rows[i], rows[i - 1]) for i in range(len(rows))], bool)
    group = np.cumsum(first) - 1
    out = [rows[first] if dim is None else np.moveaxis(rows[first], 0, dim)]
    out += [group.reshape(x.shape) if dim is None else group] if return_inverse else []
    out += (
        [np.bincount(group, minlength=int(first.sum())) if len(rows) else np.zeros(0, np.int64)]
        if return_counts
        else []
    )
    return out[0] if len(out) == 1 else tuple(out)


def counted(weights: bool):
    def samples(draw: Draw) -> Sample:
        n = draw(st.integers(int(weights), 6))  # torch gives int64 for weights of nothing
        return Sample(
            (integers(draw, (n,), 0, 5), *([array(draw, (n,))] if weights else [])),
            (),
            {"minlength": draw(st.sampled_from([0, 8]))},
        )

    return samples


def binned(draw: Draw) -> Sample:
    x = array(draw, shapes(draw, empty=False))
    if draw(st.booleans()):  # (a number alone lies in the middle, which must not be an edge)
        bins = st.sampled_from([1, 3, 5]) if x.size == 1 else st.integers(1, 5)
        return Sample((x,), (draw(bins),))
    return Sample((np.round(x * 8) / 8 + 0.01,), (draw(st.integers(1, 5)),), {"min": -2, "max": 3})  # not at an edge


def np_histc(x: np.ndarray, bins: int, min: float = 0, max: float = 0) -> np.ndarray:
    low, high = (min, max) if (min, max) != (0, 0) else (x.min(), x.max())
    return np.histogram(x, bins, (low - (low == high), high + (low == high)))[0].astype(np.float64)


def histograms(draw: Draw) -> Sample:
    x = array(draw, shapes(draw, 1, empty=False))
    return Sample((x,), (), {"bins": draw(st.integers(1, 5)), "range": (-3.0, 4.0), "density": False})


def np_histogram(x: np.ndarray, bins: Any, range: Any, density: bool) -> Any:
    hist, edges = np.histogram(x, bins, range, density=density)
    return hist.astype(np.float64), edges


CASES = [
    Case("Tensor.sort", np_sort, ordered(descending=[True, False])),
    Case("Tensor.sort", np_sort, ordered(True, stable=[True], descending=[True, False]), variant="ties and NaN",
         grad=False, dtypes=("float16", "bfloat16", "float32", "float64"),
         call=lambda lib, x, **k: lib.top.sort(x, **k)),
    Case("Tensor.sort", np_sort,
         lambda draw: Sample(
             (integers(draw, shapes(draw, 1), -5, 5)
              .astype(draw(st.sampled_from(["int8", "int16", "int32", "int64", "uint8"]))),),
             (), {"stable": True, "dim": -1}), variant="integers", grad=False),
    Case("Tensor.argsort", np_argsort, ordered(descending=[True, False]), grad=False),
    Case("Tensor.msort", lambda x: np.sort(x, 0), lambda draw: Sample((distinct(draw, shapes(draw, 1)),))),
    Case("Tensor.topk", np_topk, best),
    Case("Tensor.kthvalue", np_kth, kth),
    Case("Tensor.median", np_median, ordered(min_size=1, keepdim=[True, False])),
    Case("Tensor.median", np_median_all, lambda draw: Sample((values(draw, shapes(draw), draw(st.booleans())),)),
         variant="all", grad=False),
    Case("Tensor.nanmedian", np_median, ordered(min_size=1, keepdim=[True, False])),
    Case("Tensor.nanmedian", np_nanmedian_all, lambda draw: Sample((values(draw, shapes(draw), draw(st.booleans())),)),
         variant="all", grad=False),
    Case("Tensor.mode", np_mode, few_values, grad=False),
    Case("Tensor.quantile", np_quantile(np.quantile), quantiles(False)),
    Case("Tensor.quantile", np_quantile(np.quantile), quantiles(True), variant="NaN", grad=False),
    Case("Tensor.nanquantile", np_quantile(np.nanquantile), quantiles(True), grad=False),
    Case("torch.searchsorted", np_searchsorted, looked_up, grad=False),
    Case("torch.bucketize", lambda v, a, right: np_searchsorted(a, v, right),
         lambda draw: Sample((array(draw, shapes(draw)), np.sort(array(draw, (draw(st.integers(0, 9)),)))), (),
                             {"right": draw(st.booleans())}), grad=False),
    Case("torch.isin", lambda x, t, invert: np.isin(x, t, invert=invert), among(9), grad=False),
    Case("torch.isin", lambda x, t, invert: np.isin(x, t, invert=invert), among(150), variant="many", grad=False),
    Case("Tensor.unique", np_unique, repeated, grad=False),
    Case("Tensor.unique", np_unique, lambda draw: repeated(draw, True), variant="dim", grad=False),
    Case("Tensor.unique_consecutive", np_unique_consecutive, repeated, grad=False),
    Case("Tensor.unique_consecutive", np_unique_consecutive, lambda draw: repeated(draw, True), variant="dim",
         grad=False),
    Case("Tensor.bincount", lambda x, minlength: np.bincount(x, minlength=minlength), counted(False), grad=False),
    Case("Tensor.bincount", lambda x, w, minlength: np.bincount(x, w, minlength).astype(np.float64), counted(True),
         variant="weights"),
    Case("Tensor.histc", np_histc, binned, grad=False),
    Case("Tensor.histogram", np_histogram, histograms, grad=False,
         call=lambda lib, x, bins, range, density: x.histogram(bins, range=range, density=density)),
]  # fmt: skip
