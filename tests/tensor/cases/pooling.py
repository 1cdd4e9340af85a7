"""Cases of pooling, against loops over windows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, distinct
from tests.tensor.cases.convolution import tuples

Boxes = list[list[tuple[list[int], int]]]  # per dim and output: (positions inside, how many count with padding)


def boxes(
    sizes: tuple[int, ...],
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Boxes:
    n = len(sizes)
    k, p, d = tuples(kernel_size, n), tuples(padding, n), tuples(dilation, n)
    s = k if stride is None else tuples(stride, n)
    out: Boxes = []
    for i in range(n):
        room = sizes[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1
        count = (-(-room // s[i]) if ceil_mode else room // s[i]) + 1
        if ceil_mode and (count - 1) * s[i] >= sizes[i] + p[i]:
            count -= 1
        mine = []
        for o in range(count):
            at = [o * s[i] - p[i] + j * d[i] for j in range(k[i])]
            mine.append(([a for a in at if 0 <= a < sizes[i]], sum(a < sizes[i] + p[i] for a in at)))
        out.append(mine)
    return out


def over(x: np.ndarray, n: int, parts: Boxes, f: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """f(the box of every output, how many elements count with padding)."""
    shape = tuple(len(p) for p in parts)
    first: np.ndarray | None = None
    for at in product(*map(range, shape)):
        box = x[(..., *np.ix_(*(parts[i][a][0] for i, a in enumerate(at))))]
        value = f(box, prod(parts[i][a][1] for i, a in enumerate(at)))
        if first is None:
            first = np.zeros((*x.shape[: x.ndim - n], *shape), value.dtype)
        first[(..., *at)] = value
    assert first is not None
    return first


def dims(x: np.ndarray, n: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - n, x.ndim))


def max_pool(n: int, indices: bool) -> Callable[..., Any]:
    def f(
        x: np.ndarray,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        return largest(x, n, boxes(x.shape[-n:], kernel_size, stride, padding, dilation, ceil_mode), indices)

    return f


def largest(x: np.ndarray, n: int, parts: Boxes, indices: bool) -> Any:
    values = over(x, n, parts, lambda box, _: box.max(dims(box, n)))
    if not indices:
        return values
    flat = np.broadcast_to(np.arange(prod(x.shape[-n:])).reshape(x.shape[-n:]), x.shape)
    at = over(
        np.stack([x, flat]),
        n,
        parts,
        lambda box, _: np.take_along_axis(
            box[1].reshape(*box.shape[1:-n], -1), box[0].reshape(*box.shape[1:-n], -1).argmax(-1)[..., None], -1
        )[..., 0][None].repeat(2, 0),
    )
    return values, at[0].astype(np.int64)


def avg_pool(n: int) -> Callable[..., np.ndarray]:
    def f(
        x: np.ndarray,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> np.ndarray:
        parts = boxes(x.shape[-n:], kernel_size, stride, padding, 1, ceil_mode)
        count = lambda box, padded: divisor_override or (padded if count_include_pad else prod(box.shape[-n:]))  # noqa: E731
        return over(x, n, parts, lambda box, padded: box.sum(dims(box, n)) / count(box, padded))

    return f


def lp_pool(n: int) -> Callable[..., np.ndarray]:
    return lambda x, p, kernel_size, stride=None: over(
        x, n, boxes(x.shape[-n:], kernel_size, stride), lambda box, _: (box**p).sum(dims(box, n)) ** (1 / p)
    )


def adaptive(x: np.ndarray, n: int, output_size: Any) -> Boxes:
    outs = [
        s if o is None else o
        for o, s in zip(output_size if isinstance(output_size, tuple) else (output_size,) * n, x.shape[-n:])
    ]
    return [[(list(range(i * s // o, -(-(i + 1) * s // o))), 0) for i in range(o)] for o, s in zip(outs, x.shape[-n:])]


def max_unpool(n: int) -> Callable[..., np.ndarray]:
    def f(x: np.ndarray, indices: np.ndarray, kernel_size: int, output_size: tuple[int, ...]) -> np.ndarray:
        out = np.zeros((*x.shape[:-n], prod(output_size)), x.dtype)
        np.put_along_axis(out, indices.reshape(*x.shape[:-n], -1), x.reshape(*x.shape[:-n], -1), -1)
        return out.reshape(*x.shape[:-n], *output_size)

    return f


def windows(n: int, kind: str) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        lead = (2, 2)[draw(st.integers(0, 1)) :]
        size = tuple(draw(st.integers(3, 6 if n < 3 else 4)) for _ in range(n))
        kwargs: dict[str, Any] = {"kernel_size": draw(st.integers(1, 3))}
        if draw(st.booleans()):
            kwargs["stride"] = draw(st.integers(1, 3))
        if kind != "lp":
            if draw(st.booleans()):
                kwargs["padding"] = draw(st.integers(0, kwargs["kernel_size"] // 2))
            if draw(st.booleans()):
                kwargs["ceil_mode"] = True
        if kind == "avg" and draw(st.booleans()):
            kwargs["count_include_pad"] = False
        if kind == "avg" and n > 1 and draw(st.booleans()):
            kwargs["divisor_override"] = 3
        if kind == "max" and kwargs["kernel_size"] == 2 and draw(st.booleans()):
            kwargs["dilation"] = 2
        x = (
            distinct(draw, (*lead, *size))
            if kind == "max"
            else array(draw, (*lead, *size), low=0.5 if kind == "lp" else -2, high=2)
        )
        return Sample((x,), (draw(st.sampled_from([1.0, 2.0, 3.0])),) if kind == "lp" else (), kwargs)

    return samples


def parts(n: int) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        lead = (2, 2)[draw(st.integers(0, 1)) :]
        size = tuple(draw(st.integers(1, 6 if n < 3 else 4)) for _ in range(n))
        out: Any = (
            draw(st.integers(1, 5))
            if draw(st.booleans())
            else tuple(draw(st.one_of(st.integers(1, 4), st.none())) for _ in range(n))
        )
        return Sample((distinct(draw, (*lead, *size)),), (out,))

    return samples


def unpooled(n: int) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        size = tuple(2 * draw(st.integers(1, 2)) for _ in range(n))
        x = distinct(draw, (2, 2, *size))
        values, indices = largest(x, n, boxes(size, 2), True)
        return Sample((values, indices), (2,), {"output_size": size})

    return samples


def fractional(n: int) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        size = tuple(draw(st.integers(4, 6)) for _ in range(n))
        u = np.random.default_rng(draw(st.integers(0, 1000))).random((2, 2, n))
        return Sample(
            (distinct(draw, (2, 2, *size)),),
            (2,),
            {"output_size": tuple(draw(st.integers(1, s - 1)) for s in size), "_random_samples": u},
        )

    return samples


def np_fractional(n: int) -> Callable[..., Any]:
    def f(x: np.ndarray, kernel: int, output_size: tuple[int, ...], _random_samples: np.ndarray) -> np.ndarray:
        out = np.zeros((*x.shape[:2], *output_size), x.dtype)
        for b, c in np.ndindex(2, 2):
            here: Boxes = []
            for i, (size, o) in enumerate(zip(x.shape[2:], output_size)):
                u = _random_samples[b, c, i if n == 3 else n - 1 - i]
                alpha = (size - kernel) / (o - 1) if o > 1 else 0.0
                starts = [int((j + u) * alpha) - int(u * alpha) for j in range(o - 1)] + [size - kernel]
                here.append([(list(range(s, s + kernel)), 0) for s in starts])
            out[b, c] = largest(x[b, c], n, here, False)
        return out

    return f


def fractional_call(name: str) -> Callable[..., Any]:
    """The uniform numbers become a tensor of the same library."""
    return lambda lib, x, kernel, output_size, _random_samples: getattr(lib.functional, name)(
        x, kernel, output_size=output_size, _random_samples=x.new_tensor(_random_samples)
    )


N = (1, 2, 3)
CASES = [
    *(Case(f"functional.max_pool{n}d", max_pool(n, False), windows(n, "max")) for n in N),
    *(Case(f"functional.max_pool{n}d_with_indices", max_pool(n, True), windows(n, "max")) for n in N),
    *(Case(f"functional.max_unpool{n}d", max_unpool(n), unpooled(n)) for n in N),
    *(Case(f"functional.avg_pool{n}d", avg_pool(n), windows(n, "avg")) for n in N),
    *(Case(f"functional.lp_pool{n}d", lp_pool(n), windows(n, "lp")) for n in N),
    *(Case(f"functional.adaptive_avg_pool{n}d",
           lambda x, o, n=n: over(x, n, adaptive(x, n, o), lambda b, _: b.mean(dims(b, n))), parts(n)) for n in N),
    *(Case(f"functional.adaptive_max_pool{n}d", lambda x, o, n=n: largest(x, n, adaptive(x, n, o), False), parts(n))
      for n in N),
    *(Case(f"functional.adaptive_max_pool{n}d_with_indices", lambda x, o, n=n: largest(x, n, adaptive(x, n, o), True),
           parts(n)) for n in N),
    *(Case(f"functional.fractional_max_pool{n}d", np_fractional(n), fractional(n),
           call=fractional_call(f"fractional_max_pool{n}d")) for n in (2, 3)),
    *(Case(f"functional.fractional_max_pool{n}d_with_indices", np_fractional(n), fractional(n),
           call=lambda lib, x, *a, n=n, **k:
               fractional_call(f"fractional_max_pool{n}d_with_indices")(lib, x, *a, **k)[0])
      for n in (2, 3)),
]  # fmt: skip
