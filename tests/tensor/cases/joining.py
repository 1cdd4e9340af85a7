"""Joining, splitting, repeating, padding, grids."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, shapes


def joined(name: str):
    return lambda lib, *xs, **k: (
        getattr(lib.top, name)(list(xs[:-1]), xs[-1])
        if isinstance(xs[-1], int)
        else getattr(lib.top, name)(list(xs), **k)
    )


def parts(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(1, 4)))]
    return Sample(
        tuple(array(draw, tuple(n if i == d % len(shape) else s for i, s in enumerate(shape))) for n in sizes), (d,)
    )


def stacked(draw: Draw) -> Sample:
    shape = shapes(draw)
    return Sample(
        tuple(array(draw, shape) for _ in range(draw(st.integers(1, 3)))),
        (draw(st.integers(-len(shape) - 1, len(shape))),),
    )


def alike(min_dims: int = 0, max_dims: int = 3):
    def samples(draw: Draw) -> Sample:
        shape = shapes(draw, min_dims, max_dims)
        return Sample(tuple(array(draw, shape) for _ in range(draw(st.integers(1, 3)))))

    return samples


def cut(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    return Sample((array(draw, shape),), (draw(st.integers(1, 4)), d))


def np_split(x: np.ndarray, size: Any, d: int = 0) -> tuple[np.ndarray, ...]:
    n = x.shape[d]
    if isinstance(size, int):
        return tuple(np.take(x, range(i, min(i + size, n)), d) for i in range(0, max(n, 1), size))
    ends = np.cumsum(size)
    return tuple(np.take(x, range(e - s, e), d) for s, e in zip(size, ends))


def np_chunk(x: np.ndarray, k: int, d: int) -> tuple[np.ndarray, ...]:
    return np_split(x, -(-x.shape[d] // k), d) if x.shape[d] else (x,) * k


def listed_sizes(draw: Draw) -> Sample:
    sizes = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(1, 3)))]
    return Sample((array(draw, (2, sum(sizes))),), (sizes, draw(st.sampled_from([1, -1]))))


def cut_at(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    where = draw(st.integers(1, 4)) if draw(st.booleans()) else tuple(draw(st.lists(st.integers(-3, 7), max_size=3)))
    return Sample((array(draw, shape),), (where, d))


def evenly(at: int, ndim: int):
    def samples(draw: Draw) -> Sample:
        shape = tuple(4 if i == at else draw(st.integers(0, 3)) for i in range(ndim))
        return Sample((array(draw, shape),), (draw(st.sampled_from([1, 2, 4, (1, 3)])),))

    return samples


def tuple_of(f):
    return lambda *a: tuple(f(*a))


def unbound(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    return Sample((array(draw, shape),), (draw(st.integers(-len(shape), len(shape) - 1)),))


def repeats(draw: Draw) -> Sample:
    shape = shapes(draw, 0, 2)
    times = tuple(draw(st.integers(0, 3)) for _ in range(len(shape) + draw(st.integers(0, 1))))
    return Sample((array(draw, shape),), (times or (2,),))


def tiles(draw: Draw) -> Sample:
    return Sample(
        (array(draw, shapes(draw, 0, 2)),), (tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))),)
    )


def np_repeat(x: np.ndarray, times: tuple[int, ...]) -> np.ndarray:
    return np.tile(x, times)


def interleaved(draw: Draw) -> Sample:
    shape = shapes(draw)
    dim = None if not shape or draw(st.booleans()) else draw(st.integers(-len(shape), len(shape) - 1))
    return Sample((array(draw, shape),), (draw(st.integers(0, 3)),), {"dim": dim})


def interleaved_by(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    d = draw(st.integers(-len(shape), len(shape) - 1))
    counts = np.array([draw(st.integers(0, 3)) for _ in range(shape[d])], np.int64)
    return Sample(
        (array(draw, shape), counts),
        (),
        {"dim": d, **({"output_size": int(counts.sum())} if draw(st.booleans()) else {})},
    )


def rolls(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    if draw(st.booleans()):
        return Sample((array(draw, shape),), (draw(st.integers(-7, 7)),))
    n = draw(st.integers(1, len(shape)))
    dims = tuple(draw(st.permutations(range(-len(shape), 0)))[:n])
    return Sample((array(draw, shape),), (tuple(draw(st.integers(-7, 7)) for _ in dims), dims))


def padded(draw: Draw) -> Sample:
    shape = shapes(draw, 1)
    n = draw(st.integers(1, len(shape)))
    pairs = []
    for i in range(n):
        size = shape[-1 - i]
        before = draw(st.integers(-size, 3))
        pairs += [before, draw(st.integers(-(size + min(before, 0)), 3))]
    return Sample(
        (array(draw, shape),),
        (tuple(pairs),),
        {"value": draw(st.sampled_from([0.0, 2.5]))} if draw(st.booleans()) else {},
    )


def np_pad(x: np.ndarray, pad: tuple[int, ...], mode: str = "constant", value: float = 0.0) -> np.ndarray:
    pairs = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    grow = [(max(b, 0), max(a, 0)) for b, a in pairs]

    def cropped(x: np.ndarray) -> np.ndarray:
        return x[tuple(slice(max(-b, 0), d - max(-a, 0)) for (b, a), d in zip(pairs, x.shape))]

    if mode == "constant":
        return np.pad(cropped(x), grow, constant_values=value)
    if mode == "circular":
        return np.pad(cropped(x), grow, mode="wrap")
    return cropped(np.pad(x, grow, mode={"reflect": "reflect", "replicate": "edge"}[mode]))


def edges(mode: str):
    def samples(draw: Draw) -> Sample:
        spatial = [draw(st.integers(2, 4)) for _ in range(draw(st.integers(1, 2)))]
        most = [n - 1 if mode == "reflect" else n if mode == "circular" else 5 for n in spatial]
        pad: list[int] = []
        for n, m in zip(reversed(spatial), reversed(most)):
            crop = draw(st.integers(0, n - 1))  # at one end; the other end grows or is cropped too
            first = -crop if crop else draw(st.integers(0, m))
            kept = n - crop
            second = draw(st.integers(1 - kept, kept if mode == "circular" else m))
            if second < 0 and mode == "circular":
                first = min(first, kept + second)
            pad += [first, second] if draw(st.booleans()) else [second, first]
        return Sample((array(draw, (draw(st.integers(0, 2)) or 1, 2, *spatial)),), (tuple(pad),), {"mode": mode})

    return samples


def vectors(empty: int = 0, most: int = 3):
    return lambda draw: Sample(
        tuple(array(draw, (draw(st.integers(empty, 4)),)) for _ in range(draw(st.integers(1, most))))
    )


def blocks(draw: Draw) -> Sample:
    return Sample(tuple(array(draw, shapes(draw, 0, 2)) for _ in range(draw(st.integers(1, 3)))))


def np_block_diag(*xs: np.ndarray) -> np.ndarray:
    xs = tuple(np.atleast_2d(x) for x in xs)
    out = np.zeros((sum(x.shape[0] for x in xs), sum(x.shape[1] for x in xs)), xs[0].dtype)
    r = c = 0
    for x in xs:
        out[r : r + x.shape[0], c : c + x.shape[1]] = x
        r, c = r + x.shape[0], c + x.shape[1]
    return out


def chosen(draw: Draw) -> Sample:
    return Sample(
        (array(draw, (draw(st.integers(0, 5)),)),),
        (),
        {"r": draw(st.integers(1, 3)), "with_replacement": draw(st.booleans())},
    )


def np_combinations(x: np.ndarray, r: int, with_replacement: bool) -> np.ndarray:
    rows = list((combinations_with_replacement if with_replacement else combinations)(range(len(x)), r))
    return x[np.array(rows, int).reshape(-1, r)]


def np_cartesian(*xs: np.ndarray) -> np.ndarray:
    return xs[0] if len(xs) == 1 else np.array(list(product(*xs))).reshape(-1, len(xs))


def np_column_stack(*xs: np.ndarray) -> np.ndarray:
    return np.concatenate([x.reshape(-1, 1) if x.ndim < 2 else x for x in xs], 1)


CASES = [
    *[Case(f"torch.{n}", lambda *a: np.concatenate(a[:-1], a[-1]), parts, call=joined(n),
           dtypes=("float32", "float16", "float64")) for n in ("cat", "concat", "concatenate")],
    Case("torch.stack", lambda *a: np.stack(a[:-1], a[-1]), stacked, call=joined("stack")),
    Case("torch.hstack", lambda *a: np.hstack(a), alike(), call=joined("hstack")),
    Case("torch.vstack", lambda *a: np.vstack(a), alike(), call=joined("vstack")),
    Case("torch.row_stack", lambda *a: np.vstack(a), alike(),
         call=lambda lib, *xs: (lib.top.vstack if lib.name == "torch" else lib.top.row_stack)(list(xs))),
    Case("torch.dstack", lambda *a: np.dstack(a), alike(), call=joined("dstack")),
    Case("torch.column_stack", np_column_stack, alike(), call=joined("column_stack")),
    Case("torch.block_diag", np_block_diag, blocks),
    Case("Tensor.split", np_split, cut),
    Case("Tensor.split", np_split, listed_sizes, variant="sizes"),
    Case("Tensor.split_with_sizes", np_split, listed_sizes),
    Case("Tensor.chunk", np_chunk, cut),
    Case("Tensor.unsafe_split", np_split, cut),
    Case("Tensor.unsafe_split_with_sizes", np_split, listed_sizes),
    Case("Tensor.unsafe_chunk", np_chunk, cut),
    Case("Tensor.tensor_split", lambda x, k, d: tuple(np.array_split(x, k, d)), cut_at),
    Case("Tensor.hsplit", tuple_of(np.hsplit), evenly(1, 2)),
    Case("Tensor.hsplit", tuple_of(np.hsplit), evenly(0, 1), variant="1d"),
    Case("Tensor.vsplit", tuple_of(np.vsplit), evenly(0, 2)),
    Case("Tensor.dsplit", tuple_of(np.dsplit), evenly(2, 3)),
    Case("Tensor.unbind", lambda x, d: tuple(np.moveaxis(x, d, 0)), unbound),
    *[Case(f"torch.{n}", lambda *xs, n=n: getattr(np, n)(*xs) if len(xs) == 1 else tuple(getattr(np, n)(*xs)),
           lambda draw: Sample(tuple(array(draw, shapes(draw)) for _ in range(draw(st.integers(1, 3))))))
      for n in ("atleast_1d", "atleast_2d", "atleast_3d")],
    Case("Tensor.repeat", np_repeat, repeats),
    Case("Tensor.tile", np_repeat, tiles),
    Case("Tensor.repeat_interleave", lambda x, n, dim: np.repeat(x, n, dim), interleaved),
    Case("Tensor.repeat_interleave", lambda x, n, dim, output_size=0: np.repeat(x, n, dim), interleaved_by,
         variant="counts"),
    Case("Tensor.roll", np.roll, rolls),
    Case("functional.pad", np_pad, padded),
    *[Case("functional.pad", np_pad, edges(m), variant=m) for m in ("reflect", "replicate", "circular")],
    Case("torch.meshgrid", lambda *xs, indexing: tuple(np.meshgrid(*xs, indexing=indexing)),
         lambda draw: Sample(vectors()(draw).arrays, (), {"indexing": draw(st.sampled_from(["ij", "xy"]))})),
    Case("torch.cartesian_prod", np_cartesian, vectors()),
    Case("torch.combinations", np_combinations, chosen),
]  # fmt: skip
