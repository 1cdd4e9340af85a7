"""Padding: zeros or a value, the reflected, replicated or wrapped edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Pairs = tuple[tuple[int, int], ...]


class PaddingMixin:
    def pad(self: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
        """PyTorch's flat (left, right, top, bottom, ...) from the last dim on, or a tuple of (before, after) per dim;
        negative crops.

        "reflect" mirrors without the edge, "replicate" repeats it, "circular" goes on at the other end. What is cropped
        at one end still counts at the other for "reflect" and "replicate"; "circular" wraps what is left (all as
        PyTorch).
        """
        pairs = self._pad_pairs(pad)
        if any(max(-b, 0) + max(-a, 0) > d for (b, a), d in zip(pairs, self.shape) if isinstance(d, int)):
            raise ValueError(f"pad: {pairs} crops more than {self.shape} has")
        if mode == "constant":
            return self._pad_constant(pairs, 0.0 if value is None else value)
        if mode not in ("reflect", "replicate", "circular"):
            raise ValueError(f'pad: mode is "constant", "reflect", "replicate" or "circular", not {mode!r}')
        if value:
            raise ValueError(f'pad: mode "{mode}" takes no value, got {value}')
        t = self
        for d, (before, after) in enumerate(pairs):
            if before or after:
                t = t._pad_edges(d, before, after, mode)
        return t._copied() if t is self else t

    def _pad_constant(self: Tensor, pairs: Pairs, value: float) -> Tensor:
        crop = tuple((max(-b, 0), d - max(-a, 0)) if b < 0 or a < 0 else (0, d) for (b, a), d in zip(pairs, self.shape))
        grow = tuple((max(b, 0), max(a, 0)) for b, a in pairs)
        t = self.shrink(crop)
        if not any(b or a for b, a in grow):
            return t._copied()
        padded = t._op(Ops.PAD, grow)
        if value == 0:
            return padded
        inside = t._new(UOp.const(t.dtype, 1))._broadcast(t.shape)._op(Ops.PAD, grow).bool()
        return inside._where(padded, value).cast(self.dtype)

    def _pad_edges(self: Tensor, dim: int, before: int, after: int, mode: str) -> Tensor:
        n = self.shape[dim]
        if mode == "reflect" and max(before, after) >= n:
            raise ValueError(
                f"pad: reflecting {(before, after)} needs a dim larger than that, dim {dim} of {self.shape} is {n}; "
                'pad less, or use "replicate"'
            )
        kept = n - max(-before, 0) - max(-after, 0)
        if mode == "circular" and max(before, after) > kept:
            raise ValueError(
                f"pad: wrapping {(before, after)} around needs a dim at least as large, dim {dim} of {self.shape} is "
                f"{kept if kept == n else f'{kept} after cropping'}"
            )
        if n == 0:
            raise ValueError(f'pad: dim {dim} of {self.shape} is empty, there is no edge to "{mode}"')
        t = self._take(dim, max(-before, 0), n - max(-after, 0))
        left, right = max(before, 0), max(after, 0)
        if mode == "reflect":
            parts = [self._take(dim, 1, left + 1)._flipped(dim), t, self._take(dim, n - 1 - right, n - 1)._flipped(dim)]
        elif mode == "circular":
            parts = [t._take(dim, kept - left, kept), t, t._take(dim, 0, right)]
        else:
            wide = [tuple(k if i == dim else d for i, d in enumerate(self.shape)) for k in (left, right)]
            parts = [self._take(dim, 0, 1)._broadcast(wide[0]), t, self._take(dim, n - 1, n)._broadcast(wide[1])]
        return parts[0].cat(*parts[1:], dim=dim)

    def _pad_pairs(self: Tensor, padding: Any) -> Pairs:
        if isinstance(padding, int):
            raise TypeError(f"pad: pass a tuple of sizes, ({padding}, {padding}) for both ends of the last dim")
        if all(isinstance(p, int) for p in padding):
            if len(padding) % 2 or len(padding) // 2 > self.ndim:
                raise ValueError(f"pad: {tuple(padding)} is not pairs for at most {self.ndim} dims")
            pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)][::-1]
            return ((0, 0),) * (self.ndim - len(pairs)) + tuple(pairs)
        pairs = [p or (0, 0) for p in padding]
        if len(pairs) != self.ndim:
            raise ValueError(f"pad of {self.shape} needs {self.ndim} pairs, got {len(pairs)}")
        return tuple((int(b), int(a)) for b, a in pairs)
