"""Movement: the same elements in another shape or order. No data moves until a kernel reads through it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.show import text_of_index
from manygrad.tensor.uop.symbolic import as_index, to_sint, vmax, vmin

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args


def _is_one(d: Any) -> bool:
    return isinstance(d, int) and d == 1


class MovementMixin:
    def _dim(self: Tensor, dim: int, extra: int = 0) -> int:
        """`dim` counted from 0; negative counts from the end."""
        n = self.ndim + extra
        if not -max(n, 1) <= dim < max(n, 1):
            raise IndexError(f"dim {dim} is outside {-max(n, 1)}..{max(n, 1) - 1} for shape {self.shape}")
        return dim + n if dim < 0 else dim

    def reshape(self: Tensor, *shape: Any) -> Tensor:
        """The same elements in row-major order; one dim may be -1."""
        new = [self.shape[i] if s is None else to_sint(s) if isinstance(s, UOp) and s.op is Ops.CONST else s for i, s in enumerate(_flat(shape))]
        if -1 in [d for d in new if isinstance(d, int)]:
            ints = [d for d in new if isinstance(d, int)]
            if ints.count(-1) > 1 or any(d < -1 for d in ints):
                raise ValueError(f"reshape to {tuple(new)}: at most one dim can be -1 and none below")
            symbolic = [d for d in new if not isinstance(d, int)]
            mine = [d for d in self.shape if not isinstance(d, int)]
            known = prod(d for d in ints if d != -1)
            total = prod(d for d in self.shape if isinstance(d, int))
            if symbolic == mine and known and total % known == 0:
                new[new.index(-1)] = total // known
            else:
                raise ValueError(f"reshape {self.shape} to {tuple(new)}: {total} elements do not divide by {known}")
        out = tuple(new)
        if out == self.shape:
            return self
        if all(isinstance(d, int) for d in (*out, *self.shape)):
            if prod(out) != prod(self.shape):
                raise ValueError(f"reshape {self.shape} to {out}: {prod(self.shape)} elements are not {prod(out)}")
        elif [d for d in out if not isinstance(d, int)] != [d for d in self.shape if not isinstance(d, int)] or prod(
            d for d in out if isinstance(d, int)
        ) != prod(d for d in self.shape if isinstance(d, int)):
            raise ValueError(f"reshape {self.shape} to {out}: symbolic dims must be kept as they are")
        return self._new(UOp(Ops.RESHAPE, self.dtype, (self.uop,), out))

    view = reshape

    def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if self.ndim == 0:
            return self.reshape(1)
        a, b = self._dim(start_dim), self._dim(end_dim)
        if a > b:
            raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
        return self.reshape(*self.shape[:a], -1, *self.shape[b + 1 :]) if prod(self.shape) else self.reshape(*self.shape[:a], prod(self.shape[a : b + 1]), *self.shape[b + 1 :])

    def unflatten(self: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        d = self._dim(dim)
        return self.reshape(*self.shape[:d], *sizes, *self.shape[d + 1 :])

    def permute(self: Tensor, *order: Any) -> Tensor:
        dims = tuple(self._dim(d) for d in _flat(order))
        if sorted(dims) != list(range(self.ndim)):
            raise ValueError(f"permute{dims} does not name every dim of {self.shape} once")
        return self if dims == tuple(range(self.ndim)) else self._op(Ops.PERMUTE, dims)

    def transpose(self: Tensor, dim0: int = 1, dim1: int = 0) -> Tensor:
        order = list(range(self.ndim))
        a, b = self._dim(dim0), self._dim(dim1)
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    @property
    def T(self: Tensor) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self: Tensor) -> Tensor:
        return self.transpose(-1, -2)

    def expand(self: Tensor, *shape: Any) -> Tensor:
        """Dims of size 1 repeated; -1 keeps a dim; new dims in front."""
        want = _flat(shape)
        have = (1,) * (len(want) - self.ndim) + self.shape
        if len(want) < self.ndim:
            raise ValueError(f"expand {self.shape} to {want}: fewer dims than it has")
        out = tuple(h if isinstance(w, int) and w == -1 else w for h, w in zip(have, want))
        for h, w in zip(have, out):
            if not _is_one(h) and h != w:
                raise ValueError(f"expand {self.shape} to {out}: a dim of {h} cannot become {w}; only dims of size 1 expand")
        return self._broadcast(out)

    def _broadcast(self: Tensor, shape: tuple[Any, ...]) -> Tensor:
        t = self if len(shape) == self.ndim else self.reshape((1,) * (len(shape) - self.ndim) + self.shape)
        return t if t.shape == tuple(shape) else t._op(Ops.EXPAND, tuple(shape))

    def shrink(self: Tensor, *bounds: Any) -> Tensor:
        """Keep [begin, end) of each dim; None keeps all."""
        arg = tuple((0, d) if b is None else (b[0], b[1]) for b, d in zip(_flat(bounds) if len(bounds) == 1 and bounds[0] and isinstance(bounds[0][0], (tuple, list, type(None))) else bounds, self.shape))
        if len(arg) != self.ndim:
            raise ValueError(f"shrink of {self.shape} needs {self.ndim} pairs, got {len(arg)}")
        for (b, e), d in zip(arg, self.shape):
            if isinstance(b, int) and isinstance(e, int) and isinstance(d, int):
                if not 0 <= b <= e <= d:
                    raise ValueError(f"shrink of {self.shape}: [{b}, {e}) is outside [0, {d}]")
            elif isinstance(d, int) and (vmin(as_index(b)) < 0 or vmax(as_index(e)) > d):
                begin, end = (x if isinstance(x, int) else text_of_index(x) for x in (b, e))
                raise ValueError(f"shrink of {self.shape}: [{begin}, {end}) can reach outside [0, {d}]: it covers {vmin(as_index(b))}..{vmax(as_index(e))}; narrow the variable's range")
        return self if all(b == 0 and e == d for (b, e), d in zip(arg, self.shape) if True) else self._op(Ops.SHRINK, arg)

    def pad(self: Tensor, padding: Any, mode: str = "constant", value: float = 0.0) -> Tensor:
        """PyTorch's flat (left, right, top, bottom, ...) from the last dim, or a tuple of (before, after) per dim; negative crops."""
        if mode != "constant":
            raise ValueError(f'pad: mode "constant" only, not {mode!r}')
        pairs = self._pad_pairs(padding)
        crop = tuple((max(-b, 0), d - max(-a, 0)) for (b, a), d in zip(pairs, self.shape))
        grow = tuple((max(b, 0), max(a, 0)) for b, a in pairs)
        t = self.shrink(crop)
        if not any(b or a for b, a in grow):
            return t
        padded = t._op(Ops.PAD, grow)
        if value == 0:
            return padded
        inside = t._new(UOp.const(t.dtype, 1))._broadcast(t.shape)._op(Ops.PAD, grow).bool()
        return inside.where(padded, value).cast(self.dtype)

    def _pad_pairs(self: Tensor, padding: Any) -> tuple[tuple[int, int], ...]:
        if all(isinstance(p, int) for p in padding):
            if len(padding) % 2 or len(padding) // 2 > self.ndim:
                raise ValueError(f"pad: {tuple(padding)} is not pairs for at most {self.ndim} dims")
            pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)][::-1]
            return ((0, 0),) * (self.ndim - len(pairs)) + tuple(pairs)
        pairs = [p or (0, 0) for p in padding]
        if len(pairs) != self.ndim:
            raise ValueError(f"pad of {self.shape} needs {self.ndim} pairs, got {len(pairs)}")
        return tuple((int(b), int(a)) for b, a in pairs)

    def flip(self: Tensor, *dims: Any) -> Tensor:
        flipped = {self._dim(d) for d in _flat(dims)}
        return self._op(Ops.FLIP, tuple(i in flipped for i in range(self.ndim))) if flipped else self

    def squeeze(self: Tensor, dim: int | None = None) -> Tensor:
        if dim is None:
            return self.reshape(tuple(d for d in self.shape if not _is_one(d)))
        d = self._dim(dim)
        return self.reshape(self.shape[:d] + self.shape[d + 1 :]) if self.ndim and _is_one(self.shape[d]) else self

    def unsqueeze(self: Tensor, dim: int) -> Tensor:
        d = self._dim(dim, 1)
        return self.reshape((*self.shape[:d], 1, *self.shape[d:]))

    def cat(self: Tensor, *others: Tensor, dim: int = 0) -> Tensor:
        """Joined along `dim`; all other dims equal."""
        d = self._dim(dim)
        parts = [self, *others]
        for t in parts[1:]:
            if t.ndim != self.ndim or any(i != d and a != b for i, (a, b) in enumerate(zip(t.shape, self.shape))):
                raise ValueError(f"cat along dim {d}: {t.shape} does not fit {self.shape}; all other dims must be equal")
        from manygrad.tensor.dtype import promote

        kind = self.dtype
        for t in parts[1:]:
            kind = promote(kind, t.dtype)
        parts = [t.cast(kind) for t in parts if not (isinstance(t.shape[d], int) and t.shape[d] == 0)] or [self.cast(kind)]
        if len(parts) == 1:
            return parts[0]
        devices = {t.uop.device for t in parts if t.uop.device is not None}
        if len(devices) > 1:
            raise ValueError(f"cat: the tensors are on different devices {sorted(map(str, devices))}; move them with .to(...) first")
        first = next((t for t in parts if t.uop.device is not None), parts[0])
        return first._new(UOp(Ops.CAT, kind, tuple(t.uop for t in parts), d))

    def stack(self: Tensor, *others: Tensor, dim: int = 0) -> Tensor:
        d = self._dim(dim, 1)
        return self.unsqueeze(d).cat(*[t.unsqueeze(d) for t in others], dim=d)

    def split(self: Tensor, sizes: int | list[int] | tuple[int, ...], dim: int = 0) -> tuple[Tensor, ...]:
        d = self._dim(dim)
        n = self.shape[d]
        parts = [min(sizes, n - i) for i in range(0, max(n, 1), sizes)] if isinstance(sizes, int) else list(sizes)
        if sum(parts) != n:
            raise ValueError(f"split: sizes {parts} do not add up to dim {d} of {self.shape}")
        out, at = [], 0
        for p in parts:
            out.append(self.shrink(tuple((at, at + p) if i == d else None for i in range(self.ndim))))
            at += p
        return tuple(out)

    def chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        return self.split(-(-self.shape[self._dim(dim)] // chunks), dim)

    def unbind(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        d = self._dim(dim)
        return tuple(t.squeeze(d) for t in self.split(1, d))

    def repeat(self: Tensor, *repeats: Any) -> Tensor:
        """The tensor tiled `repeats[i]` times along dim i."""
        times = _flat(repeats)
        shape = (1,) * (len(times) - self.ndim) + self.shape
        t = self.reshape(tuple(x for d in shape for x in (1, d)))
        return t.expand(tuple(x for r, d in zip(times, shape) for x in (r, d))).reshape(tuple(r * d for r, d in zip(times, shape)))

    def roll(self: Tensor, shift: int, dim: int) -> Tensor:
        d = self._dim(dim)
        n = self.shape[d]
        k = shift % n if n else 0
        if k == 0:
            return self
        a, b = self.split([n - k, k], d)
        return b.cat(a, dim=d)

    def triu(self: Tensor, diagonal: int = 0) -> Tensor:
        return self._triangle(diagonal, upper=True)

    def tril(self: Tensor, diagonal: int = 0) -> Tensor:
        return self._triangle(diagonal, upper=False)

    def _triangle(self: Tensor, diagonal: int, upper: bool) -> Tensor:
        row = self.arange(self.shape[-2]).unsqueeze(1)
        col = self.arange(self.shape[-1]).unsqueeze(0)
        keep = col >= row + diagonal if upper else col <= row + diagonal
        return keep.where(self, 0).cast(self.dtype)

    def unfold_windows(self: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
        """(..., *spatial) -> (..., *out, *kernel): every window of a convolution or pooling, as a view.

        Repeats each spatial dim so that a reshape with a dim one longer shifts the window by one per row (no data moves).
        """
        n = len(kernel)
        lead, spatial = self.shape[:-n], self.shape[-n:]
        for size, k, d in zip(spatial, kernel, dilation):
            if size < d * (k - 1) + 1:
                raise ValueError(f"window {kernel} (dilation {dilation}) is larger than the input's {spatial}; add padding or take a smaller window")
        outs = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(spatial, kernel, stride, dilation)]
        t = self
        for i, (k, s, d, o) in enumerate(zip(kernel, stride, dilation, outs)):
            axis = len(lead) + i
            size = t.shape[axis]
            times = -(-k * (size + d) // size)
            before, after = t.shape[:axis], t.shape[axis + 1 :]
            t = t.reshape(*before, 1, size, *after).expand(*before, times, size, *after).reshape(*before, times * size, *after)
            t = t._take(axis, 0, k * (size + d)).reshape(*before, k, size + d, *after)
            need = s * (o - 1) + 1
            t = t._take(axis + 1, 0, need)
            if s > 1:
                t = t.pad(tuple((0, s * o - need) if j == axis + 1 else (0, 0) for j in range(t.ndim)))
                t = t.reshape(*before, k, o, s, *after)._take(axis + 2, 0, 1).reshape(*before, k, o, *after)
            t = t.permute(*range(axis), axis + 1, *range(axis + 2, t.ndim), axis)
        return t

    def _take(self: Tensor, dim: int, begin: Any, end: Any) -> Tensor:
        return self.shrink(tuple((begin, end) if i == dim else None for i in range(self.ndim)))
