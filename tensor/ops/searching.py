"""Where values stand among sorted ones, and whether they are among others at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

FEW = 64  # elements that `isin` compares one by one


class SearchingMixin:
    def searchsorted(
        self: Tensor,
        input: Any,
        *,
        out_int32: bool = False,
        right: bool = False,
        side: str | None = None,
        sorter: Tensor | None = None,
    ) -> Tensor:
        """For each value of `input` the first place in this sorted tensor (1-d, or (.., n) row by row) before which it
        can stand; `right`: the last. By halving: log2(n) gathers.
        """
        if side not in (None, "left", "right") or (side == "left" and right):
            raise ValueError(f'searchsorted: side is "left" or "right" and agrees with right={right}, got {side!r}')
        right = right or side == "right"
        v = (
            input
            if hasattr(input, "uop")
            else self._const_like(
                input, self.dtype if self.dtype.is_float or not isinstance(input, float) else dtypes.default_float
            )
        )
        if self.ndim == 0 or (self.ndim > 1 and v.shape[:-1] != self.shape[:-1]):
            raise ValueError(
                f"searchsorted: rows {self.shape} and values {v.shape}: the sorted tensor has 1 dim, "
                "or all dims but the last are equal"
            )
        n = self.shape[-1]
        places = self if sorter is None else self.gather(-1, sorter)
        kind = dtypes.int32 if out_int32 else dtypes.int64
        if not v.numel() or not n:
            return v._const_like(0, kind)._broadcast(v.shape)
        a, b = _comparable(places.detach(), v.detach())
        rows = {} if self.ndim == 1 else {i: self.arange(d)._along(i, self.ndim) for i, d in enumerate(self.shape[:-1])}
        at = self._const_like(0, dtypes.int64)._broadcast(v.shape)  # how many are known to stand before
        step = 1 << (n.bit_length() - 1)
        while step:
            probe = a._gather({**rows, self.ndim - 1: at + (step - 1)})
            before = (at + step <= n) & (b >= probe if right else probe < b)
            at = before._where(at + step, at)
            step >>= 1
        return at.cast(kind)

    def bucketize(self: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
        """The bucket of each element between the sorted 1-d `boundaries`: boundaries[i-1] < x <= boundaries[i],
        `right`: <= x <."""
        if boundaries.ndim != 1:
            raise ValueError(f"bucketize: boundaries have 1 dim, not shape {boundaries.shape}")
        return boundaries.searchsorted(self, out_int32=out_int32, right=right)

    def isin(self: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
        """Whether each element is one of `test_elements`: compared with each of a few, looked up in the sorted rest."""
        if not hasattr(self, "uop"):
            return test_elements._const_like(self, test_elements.dtype).isin(test_elements, invert=invert)
        if not hasattr(test_elements, "uop"):
            hit = self.eq(test_elements)
        elif not test_elements.numel() or not self.numel():
            hit = self._const_like(False, dtypes.bool)._broadcast(self.shape)
        elif test_elements.numel() <= FEW:
            hit = self.unsqueeze(-1).eq(test_elements.flatten()).any(-1)
        else:
            among = test_elements.flatten().sort().values
            at = among.searchsorted(self).minimum(among.shape[0] - 1)
            hit = among._gather({0: at}).eq(self)
        return hit.logical_not() if invert else hit


def _comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as integer keys of one type, so that NaN has its place at the end."""
    from manygrad.tensor.dtype import promote

    kind = promote(a.dtype, b.dtype)
    return (a.cast(kind)._keys(), b.cast(kind)._keys()) if kind.is_float else (a.cast(kind), b.cast(kind))
