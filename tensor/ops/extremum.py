"""The largest and the smallest, and where they stand.
NaN counts as larger than all and as smaller than all, as in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.ops.reduction import Dims
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class ValuesAndIndices(NamedTuple):
    """Result of `x.max(dim)` and its like."""

    values: Tensor
    indices: Tensor


class MinAndMax(NamedTuple):
    min: Tensor
    max: Tensor


class ExtremumMixin:
    def amax(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The largest value over `dim` (all dims by default); NaN where one is NaN.
        Equal largest values share the gradient."""
        self._needs_values("amax", dim)
        return self._reduce(Ops.MAX, dim, keepdim)

    def amin(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The smallest value over `dim` (all dims by default); NaN where one is NaN.
        Equal smallest values share the gradient."""
        self._needs_values("amin", dim)
        if self.dtype.is_float:
            return -((-self)._reduce(Ops.MAX, dim, keepdim))
        return self.bitwise_not()._reduce(Ops.MAX, dim, keepdim).bitwise_not()

    def aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> MinAndMax:
        """(min, max) over one dim, or all."""
        return MinAndMax(self.amin(dim, keepdim), self.amax(dim, keepdim))

    def max(self: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
        """`x.max()`: the largest value. `x.max(dim)`: (values, indices) of the first largest along `dim`.
        `x.max(other)`: `x.maximum(other)`."""
        return self._extreme("max", dim, keepdim)

    def min(self: Tensor, dim: int | Tensor | None = None, keepdim: bool = False) -> Any:
        """`x.min()`: the smallest value. `x.min(dim)`: (values, indices) of the first smallest along `dim`.
        `x.min(other)`: `x.minimum(other)`."""
        return self._extreme("min", dim, keepdim)

    def _extreme(self: Tensor, name: str, dim: Any, keepdim: bool) -> Any:
        if dim is None:
            return self.amax() if name == "max" else self.amin()
        if not isinstance(dim, int):
            if hasattr(dim, "uop"):
                return self.maximum(dim) if name == "max" else self.minimum(dim)
            raise TypeError(f"{name}: dim is one int, not {dim!r}; a{name}(dim) takes several dims")
        d = self._dim(dim)
        self._needs_values(name, d)
        index = self.argmax(d, True) if name == "max" else self.argmin(d, True)
        values = self.amax(d, True) if name == "max" else self.amin(d, True)
        if self.dtype.is_float and self.ndim:

            def backward(g: Tensor, x: Tensor) -> tuple[Tensor]:
                at = x.argmax(d, True) if name == "max" else x.argmin(d, True)
                return (at.eq(x._places(d))._where(g, 0.0),)

            values = with_gradient(values, name, d, backward, self)
        return (
            ValuesAndIndices(values, index)
            if keepdim or not self.ndim
            else ValuesAndIndices(values._without((d,)), index._without((d,)))
        )

    def _places(self: Tensor, d: int) -> Tensor:
        """0, 1, ... along dim d, in a shape that broadcasts with this tensor."""
        n: Any = self.shape[d]
        return self.arange(n).reshape(tuple(n if i == d else 1 for i in range(self.ndim)))

    def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The first position of the largest value, int64; without `dim` in the flat tensor."""
        if dim is None:
            flat = self.flatten().argmax(0)
            return flat.reshape((1,) * self.ndim) if keepdim else flat
        if not self.ndim:
            self._dim(dim)
            return self.zeros_like(dtype="int64")
        d = self._dim(dim)
        n = self.shape[d]
        self._needs_values("argmax", d)
        is_max = self.eq(self.amax(d, keepdim=True))
        if self.dtype.is_float:
            is_max = is_max | self.isnan()
        return (n - 1) - is_max._where((n - 1) - self._places(d), -1).amax(d, keepdim)

    def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The first position of the smallest value, int64; without `dim` in the flat tensor."""
        return (-self if self.dtype.is_float else self.bitwise_not()).argmax(dim, keepdim)
