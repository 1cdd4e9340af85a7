"""Every operator's cases on CUDA: forward against the cases' oracle, in each type; gradients against CPU's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.cuda.install  # noqa: F401
from manygrad import Context, Tensor, dtypes
from tests.tensor.cases.case import Case
from tests.tensor.test_ops import DIFFERENTIABLE, EVERY, LOOSE, MANYGRAD, agree, as_type, flat


@EVERY
@settings(max_examples=2)
@given(data=st.data())
def test_forward(case: Case, data: st.DataObject) -> None:
    sample = case.samples(data.draw)
    kind = data.draw(st.sampled_from(list(case.dtypes)))
    arrays = [as_type(a, kind) for a in sample.arrays]
    exact = [a.astype(np.float64) if a.dtype.kind == "f" or a.dtype == dtypes.bfloat16.np else a for a in arrays]
    want = flat(case.oracle(*exact, *sample.args, **sample.kwargs))
    with Context(DEVICE="CUDA"):
        agree(flat(case.run(MANYGRAD, [Tensor(a) for a in arrays], sample)), want, case.rtol.get(kind, LOOSE[kind]))


@DIFFERENTIABLE
@settings(max_examples=1)
@given(data=st.data())
def test_gradient(case: Case, data: st.DataObject) -> None:
    sample = case.samples(data.draw)
    arrays = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in sample.arrays]
    found = []
    for device in ("CUDA", "CPU"):
        with Context(DEVICE=device):
            tensors = [Tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
            results = flat(case.run(MANYGRAD, tensors, sample))
            sums = ((r * 1.5).sum() for r in results if isinstance(r, Tensor) and r.dtype.is_float)
            total = sum(sums, Tensor(0.0, dtype="float64"))
            found.append([g.numpy() for g in total.gradient(*(t for t in tensors if t.dtype.is_float))])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-8)
