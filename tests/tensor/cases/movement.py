"""Shapes, orders of dims, views."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, broadcastable, shapes


def some(min_dims: int = 0, *args: Any):
    """One tensor of at least `min_dims` dims, with fixed arguments."""
    return lambda draw: Sample((array(draw, shapes(draw, min_dims)),), args)


def exact(draw: Draw, sizes: tuple[int, ...]) -> np.ndarray:
    return array(draw, sizes)


def flatten(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    a = draw(st.integers(0, len(shape) - 1))
    b = draw(st.integers(a, len(shape) - 1))
    return Sample((array(draw, shape),), (a, b - len(shape) if draw(st.booleans()) else b))


def np_flatten(x: np.ndarray, a: int = 0, b: int = -1) -> np.ndarray:
    b %= x.ndim
    return x.reshape(*x.shape[:a], prod(x.shape[a : b + 1]), *x.shape[b + 1 :])


def unflatten(draw: Draw) -> Sample:
    shape, d = shapes(draw, 1, 2), 0
    x = array(draw, (6, *shape))
    return Sample(
        (x,), (d - x.ndim if draw(st.booleans()) else d, draw(st.sampled_from([(2, 3), (-1, 2), (6,), (1, 6)])))
    )


def np_unflatten(x: np.ndarray, d: int, s: tuple[int, ...]) -> np.ndarray:
    return x.reshape(*(3 if n == -1 else n for n in s), *x.shape[1:])  # NumPy does not know it where another dim is 0


def squeeze(draw: Draw) -> Sample:
    shape = tuple(draw(st.lists(st.sampled_from([1, 1, 2, 0]), min_size=1, max_size=4)))
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return Sample((array(draw, shape),))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    return Sample((array(draw, shape),), (dims[0] - len(shape) if kind == 1 else tuple(dims),))


def np_squeeze(x: np.ndarray, dim: Any = None) -> np.ndarray:
    dims = range(x.ndim) if dim is None else [d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    return x.reshape(tuple(s for i, s in enumerate(x.shape) if not (i in dims and s == 1)))


def place(draw: Draw, extra: int = 0) -> Sample:
    shape = shapes(draw, 0 if extra else 1)
    return Sample((array(draw, shape),), (draw(st.integers(-len(shape) - extra, len(shape) + extra - 1)),))


def two_dims(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    dim = st.integers(-len(shape), len(shape) - 1)
    return Sample((array(draw, shape),), (draw(dim), draw(dim)))


def order(draw: Draw) -> Sample:
    shape = shapes(draw)
    dims = draw(st.permutations(range(len(shape))))
    return Sample((array(draw, shape),), (tuple(d - len(shape) if draw(st.booleans()) else d for d in dims),))


def move(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    n = draw(st.integers(1, len(shape)))
    return Sample((array(draw, shape),), tuple(tuple(draw(st.permutations(range(len(shape))))[:n]) for _ in range(2)))


def expanded(draw: Draw) -> Sample:
    small, big = broadcastable(draw)
    whole = np.broadcast_shapes(small, big)
    return Sample(
        (array(draw, small),),
        (
            tuple(
                -1 if len(whole) - i <= len(small) and small[i - len(whole)] == d and draw(st.booleans()) else d
                for i, d in enumerate(whole)
            ),
        ),
    )


def np_expand(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(x, tuple(x.shape[i - len(shape)] if d == -1 else d for i, d in enumerate(shape)))


def summed(draw: Draw) -> Sample:
    small, big = broadcastable(draw)
    return Sample((array(draw, np.broadcast_shapes(small, big)),), (small,))


def np_sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, d in enumerate(shape) if d == 1 and x.shape[i] != 1), keepdims=True).reshape(shape)


def flips(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    dims = draw(st.lists(st.integers(0, len(shape) - 1), max_size=len(shape), unique=True))
    return Sample((array(draw, shape),), (tuple(d - len(shape) if draw(st.booleans()) else d for d in dims),))


def turned(draw: Draw) -> Sample:
    shape = shapes(draw, 2)
    dims = draw(st.permutations(range(len(shape))))[:2]
    return Sample((array(draw, shape),), (draw(st.integers(-5, 5)), list(dims)))


def ranged(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    start = draw(st.integers(0, shape[d]))
    return Sample((array(draw, shape),), (d, start, draw(st.integers(0, shape[d] - start))))


def np_narrow(x: np.ndarray, d: int, start: int, length: int) -> np.ndarray:
    return np.take(x, range(start, start + length), d)


def one_place(draw: Draw) -> Sample:
    shape = list(shapes(draw, 1))
    d = draw(st.integers(-len(shape), len(shape) - 1))
    shape[d] = max(shape[d], 1)
    return Sample((array(draw, tuple(shape)),), (d, draw(st.integers(-shape[d], shape[d] - 1))))


def windows(draw: Draw) -> Sample:
    shape = list(shapes(draw, 1))
    d = draw(st.integers(-len(shape), len(shape) - 1))
    shape[d] = draw(st.integers(1, 7))
    return Sample((array(draw, tuple(shape)),), (d, draw(st.integers(1, shape[d])), draw(st.integers(1, 4))))


def np_unfold(x: np.ndarray, d: int, size: int, step: int) -> np.ndarray:
    return np.moveaxis(
        np.stack([np.moveaxis(x, d, -1)[..., i : i + size] for i in range(0, x.shape[d] - size + 1, step)], -2),
        -2,
        d % x.ndim,
    )


def strided(draw: Draw) -> Sample:
    size = shapes(draw, 0, 3)
    stride = tuple(draw(st.integers(0, 3)) for _ in size)
    offset = draw(st.integers(0, 3))
    need = offset + 1 + sum(max(n - 1, 0) * s for n, s in zip(size, stride))
    return Sample((array(draw, (need,)),), (size, stride, offset))


def np_as_strided(x: np.ndarray, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray:
    at = np.full(size, offset)
    for i, s in enumerate(stride):
        at = at + (np.arange(size[i]) * s).reshape([-1 if j == i else 1 for j in range(len(size))])
    return x.reshape(-1)[at.reshape(size)]


def nested(draw: Draw) -> Sample:
    """Strides of a permuted part of a larger array."""
    whole = tuple(draw(st.integers(1, 4)) for _ in range(3))
    stride = (whole[1] * whole[2], whole[2], 1)
    part = [draw(st.integers(1, n)) for n in whole]
    start = [draw(st.integers(0, n - p)) for n, p in zip(whole, part)]
    order = draw(st.permutations(range(3)))
    return Sample(
        (array(draw, whole),),
        (tuple(part[i] for i in order), tuple(stride[i] for i in order), sum(a * s for a, s in zip(start, stride))),
    )


def strided_source(draw: Draw) -> Sample:
    s = nested(draw)
    return Sample((*s.arrays, array(draw, s.args[0])), s.args)


def np_as_strided_scatter(x: np.ndarray, src: np.ndarray, *args: Any) -> np.ndarray:
    out = x.copy()
    out.reshape(-1)[np_as_strided(np.arange(x.size), *args).reshape(-1)] = src.reshape(-1)
    return out


def diagonals(draw: Draw) -> Sample:
    shape = shapes(draw, 2, 4)
    a, b = draw(st.permutations(range(len(shape))))[:2]
    return Sample((array(draw, shape),), (draw(st.integers(-4, 4)), a, b - len(shape)))


def np_diagonal(x: np.ndarray, offset: int, a: int, b: int) -> np.ndarray:
    return np.diagonal(x, offset, a, b)


def embedded(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    a, b = draw(st.permutations(range(len(shape) + 1)))[:2]
    return Sample((array(draw, shape),), (draw(st.integers(-3, 3)), a, b))


def np_diag_embed(x: np.ndarray, offset: int = 0, a: int = -2, b: int = -1) -> np.ndarray:
    n = x.shape[-1] + abs(offset)
    out = np.zeros((*x.shape[:-1], n, n), x.dtype)
    i = np.arange(x.shape[-1])
    out[..., i + max(-offset, 0), i + max(offset, 0)] = x
    return np.moveaxis(out, (-2, -1), (a, b))


def matrix_or_vector(draw: Draw) -> Sample:
    return Sample((array(draw, shapes(draw, 1, 2)),), (draw(st.integers(-3, 3)),))


def np_diag(x: np.ndarray, k: int) -> np.ndarray:
    return np_diag_embed(x, k) if x.ndim == 1 else np.diagonal(x, k)


def matrices(draw: Draw) -> Sample:
    return Sample((array(draw, shapes(draw, 2)),), (draw(st.integers(-4, 4)),))


def filled(draw: Draw) -> Sample:
    shape = (3,) * 3 if draw(st.booleans()) else (draw(st.integers(1, 9)), draw(st.integers(2, 4)))
    return Sample((array(draw, shape),), (2.5, draw(st.booleans())))


def np_fill_diagonal(x: np.ndarray, value: float, wrap: bool) -> np.ndarray:
    out = x.copy()
    np.fill_diagonal(out, value, wrap)
    return out


def written_diagonal(draw: Draw) -> Sample:
    s = diagonals(draw)
    return Sample((s.arrays[0], array(draw, np_diagonal(s.arrays[0], *s.args).shape)), s.args)


def np_diagonal_scatter(x: np.ndarray, src: np.ndarray, offset: int, a: int, b: int) -> np.ndarray:
    out = x.copy()
    at = np.diagonal(np.arange(x.size).reshape(x.shape), offset, a, b)
    out.reshape(-1)[at.reshape(-1)] = src.reshape(-1)
    return out


def written_place(draw: Draw) -> Sample:
    s = one_place(draw)
    return Sample((s.arrays[0], array(draw, np.take(s.arrays[0], s.args[1], s.args[0]).shape)), s.args)


def np_select_scatter(x: np.ndarray, src: np.ndarray, d: int, i: int) -> np.ndarray:
    out = x.copy()
    np.moveaxis(out, d, 0)[i] = src
    return out


def written_slice(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    edge = st.none() | st.integers(-6, 6)
    start, end, step = draw(edge), draw(edge), draw(st.integers(1, 3))
    x = array(draw, shape)
    return Sample(
        (x, array(draw, np.moveaxis(np.moveaxis(x, d, 0)[start:end:step], 0, d).shape)), (d, start, end, step)
    )


def np_slice_scatter(
    x: np.ndarray, src: np.ndarray, d: int, start: int | None, end: int | None, step: int
) -> np.ndarray:
    out = x.copy()
    np.moveaxis(out, d, 0)[start:end:step] = np.moveaxis(src, d, 0)
    return out


def same(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    return x.reshape(other.shape)


def reshaped(draw: Draw) -> Sample:
    return Sample((array(draw, (2, 6)), array(draw, draw(st.sampled_from([(12,), (3, 4), (2, 3, 2)])))))


CASES = [
    Case(
        "Tensor.reshape",
        lambda x, s: x.reshape(s),
        lambda draw: Sample((array(draw, (2, 6)),), (draw(st.sampled_from([(12,), (3, -1), (1, 12, 1)])),)),
    ),
    Case("Tensor.reshape_as", same, reshaped),
    Case("Tensor.view_as", same, reshaped),
    Case("Tensor.flatten", np_flatten, flatten),
    Case("Tensor.ravel", np.ravel, some()),
    Case("Tensor.unflatten", np_unflatten, unflatten),
    Case("Tensor.squeeze", np_squeeze, squeeze),
    Case("Tensor.unsqueeze", np.expand_dims, lambda draw: place(draw, 1)),
    Case("Tensor.transpose", np.swapaxes, two_dims),
    Case("Tensor.swapaxes", np.swapaxes, two_dims),
    Case("Tensor.swapdims", np.swapaxes, two_dims),
    Case("Tensor.permute", np.transpose, order),
    Case("Tensor.movedim", np.moveaxis, move),
    Case("Tensor.moveaxis", np.moveaxis, move),
    Case("Tensor.t", np.transpose, lambda draw: Sample((array(draw, shapes(draw, 0, 2)),))),
    Case("Tensor.adjoint", lambda x: np.swapaxes(x, -1, -2), some(2)),
    *[
        Case(f"Tensor.{n}", lambda x: np.swapaxes(x, -1, -2), some(2), call=lambda lib, x, n=n: getattr(x, n))
        for n in ("mT", "mH")
    ],
    *[
        Case(
            f"Tensor.{n}",
            np.transpose,
            lambda draw: Sample((array(draw, shapes(draw, 2, 2)),)),
            call=lambda lib, x, n=n: getattr(x, n),
        )
        for n in ("T", "H")
    ],
    Case("Tensor.expand", np_expand, expanded),
    Case(
        "Tensor.expand_as",
        lambda x, y: np.broadcast_to(x, y.shape),
        lambda draw: Sample((lambda p: (array(draw, p[0]), array(draw, np.broadcast_shapes(*p))))(broadcastable(draw))),
    ),
    Case("Tensor.broadcast_to", np_expand, expanded),
    Case(
        "torch.broadcast_tensors",
        lambda *xs: tuple(np.broadcast_arrays(*xs)),
        lambda draw: Sample(tuple(array(draw, s) for s in broadcastable(draw, 3))),
    ),
    Case("Tensor.sum_to_size", np_sum_to, summed),
    Case("Tensor.flip", np.flip, flips),
    Case("Tensor.fliplr", np.fliplr, some(2)),
    Case("Tensor.flipud", np.flipud, some(1)),
    Case("Tensor.rot90", np.rot90, turned),
    Case("Tensor.narrow", np_narrow, ranged),
    Case("Tensor.narrow_copy", np_narrow, ranged),
    Case("Tensor.select", lambda x, d, i: np.take(x, i, d), one_place),
    Case("Tensor.select_scatter", np_select_scatter, written_place),
    Case("Tensor.slice_scatter", np_slice_scatter, written_slice),
    Case("Tensor.unfold", np_unfold, windows),
    Case("Tensor.as_strided", np_as_strided, strided),
    Case("Tensor.as_strided", np_as_strided, nested, variant="view"),
    Case("Tensor.as_strided_scatter", np_as_strided_scatter, strided_source),
    Case("Tensor.diagonal", np_diagonal, diagonals),
    Case("Tensor.diag", np_diag, matrix_or_vector),
    Case("Tensor.diag_embed", np_diag_embed, embedded),
    Case(
        "Tensor.diagflat",
        lambda x, k: np_diag_embed(x.reshape(-1), k),
        lambda draw: Sample((array(draw, shapes(draw, 0, 2)),), (draw(st.integers(-3, 3)),)),
    ),
    Case("Tensor.diagonal_scatter", np_diagonal_scatter, written_diagonal),
    Case(
        "Tensor.fill_diagonal_",
        np_fill_diagonal,
        filled,
        grad=False,
        call=lambda lib, x, v, wrap: x.clone().fill_diagonal_(v, wrap),
    ),
    *[
        Case(
            f"torch.{n}_indices",
            lambda r, c, k, n=n: np.stack(getattr(np, f"{n}_indices")(r, k, c)),
            lambda draw: Sample((), (draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(-4, 4)))),
            grad=False,
            shard=False,
        )
        for n in ("tril", "triu")
    ],
    Case("Tensor.triu", np.triu, matrices),
    Case("Tensor.tril", np.tril, matrices),
]
