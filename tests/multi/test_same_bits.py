"""Equal bits of everything that sums over a cut dim, on every count of devices whose blocks are whole subtrees: 1, 2, 4
and 8 devices with SUM_BLOCKS=8, and 1, 3 and 6 with 24 (docs/decisions/0004-reductions-in-blocks.md).

    python -m tests.multi.test_same_bits      # the table
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor, nn

COUNTS = {8: (1, 2, 4, 8), 24: (1, 3, 6)}  # of devices, by blocks
FEW_ROWS = (48, 13)  # the dim that is cut: even, and uneven
ROWS = (*FEW_ROWS, 50, 21, 5)
Devices = tuple[str, ...]
Case = Callable[[int, Devices], list[Tensor]]

R = np.random.RandomState(0)


def floats(*shape: int) -> np.ndarray:
    return R.randn(*shape).astype(np.float32)


X, Y, Z, U = floats(64, 6), floats(64, 6), floats(64, 4, 8), floats(64)
TABLE, IN, OUT, SQUARE, BIAS, KERNEL = (
    floats(13, 6),
    floats(6, 9),
    floats(9, 7),
    floats(8, 8),
    floats(6),
    floats(2, 1, 3, 3),
)
PLACES, FEW = R.randint(0, 13, 64), R.randint(0, 2, 64)
WIDE = floats(9, 32)


def cut(a: np.ndarray, rows: int, devices: Devices, axis: int = 0) -> Tensor:
    return Tensor(np.ascontiguousarray(np.moveaxis(a[:rows], 0, axis))).shard(devices, axis)


def weight(a: np.ndarray, devices: Devices) -> Tensor:
    return Tensor(a).shard(devices).realize().requires_grad_()


def embedding(n: int, d: Devices) -> list[Tensor]:
    layer = nn.Embedding(13, 6)
    layer.weight.assign(Tensor(TABLE)).realize()
    layer.weight.shard_(d)
    return list((layer(cut(PLACES, n, d)) * cut(X, n, d)).square().sum().gradient(layer.weight))


def scatter_add(n: int, d: Devices, places: np.ndarray = PLACES, table: np.ndarray = TABLE) -> list[Tensor]:
    index = cut(places, n, d).reshape(n, 1).expand(n, 6)
    return [Tensor(table).shard(d).scatter_add(0, index, cut(X, n, d))]


def mlp(n: int, d: Devices) -> list[Tensor]:
    a, b = weight(IN, d), weight(OUT, d)
    loss = ((cut(X, n, d) @ a).relu() @ b).cross_entropy(cut(PLACES, n, d) % 7)
    return [loss, *loss.gradient(a, b)]


def attention(n: int, d: Devices) -> list[Tensor]:
    w = weight(SQUARE, d)
    q = cut(Z, n, d) @ w
    return list(q.scaled_dot_product_attention(q, q).square().mean().gradient(w))


def batch_norm(n: int, d: Devices) -> list[Tensor]:
    x = cut(X, n, d)
    return [(x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()]


def layer_norm(n: int, d: Devices) -> list[Tensor]:
    w = weight(BIAS, d)
    return list((cut(X, n, d).layer_norm((6,)) * w).square().sum().gradient(w))


def convolution(n: int, d: Devices) -> list[Tensor]:
    k = weight(KERNEL, d)
    return list(cut(Z[:, None], n, d).conv2d(k).square().sum().gradient(k))


def bias(n: int, d: Devices) -> list[Tensor]:
    b = weight(BIAS, d)
    return list((cut(X, n, d) + b).tanh().square().mean().gradient(b))


def in_halves(n: int, d: Devices) -> list[Tensor]:
    x = cut(X, n, d)
    return [x.half().sum(0), x.bfloat16().T @ cut(Y, n, d).bfloat16()]


def of_two_uses(n: int, d: Devices) -> list[Tensor]:
    w = weight(IN, d)
    return list(((cut(X, n, d) @ w).relu() @ w.T).square().mean().gradient(w))


CASES: dict[str, Case] = {
    "sum": lambda n, d: [cut(X, n, d).sum(0), cut(X, n, d).sum()],
    "mean": lambda n, d: [cut(X, n, d).mean(0), cut(X, n, d).mean()],
    "var, std": lambda n, d: [cut(X, n, d).var(0), cut(X, n, d).std()],
    "prod": lambda n, d: [cut(X, n, d).prod(0)],
    "norm": lambda n, d: [cut(X, n, d).norm(), cut(X, n, d).square().sum((0, 1)).sqrt()],
    "logsumexp, softmax": lambda n, d: [cut(X, n, d).logsumexp(0), cut(X, n, d).softmax(0)],
    "a sum of products": lambda n, d: [(cut(X, n, d) * cut(Y, n, d)).sum(), (cut(X, n, d) * cut(Y, n, d)).sum(0)],
    "matmul, einsum": lambda n, d: [
        cut(X, n, d).T @ cut(Y, n, d),
        Tensor.einsum("bij,bik->jk", cut(Z, n, d), cut(Z, n, d)),
    ],
    "float16, bfloat16": in_halves,
    "sum over two dims": lambda n, d: [cut(Z, n, d).sum((0, 2)), cut(Z, n, d, 1).sum((0, 1))],
    "reshaped": lambda n, d: [cut(Z, n, d).reshape(n * 4, 8).sum(0), cut(Z, n, d).reshape(-1).sum()],
    "gathered": lambda n, d: [
        Tensor(TABLE).shard(d)[cut(PLACES, n, d)].sum(0),
        cut(X, n, d).gather(1, cut(PLACES, n, d).reshape(n, 1) % 6).sum(),
    ],
    "scatter_add of few": scatter_add,
    "scatter_add of many": lambda n, d: scatter_add(n, d, FEW, TABLE[:2]),
    "scatter_add of numbers": lambda n, d: [Tensor.zeros(13).shard(d).scatter_add(0, cut(PLACES, n, d), cut(U, n, d))],
    "Embedding": embedding,
    "bias": bias,
    "MLP": mlp,
    "batch norm": batch_norm,
    "conv2d": convolution,
    "attention": attention,
}
# What the decision names as its limits
LIMITS: dict[str, Case] = {
    "a weight of two uses": of_two_uses,
    "an inner dim and the cut one": lambda n, d: [cut(Z, n, d, 2).sum((1, 2))],
    "reshaped and stored": lambda n, d: [cut(Z, n, d).reshape(n * 4, 8).contiguous().realize().sum(0)],
    "layer norm, uneven": layer_norm,
    "linear, of one row on a device": lambda n, d: [cut(Z, n, d).reshape(n, 32).linear(weight(WIDE, d))],
    "cumsum": lambda n, d: [cut(X, n, d).cumsum(0)],
}


def differing(case: Case, blocks: int, rows: int) -> list[int]:
    """The counts of devices on which the bits are others than on one."""
    found = {}
    with Context(SUM_BLOCKS=blocks):
        for count in COUNTS[blocks]:
            devices = tuple(f"CPU:{i}" for i in range(count))
            found[count] = [t.numpy().tobytes() for t in case(rows, devices)]
    return [count for count in COUNTS[blocks] if found[count] != found[1]]


@pytest.mark.parametrize("name", CASES)
def test_a_sum_over_the_cut_dim_has_the_same_bits(name: str) -> None:
    for blocks in COUNTS:
        for rows in FEW_ROWS:
            assert differing(CASES[name], blocks, rows) == [], (blocks, rows)


def trained(devices: Devices, blocks: int, follow: int, steps: int = 14) -> list[bytes]:
    """Losses of a plain loop, which is captured by itself after a few of its steps, and the parameters at its end."""
    Tensor.manual_seed(3)
    rng = np.random.default_rng(0)
    with Context(SUM_BLOCKS=blocks, FOLLOW=follow):
        model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5))
        for p in model.parameters():
            p.shard_(devices)
        optimizer = nn.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(steps):
            tokens, answers = (Tensor(rng.integers(0, n, 48)).shard(devices, 0) for n in (13, 5))
            optimizer.zero_grad()
            loss = model(tokens).cross_entropy(answers)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.numpy().tobytes())
        return [*losses, *(p.numpy().tobytes() for p in model.parameters())]


@pytest.mark.parametrize("blocks", COUNTS)
def test_a_plain_training_loop_has_the_same_bits(blocks: int) -> None:
    want = trained(("CPU:0",), blocks, follow=0)
    for count in COUNTS[blocks]:
        assert trained(tuple(f"CPU:{i}" for i in range(count)), blocks, follow=1) == want, count


def main() -> None:
    print(f"| | {' | '.join(f'{n} of {b}' for b, counts in COUNTS.items() for n in counts[1:])} |")
    print("|---|" + "---|" * sum(len(c) - 1 for c in COUNTS.values()))
    for name, case in {**CASES, **LIMITS}.items():
        marks = []
        for blocks, counts in COUNTS.items():
            others = [set(differing(case, blocks, rows)) for rows in ROWS]
            marks += [f"{sum(c in o for o in others)} differ" * any(c in o for o in others) or "=" for c in counts[1:]]
        print(f"| {name} | {' | '.join(marks)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
