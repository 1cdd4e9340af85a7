"""A tensor cut along a dim into views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Sections = int | list[int] | tuple[int, ...]


class SplittingMixin:
    def split(self: Tensor, split_size: Sections, dim: int = 0) -> tuple[Tensor, ...]:
        """Parts of `split_size` along `dim`, the last one what is left;
        or parts of the listed sizes, which add up to the dim."""
        d = self._dim(dim)
        n = self.shape[d]
        if isinstance(split_size, int) and (split_size < 0 or (split_size == 0 and n)):
            raise ValueError(
                f"split: parts of size {split_size} do not cover dim {d} of {self.shape}; the size must be positive"
            )
        sizes = (
            [min(split_size, n - i) for i in range(0, max(n, 1), max(split_size, 1))]
            if isinstance(split_size, int)
            else list(split_size)
        )
        if any(s < 0 for s in sizes) or sum(sizes) != n:
            raise ValueError(f"split: sizes {sizes} do not add up to dim {d} of {self.shape}")
        return self._parts(sizes, d)

    def _parts(self: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return tuple(self._take(dim, e - s, e) for s, e in zip(sizes, ends))

    def split_with_sizes(self: Tensor, split_sizes: list[int] | tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:
        return self.split(split_sizes, dim)

    def chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """At most `chunks` parts of ceil(size / chunks), the last one smaller.
        `tensor_split` always gives `chunks` parts."""
        if chunks <= 0:
            raise ValueError(f"chunk: the number of chunks must be positive, got {chunks}")
        d = self._dim(dim)
        n = self.shape[d]
        return self.split(-(-n // chunks), d) if n else self._parts([0] * chunks, d)

    unsafe_split, unsafe_split_with_sizes, unsafe_chunk = split, split_with_sizes, chunk

    def tensor_split(self: Tensor, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """`n` parts whose sizes differ by at most one, or parts between the listed positions
        (negative: from the end; too large: the end)."""
        d = self._dim(dim)
        n = self.shape[d]
        if hasattr(indices_or_sections, "uop"):
            indices_or_sections = indices_or_sections.tolist()
        if isinstance(indices_or_sections, int):
            k = indices_or_sections
            if k <= 0:
                raise ValueError(f"tensor_split: the number of sections must be positive, got {k}")
            return self._parts([n // k + (i < n % k) for i in range(k)], d)
        cuts = [min(max(c + n if c < 0 else c, 0), n) for c in indices_or_sections]
        return tuple(self._take(d, a, max(a, b)) for a, b in zip([0, *cuts], [*cuts, n]))

    def _split_evenly(self: Tensor, name: str, sections: Any, dim: int) -> tuple[Tensor, ...]:
        if isinstance(sections, int) and (sections <= 0 or self.shape[dim] % sections):
            raise ValueError(
                f"{name}: dim {dim} of {self.shape} does not divide into {sections} equal parts; use tensor_split"
            )
        return self.tensor_split(sections, dim)

    def hsplit(self: Tensor, split_size_or_sections: Any) -> tuple[Tensor, ...]:
        """`tensor_split` along dim 1 (of a 1-d tensor, dim 0); a number of sections must divide the dim."""
        if self.ndim == 0:
            raise ValueError("hsplit needs at least 1 dim")
        return self._split_evenly("hsplit", split_size_or_sections, 0 if self.ndim == 1 else 1)

    def vsplit(self: Tensor, split_size_or_sections: Any) -> tuple[Tensor, ...]:
        """`tensor_split` along dim 0 of at least 2 dims."""
        if self.ndim < 2:
            raise ValueError(f"vsplit needs at least 2 dims, got shape {self.shape}")
        return self._split_evenly("vsplit", split_size_or_sections, 0)

    def dsplit(self: Tensor, split_size_or_sections: Any) -> tuple[Tensor, ...]:
        """`tensor_split` along dim 2 of at least 3 dims."""
        if self.ndim < 3:
            raise ValueError(f"dsplit needs at least 3 dims, got shape {self.shape}")
        return self._split_evenly("dsplit", split_size_or_sections, 2)

    def unbind(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The slices along `dim`, without that dim."""
        d = self._dim(dim)
        return tuple(self.select(d, i) for i in range(self.shape[d]))
