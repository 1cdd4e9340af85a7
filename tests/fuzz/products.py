"""Random products of the types that processors have instructions for (bfloat16, bytes), as the factors may lie, of a
batch, on several devices, over a number of terms that only a Variable says, with what follows in the kernel. All values
are small whole numbers, so that sums are exact in any order, and NumPy says what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from manygrad import Tensor, Variable
from manygrad.tensor.dtype import dtypes, to_dtype

EXAMPLES = 60
SIZES = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 64, 70, 100, 130)
TERMS = (15, 16, 20, 24, 32, 33, 36, 48, 64, 96, 100, 128, 200, 512, 513)
TYPES = ("bfloat16", "int8", "uint8")
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    left = draw(st.sampled_from(TYPES))
    return {
        "shape": tuple(draw(st.sampled_from(s)) for s in (SIZES, SIZES, TERMS)),
        "types": (left, left if left == "bfloat16" else draw(st.sampled_from(TYPES[1:]))),
        "layout": draw(st.sampled_from(["NN", "NT", "TN", "TT"])),
        "batch": draw(st.sampled_from([(), (), (2,), (3,)])),
        "devices": draw(st.sampled_from([1, 1, 2, 3])),
        "step": draw(st.sampled_from([0, 0, 1, 4, 16, 32])),  # of the number of terms, on one device; 0: it is fixed
        "made": draw(st.booleans()),  # then: the left factor lies as close as it can
        "then": draw(st.sampled_from(["nothing", "bias", "relu", "sum"])),
        "seed": draw(st.integers(0, 1000)),
    }


def check(p: Program) -> None:
    (m, n, k), batch, rng = p["shape"], p["batch"], np.random.default_rng(p["seed"])
    wide = dtypes.float32 if p["types"][0] == "bfloat16" else dtypes.int32
    low = [0 if t == "uint8" else -3 for t in p["types"]]
    a, b = (rng.integers(least, 4, s).astype(np.int64) for least, s in zip(low, ((*batch, m, k), (k, n))))
    bias = rng.integers(-3, 4, n)
    devices = tuple(f"CPU:{i}" for i in range(p["devices"]))

    step = p["step"] if len(devices) == 1 and p["step"] and k % p["step"] == 0 else 0
    room = k + 3 * step
    count = step * Variable("k", 1, room // step).bind(k // step) if step else k
    a, b = np.pad(a, [*[(0, 0)] * (a.ndim - 1), (0, room - k)]), np.pad(b, ((0, room - k), (0, 0)))

    def given(x: np.ndarray, kind: str, letter: str, axis: int | None) -> Tensor:
        stored = np.ascontiguousarray(x if letter == "N" else x.swapaxes(-1, -2)).astype(to_dtype(kind).np)
        t = Tensor(stored)
        if letter == "T" and axis == x.ndim - 2:  # (rows are columns there)
            axis = x.ndim - 1
        t = t.shard(devices, axis=axis) if len(devices) > 1 else t
        return t if letter == "N" else t.transpose(-1, -2)

    left = given(a, p["types"][0], p["layout"][0], 0 if batch else a.ndim - 2)[..., :count]
    left = left.contiguous() if p["made"] else left
    got = left.cast(wide) @ given(b, p["types"][1], p["layout"][1], None)[:count].cast(wide)
    want = a @ b
    if p["then"] == "bias":
        there = Tensor(bias.astype(np.int32)).cast(wide)
        got, want = got + (there.shard(devices) if len(devices) > 1 else there), want + bias
    elif p["then"] == "relu":
        got, want = got.maximum(0), np.maximum(want, 0)
    elif p["then"] == "sum":
        got, want = got.sum(-1), want.sum(-1)
    np.testing.assert_array_equal(got.numpy().astype(np.int64), want, err_msg=str(p))
