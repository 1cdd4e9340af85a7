"""einsum: operands lined up on the letters of a formula, multiplied, summed over what the output lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

DOTS = "..."


class EinsumMixin:
    def einsum(self: Any, *operands: Any) -> Tensor:
        """`Tensor.einsum("bij,bjk->bik", x, y)`, also `x.einsum("ij,jk->ik", y)`. A letter that stands twice in an
        operand takes the diagonal; `...` stands for broadcast dims; without `->` the output has the letters that stand
        once, in order."""
        formula: str = self
        if not isinstance(self, str):  # called as a method
            formula, operands = operands[0], (self, *operands[1:])
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        text = formula.replace(" ", "")
        left, arrow, out = text.partition("->")
        names = left.split(",")
        if len(names) != len(operands):
            raise ValueError(f"einsum {formula!r} names {len(names)} operands, got {len(operands)}")
        wide = max((t.ndim - len(n.replace(DOTS, "")) for t, n in zip(operands, names) if DOTS in n), default=0)
        dots = [chr(ord("À") + i) for i in range(max(wide, 0))]
        spelled = [_spelled(formula, n, t, dots) for t, n in zip(operands, names)]
        joined = "".join(spelled)
        if not arrow:
            out = "".join(dots) + "".join(sorted(c for c in set(joined) - set(dots) if joined.count(c) == 1))
        out = out.replace(DOTS, "".join(dots))
        unknown = [c for c in out if c not in joined]
        if unknown or len(set(out)) != len(out):
            raise ValueError(f"einsum {formula!r}: the output {out!r} names {unknown or 'a letter twice'}")
        order = [*out, *sorted(set(joined) - set(out))]
        sizes: dict[str, Any] = {}
        for t, n in zip(operands, spelled):
            for c, d in zip(n, t.shape):
                if sizes.setdefault(c, d) != d and c not in dots and 1 not in (sizes[c], d):
                    raise ValueError(f"einsum {formula!r}: letter {c!r} stands for {sizes[c]} and for {d}")
                sizes[c] = max(sizes[c], d) if isinstance(d, int) and isinstance(sizes[c], int) else d
        total: Tensor | None = None
        for t, n in zip(operands, spelled):
            t, n = _diagonals(t, n)
            at = sorted(range(len(n)), key=lambda i: order.index(n[i]))
            t = t.permute(at) if at else t
            lined = t.reshape(tuple(dict(zip((n[i] for i in at), t.shape)).get(c, 1) for c in order))
            total = lined if total is None else total * lined
        assert total is not None
        extra = tuple(range(len(out), len(order)))
        kind = dtypes.int64 if total.dtype.is_bool else total.dtype
        return total.sum(extra, dtype=kind) if extra else total


def _spelled(formula: str, name: str, t: Tensor, dots: list[str]) -> str:
    """The letters of an operand, one a dim, `...` spelled out."""
    if DOTS in name:
        name = name.replace(DOTS, "".join(dots[len(dots) - (t.ndim - len(name) + len(DOTS)) :]))
    if len(name) != t.ndim:
        raise ValueError(f"einsum {formula!r}: operand {name!r} has {t.ndim} dims, shape {t.shape}")
    return name


def _diagonals(t: Tensor, name: str) -> tuple[Tensor, str]:
    """A letter that stands twice: the diagonal of its dims."""
    for c in dict.fromkeys(name):
        while name.count(c) > 1:
            i = name.index(c)
            j = name.index(c, i + 1)
            t = t.diagonal(0, i, j)
            name = name[:i] + name[i + 1 : j] + name[j + 1 :] + c
    return t, name
