"""Random loops of gradients of gradients, of new leaves and of values that become leaves: the same numbers as where
calls are made as they come."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from manygrad import Context, Tensor, autograd, nn, no_grad
from manygrad.tensor.deferred import counts
from manygrad.tensor.environment import FOLLOW

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 7
KINDS, VALUES = 16, 11  # (those below VALUES give another value)
Call = tuple[int, int, int, bool, float]


def program(seed: int) -> list[Call]:
    rng, found, count = np.random.default_rng(seed), list[Call](), 5
    for _ in range(rng.integers(5, 14)):
        i, j = (int(k) for k in rng.integers(count, size=2))
        found.append((int(rng.integers(KINDS)), i, j, bool(rng.random() < 0.15), float(rng.integers(-4, 5)) / 4))
        count += found[-1][0] < VALUES
    return found


def value(kind: int, a: Tensor, b: Tensor, c: float, leaves: list[Tensor]) -> Tensor:
    if kind == 0:
        return a * b
    if kind == 1:
        return a + b.sin()
    if kind == 2:
        return (a * c).tanh()
    if kind == 3:
        return a.detach() * 1
    if kind == 4:
        return (a.detach() * c).requires_grad_()
    if kind == 5:
        return (a.detach() + b.detach()).requires_grad_()
    if kind in (6, 7):
        s = (a * a).sum()
        if not (s.requires_grad and b.requires_grad):
            return b * 0.5
        (g,) = autograd.grad(s, b, create_graph=kind == 6, allow_unused=True)
        return b * 0.5 if g is None else g
    if kind == 8:
        s = (a.sin() * c).sum() + b.sum()
        grads = autograd.grad(s, leaves, create_graph=True, allow_unused=True) if s.requires_grad else ()
        return sum((g for g in grads if g is not None), a * 0)
    return a.clone() if kind == 9 else a.sum() * b


def run(seed: int) -> list[np.ndarray]:
    data = np.random.default_rng(seed + 1000)
    trained = [Tensor(data.standard_normal(4), requires_grad=True) for _ in range(2)]
    optimizer, kept, found = nn.optim.SGD(trained, lr=0.01), Tensor(np.zeros(4)), list[np.ndarray]()
    for _ in range(STEPS):
        x = Tensor(data.standard_normal(4), requires_grad=True)
        values = [*trained, x, Tensor(data.standard_normal(4)), kept]
        optimizer.zero_grad()
        for kind, i, j, is_off, c in program(seed):
            a, b = values[i], values[j]
            with no_grad() if is_off else nullcontext():
                if kind < VALUES:
                    values.append(value(kind, a, b, c, [*trained, x]))
                elif kind == 11:
                    found.append(a.numpy())
                elif kind == 12 and a.requires_grad:
                    a.sum().backward()
                elif kind == 13 and i == 2:
                    with no_grad():
                        x.mul_(0.5)
                elif kind == 14:
                    kept = (kept * 0.5 + a.detach()).detach()
                elif kind == 15 and x.grad is not None:
                    found.append(x.grad.numpy())
                    x.grad = None
        loss = sum((v.tanh().square().sum() for v in values), Tensor(0.0))
        loss.backward()
        found += [v.grad.numpy() for v in values[2:] if v.is_leaf and v.grad is not None]
        if seed % 2:
            found += [t.grad.numpy() for t in trained if t.grad is not None]
        optimizer.step()
        found.append(loss.numpy())
    return [*found, *(t.numpy() for t in trained)]


def outcome(seed: int) -> list[np.ndarray] | str:
    try:
        return run(seed)
    except RuntimeError as e:
        return str(e)[:40]


def test_random_loops() -> None:
    replayed = right = 0
    for seed in range(14):
        with Context(FOLLOW=0):
            want = outcome(seed)
        before = counts.COUNTS.replays
        found = outcome(seed)
        replayed += counts.COUNTS.replays > before
        if isinstance(want, str):
            assert found == want, seed
            continue
        assert not isinstance(found, str) and len(found) == len(want), (seed, found)
        for a, b in zip(found, want):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=str(seed))
        right += 1
    assert right > 9 and replayed > 4
