"""Constants are one node on all devices: each tensor of them stays where it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor

CONSTANTS: dict[str, Callable[[str], Tensor]] = {
    "full": lambda d: Tensor.full((3,), 2.0, device=d),
    "number": lambda d: Tensor(2.0, device=d),
    "arange": lambda d: Tensor.arange(3, device=d).float(),
    "empty": lambda d: Tensor(np.zeros(0, np.float32), device=d),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_that_is_computed_on_one_device_stays_on_the_others(name: str) -> None:
    here, there = CONSTANTS[name]("CPU:0"), CONSTANTS[name]("CPU:1")
    lazy = here * 3 + 1
    want, more = here.numpy() + 1, here.numpy() * 3 + 2
    here = CONSTANTS[name]("CPU:0")
    there.contiguous().realize()
    there.realize()
    one = Tensor(np.ones(here.shape, np.float32), device="CPU:0")
    np.testing.assert_array_equal((here + one).numpy(), want)
    np.testing.assert_array_equal((lazy + one).numpy(), more)
    assert here.device == lazy.device == "CPU:0" and there.device == "CPU:1"


def test_a_gradient_flows_past_a_constant_that_is_stored_elsewhere() -> None:
    x = Tensor([1.0, 2.0, 3.0], device="CPU:0", requires_grad=True)
    scale, other = Tensor.full((3,), 2.0, device="CPU:0"), Tensor.full((3,), 2.0, device="CPU:1")
    y = x * scale
    Tensor.realize(y, other)
    (y * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6.0, 6.0, 6.0]
