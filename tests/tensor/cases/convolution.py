"""Cases of convolutions, against loops over windows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array


def tuples(x: Any, n: int) -> tuple[int, ...]:
    return (x,) * n if isinstance(x, int) else tuple(x)


def conv(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> np.ndarray:
    n = w.ndim - 2
    if x.ndim == n + 1:
        return conv(x[None], w, b, stride, padding, dilation, groups)[0]
    s, d = tuples(stride, n), tuples(dilation, n)
    if padding == "same":
        total = [dd * (k - 1) for dd, k in zip(d, w.shape[2:])]
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = [(p, p) for p in tuples(0 if padding == "valid" else padding, n)]
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    outs = [(x.shape[2 + i] - d[i] * (w.shape[2 + i] - 1) - 1) // s[i] + 1 for i in range(n)]
    out = np.zeros((x.shape[0], w.shape[0], *outs), np.result_type(x, w))
    per, into = x.shape[1] // groups, w.shape[0] // groups
    for at in product(*map(range, outs)):
        window = x[
            (
                slice(None),
                slice(None),
                *(slice(a * s[i], a * s[i] + d[i] * (w.shape[2 + i] - 1) + 1, d[i]) for i, a in enumerate(at)),
            )
        ]
        for g in range(groups):
            part = np.tensordot(
                window[:, g * per : (g + 1) * per],
                w[g * into : (g + 1) * into],
                (list(range(1, n + 2)), list(range(1, n + 2))),
            )
            out[(slice(None), slice(g * into, (g + 1) * into), *at)] = part
    return out if b is None else out + b.reshape(-1, *(1,) * n)


def conv_transpose(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> np.ndarray:
    n = w.ndim - 2
    s, p, o, d = (tuples(v, n) for v in (stride, padding, output_padding, dilation))
    full = [(x.shape[2 + i] - 1) * s[i] + d[i] * (w.shape[2 + i] - 1) + 1 + o[i] for i in range(n)]
    per, into = x.shape[1] // groups, w.shape[1]
    out = np.zeros((x.shape[0], into * groups, *full), np.result_type(x, w))
    for at in product(*map(range, x.shape[2:])):
        for k in product(*map(range, w.shape[2:])):
            place = tuple(at[i] * s[i] + k[i] * d[i] for i in range(n))
            for g in range(groups):
                out[(slice(None), slice(g * into, (g + 1) * into), *place)] += (
                    x[(slice(None), slice(g * per, (g + 1) * per), *at)]
                    @ w[(slice(g * per, (g + 1) * per), slice(None), *k)]
                )
    out = out[(slice(None), slice(None), *(slice(p[i], full[i] - p[i]) for i in range(n)))]
    return out if b is None else out + b.reshape(-1, *(1,) * n)


def inputs(n: int, transposed: bool = False) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        groups = draw(st.sampled_from([1, 1, 2]))
        cin, cout = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
        kernel = tuple(draw(st.integers(1, 3 if n < 3 else 2)) for _ in range(n))
        size = tuple(draw(st.integers(3, 6 if n < 3 else 4)) for _ in range(n))
        batch = draw(st.integers(1, 2))
        kwargs: dict[str, Any] = {"groups": groups}
        if draw(st.booleans()):
            kwargs["stride"] = draw(st.integers(1, 3))
        if draw(st.booleans()):
            kwargs["padding"] = (
                draw(st.integers(0, 1))
                if transposed
                else draw(
                    st.one_of(
                        st.integers(0, 2), st.sampled_from(["valid", *(["same"] if "stride" not in kwargs else [])])
                    )
                )
            )
        if all(k * 2 - 1 <= s for k, s in zip(kernel, size)) and draw(st.booleans()):
            kwargs["dilation"] = 2
        if transposed:
            if kwargs.get("stride", 1) > 1 and draw(st.booleans()):
                kwargs["output_padding"] = 1
            if "padding" in kwargs:
                kernel = tuple(max(k, 2) for k in kernel)
        w = (cin, cout // groups, *kernel) if transposed else (cout, cin // groups, *kernel)
        arrays = [array(draw, (batch, cin, *size), low=-1, high=1), array(draw, w, low=-1, high=1)]
        if draw(st.booleans()):
            arrays.append(array(draw, (cout,), low=-1, high=1))
        return Sample(tuple(arrays), (), kwargs)

    return samples


CASES = [
    *(Case(f"functional.conv{n}d", conv, inputs(n)) for n in (1, 2, 3)),
    *(Case(f"functional.conv_transpose{n}d", conv_transpose, inputs(n, transposed=True)) for n in (1, 2, 3)),
]
