"""Sorting along a dim, stable; the largest and the k-th.

Values become integer keys in the same order (`_keys`). Short rows (`SHORT`, `PAIRS`) are sorted by counting: the place
of an element is how many come before it, one comparison for each pair. A longer row is sorted by radix, `DIGIT` bits a
pass from the lowest: blocks of `BLOCK` elements count their digits, a running sum over (digit, block) says where each
block's share of a digit begins, and an element goes there plus its rank among equal digits of its block. So n elements
cost n · bits / DIGIT · BLOCK comparisons and a few passes over memory, whatever n. A few of the largest are found
without sorting: the first k of each block, then the first k of those. The radix sort is the one of Blelloch, "Prefix
sums and their applications" (1990), section 1.3, with wider digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.extremum import ValuesAndIndices

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

SHORT = 1024  # elements of a row sorted by counting, however many rows there are
PAIRS = 1 << 24  # comparisons that all rows may take to be sorted by counting
BLOCK = 128  # elements that a radix pass ranks among themselves
DIGIT = 8  # bits a pass


class SortingMixin:
    def sort(self: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
        """(values, indices) along `dim` in order; NaN counts as the largest, equal elements keep their order."""
        order = self.argsort(dim, descending)
        return ValuesAndIndices(self._gather_along(dim, order), order)

    def argsort(self: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Tensor:
        """Positions along `dim` that put it in order, int64."""
        d = self._dim(dim)
        if self.ndim == 0:
            return self._const_like(0, dtypes.int64)
        keys = self.detach()._keys()
        keys = keys.bitwise_not() if descending else keys
        return keys.movedim(d, -1)._order().movedim(-1, d)

    def msort(self: Tensor) -> Tensor:
        """Sorted along dim 0."""
        return self.sort(0).values

    def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        """(values, indices) of the k largest (or smallest) along `dim`, in order."""
        d = self._dim(dim)
        n = self.shape[d] if self.ndim else 1
        if not 0 <= k <= n:
            raise ValueError(f"topk: k = {k} of dim {d} of {self.shape}; it must lie in 0..{n}")
        if self.ndim == 0:
            return (
                ValuesAndIndices(*(t.reshape(1)._take(0, 0, k).reshape(()) for t in (self._copied(), self.argsort())))
                if k
                else self.reshape(1).topk(0)
            )
        keys = self.detach()._keys()
        order = (keys.bitwise_not() if largest else keys).movedim(d, -1)._order(k).movedim(-1, d)
        return ValuesAndIndices(self._gather_along(d, order), order)

    def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
        """(value, index) of the k-th smallest along `dim`, counted from 1."""
        d = self._dim(dim)
        n = self.shape[d] if self.ndim else 1
        if not 1 <= k <= n:
            raise ValueError(f"kthvalue: k = {k} of dim {d} of {self.shape}; it must lie in 1..{n}")
        if self.ndim == 0:
            return ValuesAndIndices(self._copied(), self.argsort())
        return self._at_rank(self.argsort(d), self._const_like(k - 1, dtypes.int64), d, keepdim)

    def _at_rank(self: Tensor, order: Tensor, rank: Tensor, d: int, keepdim: bool) -> ValuesAndIndices:
        """(values, indices) at place `rank` (0-d, or of size 1 along `d`) of an `order` along `d`."""
        shape = tuple(1 if i == d else n for i, n in enumerate(self.shape))
        at = order._gather_along(d, rank.reshape((1,) * self.ndim if rank.ndim == 0 else rank.shape)._broadcast(shape))
        out = ValuesAndIndices(self._gather_along(d, at), at)
        return out if keepdim else ValuesAndIndices(*(t.squeeze(d) for t in out))

    # *** keys ***

    def _keys(self: Tensor) -> Tensor:
        """Unsigned integers in the order of the values: −0 as 0, every NaN above all numbers."""
        if self.dtype.is_bool:
            return self.cast(dtypes.uint8)
        if self.dtype.is_unsigned:
            return self
        word = {1: dtypes.uint8, 2: dtypes.uint16, 4: dtypes.uint32, 8: dtypes.uint64}[self.dtype.itemsize]
        top = 1 << (word.bits - 1)
        if self.dtype.is_int:
            return self.bitcast(word) ^ top
        bits = self.eq(0)._where(self._const_like(0.0, self.dtype), self).bitcast(word)
        ordered = (bits >= top)._where(bits.bitwise_not(), bits ^ top)
        return self.isnan()._where(self._const_like(word.max, word), ordered)

    # *** orders ***

    def _order(self: Tensor, k: int | None = None) -> Tensor:
        """Keys (.., n) to the positions (.., n) that sort the last dim stably, or to the first `k` of them."""
        *lead, n = self.shape
        k = n if k is None else k
        if not all(isinstance(d, int) for d in self.shape):
            return self.reshape(-1, n).contiguous()._first_of_symbolic(k).reshape(*lead, k)
        if n <= 1 or self.numel() == 0:
            return self._const_like(0, dtypes.int64)._broadcast((*lead, k))
        return self.reshape(-1, n).contiguous()._first(k).reshape(*lead, k)

    def _first_of_symbolic(self: Tensor, k: Any) -> Tensor:
        """`_first` of rows whose size is known when the program runs: at each place stands the element that so many
        come before."""
        hit = self._ranks().unsqueeze(1).eq(self.arange(k)._along(1, 3))
        return (hit * self.arange(self.shape[1])).sum(2)

    def _first(self: Tensor, k: int) -> Tensor:
        rows, n = self.shape
        if n <= SHORT or self.numel() * n <= PAIRS:
            return self.arange(n).unsqueeze(0)._broadcast((rows, n))._placed_in(n, self._ranks())._take(1, 0, k)
        width = max(BLOCK, 4 * k)
        if width > 4 * BLOCK:
            return self._order_by_radix()._take(1, 0, k)
        blocks = -(-n // width)
        keys = self._filled(blocks * width)
        ranks = keys.reshape(rows * blocks, width)._ranks().reshape(rows, blocks, width)
        # the others are written nowhere
        place = (ranks < k)._where(ranks + self.arange(blocks).reshape(1, blocks, 1) * k, blocks * k)
        position = self.arange(blocks * width).unsqueeze(0)._broadcast((rows, blocks * width))
        found = position._placed_in(blocks * k, place.reshape(rows, -1))
        return found._gather_along(1, keys._gather_along(1, found).contiguous()._first(k))

    def _filled(self: Tensor, n: int) -> Tensor:
        """Keys of n elements a row; what is added stays last."""
        return self.pad(((0, 0), (0, n - self.shape[1])), value=self.dtype.max).contiguous()

    def _ranks(self: Tensor) -> Tensor:
        """(rows, n): how many elements of the row come before each, int32."""
        n = self.shape[1]
        mine, other = self.unsqueeze(2), self.unsqueeze(1)
        at, before = self.arange(n).unsqueeze(1), self.arange(n).unsqueeze(0)
        return ((other < mine) | (other.eq(mine) & (before < at))).cast(dtypes.int32).sum(2, dtype=dtypes.int32)

    def _placed_in(self: Tensor, n: int, places: Tensor) -> Tensor:
        """(rows, n): in each row, these values at their places, which differ; those not below n are left out."""
        row = self.arange(self.shape[0])._along(0, 2)._broadcast(self.shape)
        return (
            self._const_like(0, self.dtype)
            ._broadcast((self.shape[0], n))
            ._scatter_at(self, [row, places.cast(dtypes.int64)], "place")
        )

    def _order_by_radix(self: Tensor) -> Tensor:
        rows, n = self.shape
        blocks = -(-n // BLOCK)
        bits = self.dtype.bits
        keys = self._filled(blocks * BLOCK)
        order = self.arange(blocks * BLOCK).cast(dtypes.int32).unsqueeze(0)._broadcast((rows, blocks * BLOCK))
        earlier = self.arange(BLOCK).unsqueeze(0) < self.arange(BLOCK).unsqueeze(1)
        shape = (rows, blocks, BLOCK)
        row, block = (
            self.arange(rows)._along(0, 3)._broadcast(shape),
            self.arange(blocks)._along(1, 3)._broadcast(shape),
        )
        for shift in range(0, bits, DIGIT):
            digit = (keys & ((1 << DIGIT) - 1)).cast(dtypes.int32).reshape(shape).contiguous()
            rank = (digit.unsqueeze(3).eq(digit.unsqueeze(2)) & earlier).cast(dtypes.int32).sum(3, dtype=dtypes.int32)
            cell = digit.cast(dtypes.int64)
            table = self._const_like(0, dtypes.int32)._broadcast((rows, 1 << DIGIT, blocks))
            counts = table._scatter_at(
                self._const_like(1, dtypes.int32)._broadcast(shape), [row, cell, block], "add"
            ).reshape(rows, -1)
            starts = (counts.cumsum(1, dtype=dtypes.int32) - counts).reshape(table.shape)
            places = (starts._gather({0: row, 1: cell, 2: block}) + rank).reshape(rows, -1).contiguous()
            order = order._placed_in(blocks * BLOCK, places)
            if shift + DIGIT < bits:
                keys = (keys >> DIGIT)._placed_in(blocks * BLOCK, places)
        return order._take(1, 0, n).cast(dtypes.int64)
