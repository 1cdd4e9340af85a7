"""Writing at positions that are data: set, add, reduce.
Positions may repeat, except where that leaves the result open."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, distinct, shapes
from tests.tensor.cases.gathering import booleans, integers, sized


def scattered(repeat: bool = True, kind: str = "plain", **kwargs: Any):
    """(x, index, src) and a dim; the index is at most as large as x off the dim, src at least as large as the index."""

    def samples(draw: Draw) -> Sample:
        shape = sized(draw)
        d = draw(st.integers(-len(shape), len(shape) - 1))
        at = tuple(draw(st.integers(1, n + (2 if repeat and i == d % len(shape) else 0))) for i, n in enumerate(shape))
        if repeat:
            index = integers(draw, at, 0, shape[d])
        else:
            order = np.random.default_rng(draw(st.integers(0, 99))).permuted(
                np.broadcast_to(
                    np.arange(shape[d]).reshape([-1 if i == d % len(shape) else 1 for i in range(len(shape))]), shape
                ),
                axis=d,
            )
            index = np.ascontiguousarray(order[tuple(slice(n) for n in at)])
        src = tuple(n + draw(st.integers(0, 1)) for n in at)
        both = (
            distinct(draw, (int(np.prod(shape)) + int(np.prod(src)),))
            if kind == "distinct"
            else array(draw, (int(np.prod(shape)) + int(np.prod(src)),))
        )
        if kind == "zeros":
            both = np.where(np.random.default_rng(draw(st.integers(0, 99))).random(both.shape) < 0.3, 0.0, both)
        n = int(np.prod(shape))
        extra = {k: draw(st.sampled_from(v)) if isinstance(v, list) else v for k, v in kwargs.items()}
        return Sample((both[:n].reshape(shape), index, both[n:].reshape(src)), (d,), extra)

    return samples


def places(x: np.ndarray, index: np.ndarray, d: int) -> tuple[np.ndarray, ...]:
    return tuple(
        index if i == d % x.ndim else np.arange(n).reshape([-1 if j == i else 1 for j in range(x.ndim)])
        for i, n in enumerate(index.shape)
    )


def np_scatter(x: np.ndarray, index: np.ndarray, src: Any, d: int, reduce: str | None = None) -> np.ndarray:
    out, at = x.copy(), places(x, index, d)
    v = src[tuple(slice(n) for n in index.shape)] if isinstance(src, np.ndarray) else np.full(index.shape, src, x.dtype)
    at = np.broadcast_arrays(*at)
    for place, value in zip(zip(*[a.reshape(-1) for a in at]), v.reshape(-1)):
        out[place] = value if reduce is None else out[place] + value if reduce == "add" else out[place] * value
    return out


def np_scatter_reduce(
    x: np.ndarray, index: np.ndarray, src: np.ndarray, d: int, reduce: str, include_self: bool = True
) -> np.ndarray:
    held: dict[tuple[int, ...], list[Any]] = {}
    for place, value in zip(
        zip(*[a.reshape(-1) for a in np.broadcast_arrays(*places(x, index, d))]),
        src[tuple(slice(n) for n in index.shape)].reshape(-1),
    ):
        held.setdefault(place, [x[place]] if include_self else []).append(value)
    out = x.copy()
    for place, values in held.items():
        out[place] = {"sum": np.sum, "prod": np.prod, "mean": np.mean, "amax": np.max, "amin": np.min}[reduce](values)
    return out


def call(name: str):
    return lambda lib, x, i, s, d, *a, **k: getattr(x, name)(d, i, s, *a, **k)


def reducing(name: str):
    return lambda lib, x, i, s, d, reduce, **k: getattr(x, name)(d, i, s, reduce, **k)


def sliced(repeat: bool = True, kind: str = "plain", **kwargs: Any):
    """(x, 1-d index, source) and a dim."""

    def samples(draw: Draw) -> Sample:
        shape = sized(draw)
        d = draw(st.integers(-len(shape), len(shape) - 1))
        index = (
            integers(draw, (draw(st.integers(0, 4)),), 0, shape[d])
            if repeat
            else np.array(draw(st.permutations(range(shape[d])))[: draw(st.integers(0, shape[d]))], np.int64)
        )
        src = tuple(len(index) if i == d % len(shape) else n for i, n in enumerate(shape))
        n = int(np.prod(shape))
        both = distinct(draw, (n + int(np.prod(src)),)) if kind == "distinct" else array(draw, (n + int(np.prod(src)),))
        extra = {k: draw(st.sampled_from(v)) if isinstance(v, list) else v for k, v in kwargs.items()}
        return Sample((both[:n].reshape(shape), index, both[n:].reshape(src)), (d,), extra)

    return samples


def np_index(x: np.ndarray, index: np.ndarray, src: Any, d: int, alpha: float = 1, how: str = "add") -> np.ndarray:
    out = x.copy()
    moved = np.moveaxis(out, d, 0)
    for k, i in enumerate(index):
        value = np.moveaxis(src, d, 0)[k] if isinstance(src, np.ndarray) and src.ndim else src
        moved[i] = moved[i] + alpha * value if how == "add" else value
    return out


def np_index_reduce(
    x: np.ndarray, index: np.ndarray, src: np.ndarray, d: int, reduce: str, include_self: bool = True
) -> np.ndarray:
    wide = np.broadcast_to(index.reshape([-1 if i == d % x.ndim else 1 for i in range(x.ndim)]), src.shape)
    return np_scatter_reduce(x, wide, src, d, reduce, include_self)


def filled(draw: Draw) -> Sample:
    s = sliced()(draw)
    return Sample(s.arrays[:2], (s.args[0], draw(st.sampled_from([2.5, -1.0]))))


def put(draw: Draw) -> Sample:
    shape = sized(draw, 0)
    n = int(np.prod(shape))
    accumulate = draw(st.booleans())
    index = (
        integers(draw, (draw(st.integers(0, 5)),), -n, n)
        if accumulate
        else np.array(draw(st.permutations(range(n)))[:5], np.int64)
    )
    return Sample((array(draw, shape), index, array(draw, index.shape)), (), {"accumulate": accumulate})


def np_put(x: np.ndarray, index: np.ndarray, src: np.ndarray, accumulate: bool) -> np.ndarray:
    out = x.copy().reshape(-1)
    if accumulate:
        np.add.at(out, index, src)
    else:
        out[index] = src
    return out.reshape(x.shape)


def index_put(draw: Draw) -> Sample:
    i, j = integers(draw, (3, 1), -4, 4), integers(draw, (2,), 0, 5)
    accumulate = draw(st.booleans())
    if not accumulate:
        i, j = np.array([[0], [3], [-2]]), np.array([4, 1])
    return Sample(
        (array(draw, (4, 5, 2)), i, j, array(draw, draw(st.sampled_from([(3, 2, 2), (2,), (2, 1)])))),
        (),
        {"accumulate": accumulate},
    )


def np_index_put(x: np.ndarray, i: np.ndarray, j: np.ndarray, v: np.ndarray, accumulate: bool) -> np.ndarray:
    out = x.copy()
    if accumulate:
        np.add.at(out, (i, j), v)
    else:
        out[i, j] = v
    return out


def mask_put(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    m = booleans(draw, shape[: draw(st.integers(1, len(shape)))])
    rows = (int(m.sum()), *shape[m.ndim :])
    return (
        Sample((array(draw, shape), m, array(draw, draw(st.sampled_from([(), rows])))))
        if rows[0] != 1
        else Sample((array(draw, shape), m, array(draw, ())))
    )


def np_mask_put(x: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    out = x.copy()
    out[m] = v
    return out


def write(lib: Any, x: Any, m: Any, v: Any) -> Any:
    x = x.clone()
    x[m] = v
    return x


CASES = [
    Case("Tensor.scatter", np_scatter, scattered(repeat=False), call=call("scatter"),
         dtypes=("float32", "float64", "float16")),
    Case("Tensor.scatter", lambda x, i, d, v: np_scatter(x, i, v, d),
         lambda draw: (lambda s: Sample(s.arrays[:2], (s.args[0], 1.5)))(scattered()(draw)), variant="value",
         call=lambda lib, x, i, d, v: x.scatter(d, i, v)),
    *[Case("Tensor.scatter", lambda x, i, d, reduce: np_scatter(x, i, 1.5, d, reduce),
           lambda draw, r=r: (lambda s: Sample(s.arrays[:2], s.args, {"reduce": r}))(scattered()(draw)),
           variant=f"value {r}",
           grad=False, call=lambda lib, x, i, d, reduce: x.scatter(d, i, 1.5, reduce=reduce))
      for r in ("add", "multiply")],
    Case("Tensor.scatter_add", lambda x, i, s, d: np_scatter(x, i, s, d, "add"), scattered(), call=call("scatter_add"),
         dtypes=("float32", "float64")),
    *[Case("Tensor.scatter_reduce", np_scatter_reduce,
           scattered(kind="zeros" if r == "prod" else "distinct", reduce=r, include_self=[True, False]), variant=r,
           call=reducing("scatter_reduce"))
      for r in ("sum", "prod", "mean", "amax", "amin")],
    Case("Tensor.index_add", np_index, sliced(alpha=[1, 2.5]), call=call("index_add")),
    Case("Tensor.index_copy", lambda x, i, s, d: np_index(x, i, s, d, how="set"), sliced(repeat=False),
         call=call("index_copy")),
    Case("Tensor.index_fill", lambda x, i, d, v: np_index(x, i, v, d, how="set"), filled,
         call=lambda lib, x, i, d, v: x.index_fill(d, i, v)),
    *[Case("Tensor.index_reduce", np_index_reduce, sliced(kind="distinct", reduce=r, include_self=[True, False]),
           variant=r, call=reducing("index_reduce")) for r in ("prod", "mean", "amax", "amin")],
    Case("Tensor.put", np_put, put),
    Case("Tensor.index_put", np_index_put, index_put,
         call=lambda lib, x, i, j, v, accumulate: x.index_put((i, j), v, accumulate)),
    Case("Tensor.index_put", np_mask_put, mask_put, variant="mask", call=lambda lib, x, m, v: x.index_put((m,), v)),
    Case("Tensor.__setitem__", np_mask_put, mask_put, variant="mask", grad=False, call=write),
]  # fmt: skip
