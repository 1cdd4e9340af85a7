"""Reading at positions that are data, masks, what they select."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, broadcastable, shapes


def integers(draw: Draw, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """int64 in [low, high)."""
    return np.random.default_rng(draw(st.integers(0, 1 << 20))).integers(low, high, shape)


def booleans(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng(draw(st.integers(0, 1 << 20))).random(shape) < 0.5)


def sized(draw: Draw, min_dims: int = 1) -> tuple[int, ...]:
    return shapes(draw, min_dims, empty=False)


def gathered(draw: Draw) -> Sample:
    shape = sized(draw)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    at = tuple(draw(st.integers(0, 4)) if i == d % len(shape) else draw(st.integers(1, n)) for i, n in enumerate(shape))
    return Sample((array(draw, shape), integers(draw, at, 0, shape[d])), (d,))


def np_gather(x: np.ndarray, i: np.ndarray, d: int) -> np.ndarray:
    return np.take_along_axis(
        x[tuple(slice(None) if j == d % x.ndim else slice(n) for j, n in enumerate(i.shape))], i, d
    )


def by_dim(name: str):
    """A call whose dim stands first, after it the index."""
    return lambda lib, x, i, d, *a, **k: getattr(x, name)(d, i, *a, **k)


def along(draw: Draw) -> Sample:
    shape = sized(draw)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    at = tuple(
        draw(st.integers(1, 4)) if i == d % len(shape) else draw(st.sampled_from([1, n])) for i, n in enumerate(shape)
    )
    return Sample((array(draw, shape), integers(draw, at, 0, shape[d])), (d,))


def np_along(x: np.ndarray, i: np.ndarray, d: int) -> np.ndarray:
    at = np.broadcast_shapes(*[tuple(1 if j == d % x.ndim else n for j, n in enumerate(t.shape)) for t in (x, i)])
    return np.take_along_axis(
        x, np.broadcast_to(i, tuple(i.shape[d] if j == d % x.ndim else n for j, n in enumerate(at))), d
    )


def taken(draw: Draw) -> Sample:
    shape = sized(draw, 0)
    n = int(np.prod(shape))
    return Sample((array(draw, shape), integers(draw, shapes(draw), -n, n)))


def selected(draw: Draw) -> Sample:
    shape = sized(draw)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    return Sample((array(draw, shape), integers(draw, (draw(st.integers(0, 4)),), 0, shape[d])), (d,))


def masked(draw: Draw) -> Sample:
    a, b = broadcastable(draw)
    return Sample((array(draw, a), booleans(draw, b)))


def np_masked_select(x: np.ndarray, m: np.ndarray) -> np.ndarray:
    x, m = np.broadcast_arrays(x, m)
    return x[m]


def sourced(draw: Draw) -> Sample:
    a, b = broadcastable(draw)
    m = booleans(draw, b)
    count = int(np.broadcast_to(m, np.broadcast_shapes(a, b)).sum())
    return Sample((array(draw, a), m, array(draw, (count + draw(st.integers(1, 2)),))))


def np_masked_scatter(x: np.ndarray, m: np.ndarray, s: np.ndarray) -> np.ndarray:
    m = np.broadcast_to(m, np.broadcast_shapes(x.shape, m.shape))
    out = np.broadcast_to(x, m.shape).copy()
    out[m] = s.reshape(-1)[: m.sum()]
    return out


def sparse(draw: Draw) -> Sample:
    x = array(draw, shapes(draw))
    return Sample((np.where(booleans(draw, x.shape), x, 0),))


def static(draw: Draw) -> Sample:
    x = sparse(draw).arrays[0]
    return Sample(
        (x if x.ndim else x.reshape(1),), (), {"size": draw(st.integers(0, 8)), "fill_value": draw(st.integers(-2, 3))}
    )


def np_nonzero_static(x: np.ndarray, size: int, fill_value: int) -> np.ndarray:
    found = np.argwhere(x)[:size]
    return np.concatenate([found, np.full((size - len(found), x.ndim), fill_value)])


def classes(draw: Draw) -> Sample:
    shape = shapes(draw, empty=False)
    return Sample((integers(draw, shape, 0, 5),), (draw(st.sampled_from([5, 7])),))


def read_by_mask(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    n = draw(st.integers(1, len(shape)))
    return Sample((array(draw, shape), booleans(draw, shape[:n])))


def read_inner_mask(draw: Draw) -> Sample:
    shape = shapes(draw, 2)
    return Sample((array(draw, shape), booleans(draw, shape[1:])))


def mask_and_index(draw: Draw) -> Sample:
    m = np.zeros(5, bool)
    m[draw(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True))] = True
    return Sample((array(draw, (5, 3, 2)), m, integers(draw, (2,), -3, 3)))


def read(f: Any):
    return lambda lib, *a: f(*a)


CASES = [
    Case("Tensor.gather", np_gather, gathered, call=by_dim("gather"), dtypes=("float32", "float64", "float16")),
    Case("Tensor.gather", lambda x, i, d: x, lambda draw: Sample((array(draw, ()), np.zeros((), np.int64)), (0,)),
         variant="0-d", call=by_dim("gather")),
    Case("Tensor.take_along_dim", np_along, along),
    Case("Tensor.take_along_dim", lambda x, i: x.reshape(-1)[i.reshape(-1)],
         lambda draw: Sample((array(draw, (2, 3)), integers(draw, shapes(draw, 1), 0, 6))), variant="flat"),
    Case("Tensor.take", lambda x, i: x.reshape(-1)[i], taken),
    Case("Tensor.index_select", lambda x, i, d: np.take(x, i, d), selected, call=by_dim("index_select")),
    Case("Tensor.masked_select", np_masked_select, masked),
    Case("Tensor.masked_scatter", np_masked_scatter, sourced, call=lambda lib, x, m, s: x.masked_scatter(m, s)),
    Case("Tensor.nonzero", np.argwhere, sparse, grad=False),
    Case("Tensor.nonzero", lambda x: tuple(np.nonzero(x)), lambda draw: Sample((array(draw, shapes(draw, 1)),)),
         variant="tuple", grad=False, call=lambda lib, x: x.nonzero(as_tuple=True)),
    Case("Tensor.argwhere", np.argwhere, sparse, grad=False),
    Case("Tensor.nonzero_static", np_nonzero_static, static, grad=False),
    Case("functional.one_hot", lambda i, n: np.eye(n, dtype=np.int64)[i], classes, grad=False),
    Case("functional.one_hot", lambda i: np.eye(i.max() + 1, dtype=np.int64)[i],
         lambda draw: Sample((classes(draw).arrays[0],)), variant="counted", grad=False),
    Case("Tensor.__getitem__", lambda x, m: x[m], read_by_mask, variant="mask", call=read(lambda x, m: x[m])),
    Case("Tensor.__getitem__", lambda x, m: x[:, m], read_inner_mask, variant="inner mask",
         call=read(lambda x, m: x[:, m])),
    Case("Tensor.__getitem__", lambda x, m, i: x[m, i], mask_and_index, variant="mask and index",
         call=read(lambda x, m, i: x[m, i])),
    Case("Tensor.__getitem__", lambda x, i: x[:, i],
         lambda draw: Sample((array(draw, (2, 4, 3)), integers(draw, shapes(draw, 0, 2), -4, 4))), variant="index",
         call=read(lambda x, i: x[:, i])),
]  # fmt: skip
