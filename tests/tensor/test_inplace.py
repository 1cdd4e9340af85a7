"""Operators in place: they write to storage, keep type and shape, and show in views."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, no_grad
from manygrad.tensor.ops.inplace import InplaceMixin


def test_a_write_shows_in_every_view() -> None:
    t = Tensor([[1.0, -2.0], [3.0, -4.0]]).realize()
    row, flat = t[1], t.reshape(4)
    assert t.abs_() is t
    t.mul_(2).clamp_(max=6.0)
    row.add_(1, alpha=10)
    np.testing.assert_array_equal(flat.numpy(), [2, 4, 16, 16])
    t.zero_()
    assert row.fill_(7).tolist() == [7, 7] and t.tolist() == [[0, 0], [7, 7]]
    assert t.copy_(Tensor([1, 2])).tolist() == [[1, 2], [1, 2]]


def test_the_type_stays() -> None:
    t = Tensor([1, 2, 3])
    assert t.mul_(Tensor([2, 2, 2], dtype="int8")).dtype is t.dtype
    assert Tensor([1.0, 3.0]).gt_(2).tolist() == [0, 1]  # a bool can be written as a float
    with pytest.raises(
        TypeError, match="div_: the result is float32 and cannot be written in place of int64; use x = x.div"
    ):
        t.div_(2)
    with pytest.raises(ValueError, match=r"add_: the result has shape \(2, 3\), but it is written in place of \(3,\)"):
        t.add_(Tensor([[1], [2]]))


def test_views_in_place_change_the_shape() -> None:
    t = Tensor(np.arange(6.0).reshape(1, 2, 3)).realize()
    whole = t.reshape(6)
    assert t.squeeze_(0).transpose_(0, 1).shape == (3, 2)
    t.add_(1)
    np.testing.assert_array_equal(whole.numpy(), np.arange(6) + 1)


def test_a_leaf_is_written_only_without_gradients() -> None:
    w = Tensor([1.0, 2.0]).realize().requires_grad_()
    with pytest.raises(
        RuntimeError,
        match=(
            r"sub_: a leaf Variable that requires grad is being used in an in-place operation .*; "
            r"write to it under no_grad\(\)"
        ),
    ):
        w -= 1
    with no_grad():
        w -= 1
    assert w.tolist() == [0, 1]
    y = w * 2
    y.exp_()
    np.testing.assert_allclose(y.sum().gradient(w)[0].numpy(), 2 * np.exp([0.0, 2.0]), rtol=1e-6)


def test_every_listed_name_is_there() -> None:
    missing = [name for name in InplaceMixin.__annotations__ if not hasattr(Tensor, name)]
    assert all(not hasattr(Tensor, name.removesuffix("_")) for name in missing), missing


class Doubling(Tensor):
    def add(self, other: object, alpha: object = 1) -> Tensor:  # type: ignore[override]
        return super().add(other, alpha=2)


class Mixed:
    def add(self, other: object, alpha: object = 1) -> object:
        return Tensor.add(self, other, alpha=3)  # type: ignore[arg-type]


def test_subclasses_inherit_what_is_in_place_and_make_what_they_change() -> None:
    class Plain(Tensor):
        pass

    class Below(Doubling):
        pass

    class Beside(Mixed, Tensor):  # type: ignore[misc]
        pass

    class Own(Tensor):
        def add_(self, other: object) -> Tensor:  # type: ignore[override]
            return self.fill_(5)

        def __isub__(self, other: object) -> Tensor:  # type: ignore[override, misc]
            return self.fill_(6)

    class BelowOwn(Own):
        pass

    assert not [n for n in vars(Plain) if n.endswith("_") and not n.startswith("__")]

    def changed(kind: type[Tensor]) -> list[list[float]]:
        in_place, operator, other = (kind([1.0]).realize() for _ in range(3))
        in_place.add_(1)
        operator += 1
        other -= 1
        return [t.tolist() for t in (in_place, operator, other)]

    assert changed(Plain) == [[2], [2], [0]]
    assert changed(Doubling) == changed(Below) == [[3], [3], [0]]
    assert changed(Beside) == [[4], [4], [0]]
    assert changed(Own) == changed(BelowOwn) == [[5], [5], [6]]
