"""The movement primitives: the same elements in another shape or order.
No data moves until a kernel reads through it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType
from manygrad.tensor.grad_mode import STOPPED, is_grad_enabled
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.show import text_of_index, text_of_shape
from manygrad.tensor.uop.symbolic import as_index, floordiv, iconst, mod, product, to_sint, vmax, vmin
from manygrad.tensor.uop.views import COPIED, STRIDED

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
        new = [
            self.shape[i] if s is None else to_sint(s) if isinstance(s, UOp) and s.op is Ops.CONST else s
            for i, s in enumerate(_flat(shape))
        ]
        if -1 in [d for d in new if isinstance(d, int)]:
            ints = [d for d in new if isinstance(d, int)]
            if ints.count(-1) > 1 or any(d < -1 for d in ints):
                raise ValueError(f"reshape to {tuple(new)}: at most one dim can be -1 and none below")
            new[new.index(-1)] = self._missing_dim(new)
        out = tuple(new)
        if out == self.shape:
            return self._viewed_whole()
        plain = all(isinstance(d, int) for d in (*out, *self.shape))
        if plain and prod(out) != prod(self.shape):
            raise ValueError(f"reshape {self.shape} to {out}: {prod(self.shape)} elements are not {prod(out)}")
        if not plain and (have := product(self.shape)) is not (want := product(out)):
            raise ValueError(
                f"reshape {text_of_shape(self.shape)} to {text_of_shape(out)}: {text_of_index(have)} elements are not "
                f"{text_of_index(want)}"
            )
        return self._new(UOp(Ops.RESHAPE, self.dtype, (self.uop,), out))

    def _missing_dim(self: Tensor, new: list[Any]) -> Any:
        """Size that -1 stands for in a new shape. Symbolic dims that both shapes have are left out: they divide
        evenly."""
        given, mine = [d for d in new if not (isinstance(d, int) and d == -1)], list(self.shape)
        if all(isinstance(d, int) for d in (*given, *mine)):
            known, total = prod(given), prod(mine)
            if known and total % known == 0:
                return total // known
            raise ValueError(f"reshape {self.shape} to {tuple(new)}: {total} elements do not divide by {known}")
        for d in [d for d in given if not isinstance(d, int)]:
            if d in mine:
                given.remove(d)
                mine.remove(d)
        count, all_of = product(tuple(given)), product(tuple(mine))
        if count.op is Ops.CONST and count.arg and mod(all_of, count) is iconst(0):
            return to_sint(floordiv(all_of, count))
        raise ValueError(
            f"reshape {text_of_shape(self.shape)} to {text_of_shape(tuple(new))}: {text_of_index(all_of)} elements do "
            f"not divide by {text_of_index(count)}"
        )

    def view(self: Tensor, *shape: Any) -> Tensor:
        """reshape; with a dtype the same bits as that type: the last dim grows or shrinks with the width."""
        return (
            self.bitcast(shape[0]) if len(shape) == 1 and isinstance(shape[0], (DType, str)) else self.reshape(*shape)
        )

    def permute(self: Tensor, *order: Any, dims: Any = ()) -> Tensor:
        """The dims in another order, given one by one or as `dims`. ValueError where it does not name each dim once."""
        dims = tuple(self._dim(d) for d in (*_flat(order), *dims))
        if sorted(dims) != list(range(self.ndim)):
            raise ValueError(f"permute{dims} does not name every dim of {self.shape} once")
        return self._viewed_whole() if dims == tuple(range(self.ndim)) else self._op(Ops.PERMUTE, dims)

    def _viewed_whole(self: Tensor) -> Tensor:
        """Itself; under no_grad() what no gradient flows through, as of any view that is made there."""
        return self if is_grad_enabled() or STOPPED(self.uop) else self.detach()

    def _broadcast(self: Tensor, shape: tuple[Any, ...]) -> Tensor:
        t = self if len(shape) == self.ndim else self.reshape((1,) * (len(shape) - self.ndim) + self.shape)
        return t if t.shape == tuple(shape) else t._op(Ops.EXPAND, tuple(shape))

    def shrink(self: Tensor, *bounds: Any) -> Tensor:
        """Keep [begin, end) of each dim; None keeps all."""
        arg = tuple(
            (0, d) if b is None else (b[0], b[1])
            for b, d in zip(
                _flat(bounds)
                if len(bounds) == 1 and bounds[0] and isinstance(bounds[0][0], (tuple, list, type(None)))
                else bounds,
                self.shape,
            )
        )
        if len(arg) != self.ndim:
            raise ValueError(f"shrink of {self.shape} needs {self.ndim} pairs, got {len(arg)}")
        for (b, e), d in zip(arg, self.shape):
            if isinstance(b, int) and isinstance(e, int) and isinstance(d, int):
                if not 0 <= b <= e <= d:
                    raise ValueError(f"shrink of {self.shape}: [{b}, {e}) is outside [0, {d}]")
            elif isinstance(d, int) and (vmin(as_index(b)) < 0 or vmax(as_index(e)) > d):
                begin, end = (x if isinstance(x, int) else text_of_index(x) for x in (b, e))
                raise ValueError(
                    f"shrink of {self.shape}: [{begin}, {end}) can reach outside [0, {d}]: "
                    f"it covers {vmin(as_index(b))}..{vmax(as_index(e))}; narrow the variable's range"
                )
        is_whole = all(b == 0 and e == d for (b, e), d in zip(arg, self.shape))
        return self._viewed_whole() if is_whole else self._op(Ops.SHRINK, arg)

    def flip(self: Tensor, *axes: Any, dims: Any = ()) -> Tensor:
        """In reverse order along the dims, one by one or as `dims`: a copy, as in PyTorch (`t[::-1]` is a view)."""
        return self._flipped(*axes, *((dims,) if isinstance(dims, int) else dims))._copied()

    def _strided(self: Tensor, made: Tensor) -> Tensor:
        """`made` of this tensor by movement ops, as a view of it, even if a reshape on the way would be a copy."""
        x = made.uop
        while x is not self.uop and (x.op in GroupOp.VIEW or x.op is Ops.DETACH):
            x = x.src[0]
        if made is self or x is not self.uop:
            return made
        t = self._new(UOp(Ops.CUSTOM, made.dtype, (made.uop, self.uop), STRIDED))
        t._storage = self._identity()
        return t

    def _copied(self: Tensor) -> Tensor:
        """The same value, lazily, in memory of its own as far as writes go:
        what PyTorch copies though a view could show it."""
        return self._new(UOp(Ops.CUSTOM, self.dtype, (self.uop,), COPIED))

    def _flipped(self: Tensor, *dims: Any) -> Tensor:
        """`flip` as a view."""
        named = _flat(dims)
        flipped = self._axes(named) if named else ()
        return self._op(Ops.FLIP, tuple(i in flipped for i in range(self.ndim))) if flipped else self
