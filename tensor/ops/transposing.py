"""Dims in another order, elements in reverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class TransposingMixin:
    def transpose(self: Tensor, dim0: int = 1, dim1: int = 0) -> Tensor:
        """The two dims change places."""
        order = list(range(self.ndim))
        a, b = self._dim(dim0), self._dim(dim1)
        if not order:
            return self
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    swapaxes = transpose
    swapdims = transpose

    def t(self: Tensor) -> Tensor:
        """The transpose of a matrix; fewer dims stay as they are."""
        if self.ndim > 2:
            raise ValueError(f"t() is for at most 2 dims, not {self.shape}; use .mT or transpose(dim0, dim1)")
        return self.permute(*reversed(range(self.ndim)))

    @property
    def T(self: Tensor) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self: Tensor) -> Tensor:
        return self.transpose(-1, -2)

    @property
    def H(self: Tensor) -> Tensor:
        """The conjugate transpose; numbers are real, so the transpose."""
        return self.t()

    @property
    def mH(self: Tensor) -> Tensor:
        return self.transpose(-1, -2)

    def adjoint(self: Tensor) -> Tensor:
        return self.transpose(-1, -2)

    def movedim(self: Tensor, source: int | tuple[int, ...], destination: int | tuple[int, ...]) -> Tensor:
        """Dims `source` moved to the places `destination`; the others keep their order."""
        sources = [self._dim(d) for d in ((source,) if isinstance(source, int) else source)]
        places = [self._dim(d) for d in ((destination,) if isinstance(destination, int) else destination)]
        if len(sources) != len(places) or len(set(sources)) != len(sources) or len(set(places)) != len(places):
            raise ValueError(f"movedim: {source} and {destination} must name equally many dims, each once")
        if not self.ndim:
            return self
        order: list[int | None] = [None] * self.ndim
        for s, p in zip(sources, places):
            order[p] = s
        rest = iter(d for d in range(self.ndim) if d not in sources)
        return self.permute([next(rest) if d is None else d for d in order])

    moveaxis = movedim

    def rot90(self: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
        """Turned by k · 90° in the plane of `dims`, from the first towards the second."""
        if len(dims) != 2 or self._dim(dims[0]) == self._dim(dims[1]):
            raise ValueError(f"rot90: dims must be two different ones of {self.shape}, got {tuple(dims)}")
        a, b = dims
        return [
            lambda: self._copied(),
            lambda: self.flip(b).transpose(a, b),
            lambda: self.flip(a, b),
            lambda: self.flip(a).transpose(a, b),
        ][k % 4]()

    def fliplr(self: Tensor) -> Tensor:
        """Dim 1 reversed."""
        if self.ndim < 2:
            raise ValueError(f"fliplr needs at least 2 dims, got shape {self.shape}")
        return self.flip(1)

    def flipud(self: Tensor) -> Tensor:
        """Dim 0 reversed."""
        if self.ndim < 1:
            raise ValueError("flipud needs at least 1 dim")
        return self.flip(0)
