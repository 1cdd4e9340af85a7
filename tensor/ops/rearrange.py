"""`rearrange`: reshape and permute by names, in the notation of einops (as in tinygrad)."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


ELLIPSIS = ["...", ""]  # standing alone: several dims; within parentheses it is one name among others


class RearrangeMixin:
    def rearrange(self: Tensor, formula: str, **sizes: int) -> Tensor:
        """`x.rearrange("b (h w) c -> b c h w", h=8)`: dims split and joined by parentheses, permuted by name;
        `...` stands for any dims."""
        left, arrow, right = formula.partition("->")
        if not arrow or "->" in right:
            raise ValueError(f'rearrange {formula!r}: it needs one "->", as in "b h w -> b (h w)"')
        source, target = _groups(formula, left), _groups(formula, right)
        rest = (
            [f"...{i}" for i in range(self.ndim - sum(1 for g in source if g != ELLIPSIS))]
            if ELLIPSIS in source
            else []
        )
        source, target = _spelled(source, rest), _spelled(target, rest)
        names = [n for g in source for n in g]
        if len(source) != self.ndim:
            raise ValueError(
                f"rearrange {formula!r}: the left side has {len(source)} dims, the tensor {self.ndim}, "
                f"shape {self.shape}"
            )
        wanted = [n for g in target for n in g]
        if len(set(names)) != len(names) or sorted(n for n in names if n != "1") != sorted(
            n for n in wanted if n != "1"
        ):
            raise ValueError(f"rearrange {formula!r}: each name stands once on each side")
        if not set(sizes) <= set(names):
            raise ValueError(
                f"rearrange {formula!r}: sizes given for {sorted(set(sizes) - set(names))}, which it does not name"
            )
        known: dict[str, int] = {}
        for g, d in zip(source, self.shape):
            unknown = [n for n in g if n not in sizes]
            given = prod(sizes[n] for n in g if n in sizes)
            if len(unknown) > 1 or d % max(given, 1) or (not unknown and given != d):
                raise ValueError(
                    f"rearrange {formula!r}: ({' '.join(g)}) does not fit a dim of {d} with {sizes}; "
                    "give the sizes of all but one name"
                )
            known.update({n: sizes[n] if n in sizes else d // max(given, 1) for n in g})
        t = self.reshape([known[n] for n in names])
        t = t.permute([names.index(n) for n in wanted if n in names])
        return t.reshape([prod(known.get(n, 1) for n in g) for g in target])


def _groups(formula: str, side: str) -> list[list[str]]:
    """`a (b c) 1` as [[a], [b, c], []]."""
    out: list[list[str]] = []
    for text in re.findall(r"\([^()]*\)|[^\s()]+|[()]", side):
        if text in ("(", ")"):
            raise ValueError(f"rearrange {formula!r}: parentheses do not match")
        if text == "...":
            out.append(ELLIPSIS)
            continue
        group = text[1:-1].split() if text.startswith("(") else [text]
        out.append([n for n in group if n != "1"])
        if any(not (n.isidentifier() or n in ("...", "1")) for n in group):
            raise ValueError(f"rearrange {formula!r}: {text!r} is not a name, 1, or ...")
    return out


def _spelled(groups: list[list[str]], rest: list[str]) -> list[list[str]]:
    """With names for the dims that `...` stands for."""
    out: list[list[str]] = []
    for g in groups:
        out += [[r] for r in rest] if g == ELLIPSIS else [[n for m in g for n in (rest if m == "..." else [m])]]
    return out
