"""Small models trained on CUDA, plain and captured: the losses are CPU's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tests.cuda.install  # noqa: F401
from manygrad import Tensor, TinyJit, nn
from manygrad.nn import functional as F
from manygrad.nn.optim import SGD, AdamW

Model = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], tuple[int, ...]]


def attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m(x).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rows_in_order(m: nn.Module, x: Tensor) -> Tensor:
    y = m(x)
    best = y.max(1, keepdim=True)[0] - y.std(1, keepdim=True) + y.topk(3)[0].sum(1, keepdim=True)
    return y.sort(1)[0].cumsum(1) + best


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(33, 17), nn.GELU(), nn.LayerNorm(17), nn.Linear(17, 5)),
        lambda m, x: m(x),
        (9, 33),
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2)),
        lambda m, x: m(x),
        (3, 3, 9, 8),
    ),
    "attention": lambda: (nn.Linear(16, 48), attention, (2, 17, 16)),
    "lstm": lambda: (nn.LSTM(5, 8), lambda m, x: m(x)[0], (4, 3, 5)),
    "embedding": lambda: (nn.Embedding(11, 6), lambda m, x: m((x.abs() * 3).floor().long().clamp(0, 10)), (4, 7)),
    "norms": lambda: (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)),
        lambda m, x: m(x) * m(x).detach().cos(),
        (2, 4, 5, 6),
    ),
    "rows in order": lambda: (nn.Linear(6, 6), rows_in_order, (5, 6)),
}


def losses(name: str, device: str, captured: bool) -> list[float]:
    Tensor.manual_seed(7)
    model, f, shape = MODELS[name]()
    model = model.to(device)
    x = Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32), device=device).realize()
    params = list(model.parameters())
    optimizer = SGD(params, lr=0.05, momentum=0.9) if name in ("mlp", "lstm") else AdamW(params, lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = f(model, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.realize()

    run = TinyJit(step) if captured else step
    with Tensor.train():
        return [run(x).item() for _ in range(4)]


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_a_processor(name: str) -> None:
    want = losses(name, "CPU", False)
    assert len(set(want)) == 4
    plain = losses(name, "CUDA", False)
    np.testing.assert_allclose(plain, want, rtol=1e-3, atol=1e-6)
    assert losses(name, "CUDA", True) == plain
