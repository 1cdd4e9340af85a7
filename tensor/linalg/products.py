"""Products of vectors, of several matrices, and equations between tensors of more dims."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from manygrad.tensor.linalg.lu import inv, solve
from manygrad.tensor.tensor import Tensor


def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Σ x · y along `dim`, after broadcasting."""
    return (x * y).sum(dim) if x.dtype.is_float else (x * y).sum(dim, dtype=(x * y).dtype)


def cross(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """The cross product along `dim`, of size 3, after broadcasting the others. ValueError for other sizes and for
    different numbers of dims."""
    if x.ndim != y.ndim:
        raise ValueError(f"cross: {x.shape} and {y.shape} have different numbers of dims")
    return x.cross(y, dim)


def diagonal(a: Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The diagonals of the matrices in two dims, in a last dim; `offset` above (negative: below) the main one."""
    return a.diagonal(offset, dim1, dim2)


def vander(x: Tensor, N: int | None = None) -> Tensor:
    """The powers 0 to N − 1 (N: n by default) of (..., n): (..., n, N). A tensor without dims is as one of (1,).
    ValueError for N below 2."""
    x = x if x.ndim else x.reshape(1)
    n = x.shape[-1] if N is None else N
    if N is not None and N <= 1:
        raise ValueError(f"vander: N is at least 2, not {N}")
    kind = x.dtype if x.dtype.is_float else "int64"
    column = x.unsqueeze(-1).cast(kind)
    ones = column.ones_like()
    if n < 2:
        return ones[..., :n]
    return ones.cat(column.expand(*x.shape, n - 1), dim=-1).cumprod(-1)


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    """The product of two or more matrices in the order of multiplications that costs least (Cormen et al., 15.2). The
    first one may be a row (n,), the last a column (n,). ValueError where shapes do not fit."""
    given = list(tensors)
    if len(given) < 2:
        raise ValueError(f"multi_dot: a product is of at least 2 tensors, got {len(given)}")
    chain = [t.unsqueeze(0) if i == 0 and t.ndim == 1 else t for i, t in enumerate(given)]
    chain[-1] = chain[-1].unsqueeze(-1) if given[-1].ndim == 1 else chain[-1]
    if any(t.ndim != 2 for t in chain) or any(a.shape[1] != b.shape[0] for a, b in pairwise(chain)):
        raise ValueError(f"multi_dot: {[t.shape for t in given]} are no chain of matrices")
    sizes = [chain[0].shape[0], *(t.shape[1] for t in chain)]
    out = _product(chain, _cheapest(sizes), 0, len(chain) - 1)
    dropped = tuple(d for d, t in ((0, given[0]), (1, given[-1])) if t.ndim == 1)
    return out._without(dropped) if dropped else out


def _cheapest(sizes: list[int]) -> dict[tuple[int, int], int]:
    """Where the product of the matrices i to j, i of (sizes[i], sizes[i + 1]), is best parted."""
    n, cost, part = len(sizes) - 1, {(i, i): 0 for i in range(len(sizes) - 1)}, {}
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            ways = [(cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j)]
            cost[i, j], part[i, j] = min(ways)
    return part


def _product(chain: list[Tensor], part: dict[tuple[int, int], int], i: int, j: int) -> Tensor:
    if i == j:
        return chain[i]
    return _product(chain, part, i, part[i, j]) @ _product(chain, part, part[i, j] + 1, j)


def tensorinv(a: Tensor, ind: int = 2) -> Tensor:
    """The inverse of `a` as a matrix of its first `ind` dims by the others, in the shape a.shape[ind:] + a.shape[:ind].
    ValueError where that matrix is not square."""
    if ind <= 0:
        raise ValueError(f"tensorinv: ind is at least 1, not {ind}")
    rows, columns = prod(a.shape[:ind]), prod(a.shape[ind:])
    if rows != columns:
        raise ValueError(f"tensorinv: the first {ind} dims of {a.shape} hold {rows} elements, the others {columns}")
    return inv(a.reshape(rows, columns)).reshape(*a.shape[ind:], *a.shape[:ind])


def tensorsolve(a: Tensor, b: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """x with tensordot(a, x, x.ndim) = b, of shape a.shape[b.ndim:]; the dims `dims` of `a` are moved to its end first.
    ValueError where the two parts of a's dims do not hold equally many elements."""
    if dims is not None:
        moved = [a._dim(d) for d in dims]
        a = a.permute(*(d for d in range(a.ndim) if d not in moved), *moved)
    shape = a.shape[b.ndim :]
    if prod(shape) != prod(a.shape[: b.ndim]) or prod(shape) != b.numel():
        raise ValueError(
            f"tensorsolve: {a.shape} and {b.shape} do not fit: {prod(shape)} unknowns, {b.numel()} equations"
        )
    return solve(a.reshape(b.numel(), prod(shape)), b.flatten()).reshape(shape)
