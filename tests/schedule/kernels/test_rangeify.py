"""rangeify: STOREs of one form share a kernel AST, with arguments of their own;
operands in one buffer are two arguments."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, Variable
from manygrad.schedule.kernels.rangeify import form_of, kernel_of, kernel_once
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from tests.schedule.programs import kernels_of, sink_of, stored


def store_of(t: Tensor) -> UOp:
    (store,) = sink_of([t]).src
    return store


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w + w.sum(1)).relu()


def test_layers_that_are_alike_share_the_ast() -> None:
    one, two = (store_of(stored(3, 4) * stored(4) + 1.5) for _ in range(2))
    known: dict = {}
    first, second = kernel_once(one, known), kernel_once(two, known)
    assert len(known) == 1 and first[0] is second[0]
    for store, found in ((one, first), (two, second)):
        assert found == kernel_of(store)  # AST, arguments in order, reads in order


def test_what_is_read_twice_is_another_form_than_two_buffers() -> None:
    x, y = stored(4), stored(4)
    forms = [
        form_of(store_of(t))[0] for t in (x * y, x * x, y * x, x + y, stored(5) * stored(5), x.double() * y.double())
    ]
    assert forms[0] == forms[2] and len(set(forms)) == 5


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1.0, 2.0)])
def test_other_numbers_are_another_form(a: float, b: float) -> None:
    x = stored(4)
    one, two = (UOp(Ops.STORE, dtypes.void, (x.uop, UOp(Ops.MUL, dtypes.float32, (x.uop, _full(v))))) for v in (a, b))
    assert form_of(one)[0] != form_of(two)[0]


def _full(value: float) -> UOp:
    return UOp(
        Ops.EXPAND, dtypes.float32, (UOp(Ops.RESHAPE, dtypes.float32, (UOp.const(dtypes.float32, value),), (1,)),), (4,)
    )


def test_views_and_symbolic_sizes_are_a_part_of_the_form() -> None:
    x = stored(8)
    n, m = Variable("n", 1, 8), Variable("m", 1, 8)
    forms = {
        form_of(store_of(t))[0]
        for t in (x[:4] * 2, x[4:] * 2, x.flip(0)[:4] * 2, x[: n.bind(4)] * 2, x[: m.bind(4)] * 2)
    }
    assert len(forms) == 5


def test_a_deep_model_computes_the_same() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((6, 6)).astype(np.float32) for _ in range(6)]
    x = want = rng.standard_normal((2, 6)).astype(np.float32)
    out = Tensor(x)
    for w in weights:
        out, want = layer(out, Tensor(w)), np.maximum(want @ w + w.sum(1), 0)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-4)


def test_operands_in_one_buffer_are_two_arguments() -> None:
    x = stored(8, 3, 4)
    (kernel,) = kernels_of(x[:, 0] @ x[:, 1].T)
    assert len({u.arg for u in kernel.toposort() if u.op is Ops.PARAM}) == 3
    (kernel,) = kernels_of((x[:, 0] * x[:, 0]).sum(1))  # one value
    assert len({u.arg for u in kernel.toposort() if u.op is Ops.PARAM}) == 2
    rows = np.arange(96, dtype=np.float32).reshape(8, 3, 4) / 50
    t = Tensor(rows).realize()
    np.testing.assert_allclose((t[:, 0] @ t[:, 1].T).numpy(), rows[:, 0] @ rows[:, 1].T, rtol=1e-5)
