"""Where a result does not vary with a tensor that it depends on, the gradient is zeros, as in PyTorch: no error, not
None. Through whole numbers and truths there is none, and a `.backward()` that reaches nothing says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from manygrad import Context, Tensor, autograd, function, nn
from manygrad.nn import functional as F

NOTHING = np.array([], np.int64)
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "x ** 0": lambda x: x**0,
    "floor": lambda x: x.floor(),
    "ceil": lambda x: x.ceil(),
    "round": lambda x: x.round(),
    "round(decimals=2)": lambda x: x.round(decimals=2),
    "trunc": lambda x: x.trunc(),
    "sign": lambda x: x.sign(),
    "div, floor": lambda x: x.div(2.0, rounding_mode="floor"),
    "div, trunc": lambda x: x.div(2.0, rounding_mode="trunc"),
    "norm(p=0)": lambda x: x.norm(0),
    "angle": lambda x: x.angle(),
    "copysign": lambda x: Tensor.ones(3).copysign(x),
    "dropout(p=1)": lambda x: F.dropout(x, 1.0, True),
    "alpha_dropout(p=1)": lambda x: F.alpha_dropout(x, 1.0, True),
    "clamp": lambda x: x.clamp(10, 20),
    "a mask that is all False": lambda x: x[x > 1e9],
    "masked_select": lambda x: x.masked_select(x > 1e9),
    "where": lambda x: Tensor([False] * 3).where(x, Tensor.zeros(3)),
    "addmm, beta=0": lambda x: x.addmm(Tensor.ones(3, 2), Tensor.ones(2, 3), beta=0),
    "matrix_power(0)": lambda x: x.diag().matrix_power(0),
    "slogdet's sign": lambda x: x.diag().slogdet()[0],
}
EMPTY: dict[str, Callable[[Tensor], Tensor]] = {
    "x[:0]": lambda x: x[:0],
    "an empty index": lambda x: x[Tensor(NOTHING)],
    "gather": lambda x: x.gather(0, Tensor(NOTHING)),
    "index_select": lambda x: x.index_select(0, Tensor(NOTHING)),
    "take": lambda x: x.take(Tensor(NOTHING)),
    "topk(0)": lambda x: x.topk(0).values,
    "repeat(0)": lambda x: x.repeat(0),
    "expand": lambda x: x.expand(0, 3),
    "cat": lambda x: x[:0].cat(Tensor.ones(2)),
    "sum": lambda x: x[:0].sum(),
    "prod": lambda x: x[:0].prod(),
    "logsumexp": lambda x: x[:0].logsumexp(0),
    "softmax": lambda x: x[:0].softmax(0),
    "cumsum": lambda x: x[:0].cumsum(0),
    "sort": lambda x: x[:0].sort().values,
    "norm": lambda x: x[:0].norm(),
    "an empty batch": lambda x: F.linear(Tensor.zeros(0, 3), x.reshape(1, 3)),
    "a sum over nothing": lambda x: x[:0].reshape(0, 1).T @ Tensor.zeros(0, 2),
    "conv1d": lambda x: F.conv1d(Tensor.zeros(0, 1, 5), x.reshape(1, 1, 3)),
    "layer_norm": lambda x: F.layer_norm(Tensor.zeros(0, 3), (3,), x),
    "embedding": lambda x: F.embedding(Tensor(NOTHING), x.reshape(3, 1)),
    "cross_entropy": lambda x: F.cross_entropy(x.reshape(1, 3)[:0], Tensor(NOTHING), reduction="sum"),
    "pdist of one row": lambda x: F.pdist(x.reshape(1, 3)),
    "det": lambda x: x[:0].diag().det(),
    "svd": lambda x: x[:0].diag().svd().S,
}
NONE: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x.argmax().float(),
    "argsort": lambda x: x.argsort().float(),
    "a comparison": lambda x: (x > 0).float(),
    "whole numbers": lambda x: x.long().float(),
    "isnan": lambda x: x.isnan().float(),
    "detach": lambda x: x.detach(),
    "zeros_like": lambda x: x.zeros_like(),
}


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with Context(DEVICE="PYTHON"):
        yield


def leaf() -> Tensor:
    return Tensor([1.5, -2.25, 3.0], requires_grad=True)


@pytest.mark.parametrize("name", [*STEPS, *EMPTY])
def test_zeros(name: str) -> None:
    use = {**STEPS, **EMPTY}[name]
    x = leaf()
    y = use(x)
    assert y.requires_grad
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0]
    (g,) = autograd.grad(use(x).sum(), x)
    assert g is not None and g.tolist() == [0, 0, 0]
    assert (use(x).sum() + (x * 2).sum()).gradient(x)[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", NONE)
def test_none(name: str) -> None:
    x = leaf()
    y = NONE[name](x)
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="no tensor with requires_grad=True stands below this one"):
        y.sum().backward()
    (y * x).sum().backward() if y.shape else (y * x.sum()).backward()
    assert x.grad is not None and x.grad.tolist() == (y.tolist() if y.shape else [y.item()] * 3)


def test_what_a_step_is_made_of() -> None:
    """Zeros go through what stands below, a custom function that has no gradient for an argument excepted."""

    class Second(autograd.Function):
        @staticmethod
        def forward(ctx: autograd.Context, a: Tensor, b: Tensor) -> Tensor:
            return a + b

        @staticmethod
        def backward(ctx: autograd.Context, g: Tensor) -> tuple[None, Tensor]:
            return None, g

    x, w = leaf(), leaf()
    ((x * w).exp().floor() + 1).sum().backward()
    assert x.grad is not None and w.grad is not None and x.grad.tolist() == w.grad.tolist() == [0, 0, 0]
    x, w = leaf(), leaf()
    Second.apply(x, w).sum().backward()
    assert x.grad is None and w.grad is not None and w.grad.tolist() == [1, 1, 1]

    @function
    def stepped(x: Tensor) -> Tensor:
        return (x * 2).floor()

    x = leaf()
    stepped(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("axis", [None, 0])
def test_sharded(axis: int | None) -> None:
    x = Tensor([1.5, -2.25, 3.0], requires_grad=True)
    cut = x.shard(("PYTHON:0", "PYTHON:1"), axis)
    (cut[:0].sum() + cut.floor().sum() + (cut**0).sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0]


def test_a_model_and_an_empty_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    out = model.train()(Tensor.zeros(0, 3))
    assert out.shape == (0, 2)
    out.sum().backward()
    for p in model.parameters():
        assert p.grad is not None and not p.grad.numpy().any()
    norm = model[1]
    assert norm.running_mean.tolist() == [0] * 4 and norm.running_var.tolist() == [1] * 4
    assert norm.num_batches_tracked.item() == 1
