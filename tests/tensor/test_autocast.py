"""Mixed precision: which types operations have, plain, followed, captured; gradients; scaled losses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, autocast, dtypes, nn
from manygrad.nn import functional as F
from manygrad.nn.optim import SGD, AdamW, GradScaler
from manygrad.runtime.devices import get_device
from manygrad.tensor.autocast import IN_FLOAT32, IN_HALF
from manygrad.tensor.dtype import DType

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
RNG = np.random.default_rng(0)


def floats(*shape: int, dtype: DType = F32) -> Tensor:
    return Tensor(RNG.standard_normal(shape).astype(np.float32)).cast(dtype)


# what torch.autocast("cuda", torch.bfloat16) gives, of float32 and of bfloat16
TYPES: dict[str, tuple[Callable[[DType], Tensor], DType | None]] = {
    "matmul": (lambda t: floats(3, 4, dtype=t) @ floats(4, 5), BF16),
    "linear": (lambda t: F.linear(floats(3, 4, dtype=t), floats(5, 4), floats(5)), BF16),
    "addmm": (lambda t: floats(5).addmm(floats(3, 4, dtype=t), floats(4, 5)), BF16),
    "einsum": (lambda t: Tensor.einsum("ij,kj->ik", floats(3, 4, dtype=t), floats(5, 4)), BF16),
    "conv2d": (lambda t: F.conv2d(floats(1, 2, 5, 5, dtype=t), floats(3, 2, 3, 3), floats(3)), BF16),
    "conv_transpose1d": (lambda t: F.conv_transpose1d(floats(1, 2, 5, dtype=t), floats(2, 3, 3)), BF16),
    "attention": (lambda t: F.scaled_dot_product_attention(*(floats(1, 2, 5, 4, dtype=t) for _ in range(3))), BF16),
    "a module": (lambda t: nn.Linear(4, 5)(floats(3, 4, dtype=t)), BF16),
    "exp": (lambda t: floats(3, dtype=t).exp(), F32),
    "power": (lambda t: floats(3, dtype=t) ** 2, F32),
    "sum": (lambda t: floats(3, dtype=t).sum(), F32),
    "softmax": (lambda t: floats(3, 4, dtype=t).softmax(), F32),
    "layer norm": (lambda t: F.layer_norm(floats(3, 4, dtype=t), (4,), floats(4), floats(4)), F32),
    "cross entropy": (lambda t: F.cross_entropy(floats(3, 4, dtype=t), Tensor([0, 1, 2])), F32),
    "relu": (lambda t: floats(3, dtype=t).relu(), None),  # as given
    "gelu": (lambda t: F.gelu(floats(3, dtype=t)), None),
    "silu": (lambda t: F.silu(floats(3, dtype=t)), None),
    "mean": (lambda t: floats(3, dtype=t).mean(), None),
    "a sum of two types": (lambda t: floats(3, dtype=t) + floats(3), F32),
    "a list": (lambda t: Tensor.cat(floats(3, dtype=t), floats(3)), F32),
    "max_pool": (lambda t: F.max_pool2d(floats(1, 1, 4, 4, dtype=t), 2), None),
}


@pytest.mark.parametrize("given", [F32, BF16])
@pytest.mark.parametrize("name", TYPES)
def test_types_are_those_of_autocast(name: str, given: DType) -> None:
    f, want = TYPES[name]
    with autocast():
        got = f(given)
    assert got.dtype is (given if want is None else want)
    assert np.isfinite(got.float().numpy()).all()


def test_double_stays_and_so_does_what_is_no_float() -> None:
    with autocast():
        x = Tensor(np.ones((2, 2)))
        assert x.dtype is dtypes.float64 and (x @ x).dtype is dtypes.float64
        i = Tensor([[1, 2], [3, 4]])
        assert (i @ i).tolist() == [[7, 10], [15, 22]] and i.sum().dtype is dtypes.int64


def test_the_mode_is_the_innermost_one_and_its_threads() -> None:
    a, seen = floats(2, 2), list[DType]()
    with autocast("cuda", F16):
        with autocast(enabled=False):
            assert (a @ a).dtype is F32
        assert (a @ a).dtype is F16
        thread = threading.Thread(target=lambda: seen.append((a @ a).dtype))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), autocast():
            1 / 0  # noqa: B018
        assert (a @ a).dtype is F16
    assert (a @ a).dtype is F32 and seen == [F32]
    assert autocast()(lambda: a @ a)().dtype is BF16


@pytest.mark.parametrize("wrong", [{"dtype": F32}, {"dtype": dtypes.int8}])
def test_other_types_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        autocast(**wrong)
    with pytest.raises(TypeError, match="pass dtype="):
        autocast(BF16)  # type: ignore[arg-type]


def test_every_name_of_the_lists_is_an_operation() -> None:
    """One that is in no list by another spelling would be left as it comes without a word."""
    known = {n for n in (*dir(Tensor), *dir(F)) if n not in ("sinh", "cosh")}
    missing = sorted((IN_HALF | IN_FLOAT32) - known - {"sinh", "cosh"})
    assert missing == []


def model() -> tuple[nn.Module, Tensor, Tensor]:
    Tensor.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 10))
    rng = np.random.default_rng(1)
    x = Tensor(rng.standard_normal((12, 16)).astype(np.float32)).realize()
    return net, x, Tensor(rng.integers(0, 10, 12)).realize()


def losses(mode: bool, captured: bool) -> list[float]:
    net, x, y = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with autocast(enabled=mode):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    run = TinyJit(step) if captured else step
    with Tensor.train():
        return [run(x).item() for _ in range(8)]


def test_training_is_nearly_that_in_float32_plain_and_captured() -> None:
    full, mixed = losses(False, False), losses(True, False)
    assert mixed != full
    np.testing.assert_allclose(mixed, full, rtol=2e-2, atol=2e-3)
    assert losses(True, True) == mixed


def test_gradients_and_parameters_stay_in_float32() -> None:
    net, x, y = model()
    with autocast():
        F.cross_entropy(net(x), y).backward()
    assert (
        {p.dtype for p in net.parameters()} == {p.grad.dtype for p in net.parameters() if p.grad is not None} == {F32}
    )


def test_a_capture_sees_the_mode_of_its_caller() -> None:
    a = floats(4, 4).realize()
    step = TinyJit(lambda x: x @ x)
    for enabled in (False, False, False, True, True, True, False):
        with autocast(enabled=enabled):
            assert step(a).dtype is (BF16 if enabled else F32)


def test_calls_that_are_put_off_have_the_types_of_their_own_place() -> None:
    """A loop that is followed: what was called outside is made inside of the mode, and the other way round."""
    found = []
    for i in range(6):
        a = Tensor(np.full((4, 4), i + 1 / 3, np.float32)).realize()
        outside = a @ a
        with autocast():
            inside = (a @ a) + 0
            outside_too = outside + 1
            read = inside.float().sum().item()
        found.append((outside.dtype, inside.dtype, outside_too.dtype, round(read / (4 * (i + 1 / 3) ** 2 * 16), 1)))
        assert np.allclose(outside.numpy(), 4 * (i + 1 / 3) ** 2, rtol=1e-6)
    assert set(found) == {(F32, BF16, F32, 1.0)}


# *** scaled losses ***


def test_small_gradients_are_kept_by_the_scale() -> None:
    weight = nn.Parameter(Tensor(np.full((4, 4), 1.0, np.float32)))
    x = Tensor(np.full((1, 4), 1e-4, np.float32))
    for scaled in (False, True):
        scaler = GradScaler(init_scale=2.0**14, enabled=scaled)
        optimizer = SGD([weight], lr=1.0)
        optimizer.zero_grad()
        with autocast(dtype=F16):
            loss = (x @ weight * 1e-4).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        got = weight.grad.numpy()
        assert np.allclose(got, 1e-8, rtol=2e-2, atol=0) == scaled


def test_a_step_that_overflows_is_left_out_and_the_scale_falls() -> None:
    weight = nn.Parameter(Tensor(np.ones(3, np.float32)))
    optimizer, scaler = SGD([weight], lr=0.5), GradScaler(init_scale=8.0, growth_interval=2)
    scales = []
    for bad in (False, False, True, False, True, True):
        optimizer.zero_grad()
        scaler.scale((weight * Tensor([1.0, np.inf if bad else 1.0, 1.0])).sum()).backward()
        before = weight.numpy().copy()
        scaler.step(optimizer)
        moved = before - weight.numpy()
        assert np.array_equal(moved, np.zeros(3) if bad else np.full(3, 0.5))
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 8.0, 8.0, 4.0, 2.0]
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


def test_wrong_use_of_a_scaler_is_an_error() -> None:
    weight = nn.Parameter(Tensor(np.ones(3, np.float32)))
    optimizer, scaler = SGD([weight], lr=0.5), GradScaler()
    with pytest.raises(RuntimeError, match="no step was taken"):
        scaler.update()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="have been divided"):
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="growth_factor"):
        GradScaler(growth_factor=0.5)
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({})
    assert GradScaler(enabled=False).state_dict() == {}


def test_another_scale_compiles_nothing() -> None:
    weight = nn.Parameter(Tensor(np.ones(3, np.float32)))
    optimizer, scaler = SGD([weight], lr=0.5), GradScaler(init_scale=1024.0, growth_interval=1)
    kernels = []
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        kernels.append(len(get_device("CPU").kernels.kernels))
    assert len({*kernels[2:]}) == 1 and scaler.get_scale() == 1024.0 * 2**6
