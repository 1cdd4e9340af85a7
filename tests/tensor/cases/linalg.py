"""Cases of factorisations and of products of matrices;
those whose result is not unique are checked by what they must satisfy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, shapes

BOTH = ("float32", "float64")
LOOSE = {"float32": 2e-3, "float64": 1e-9}  # conditioning: errors grow with the condition number of the drawn matrices


def matrices(
    kind: str = "regular", low: int = 1, tall: bool = False, columns: bool = False
) -> Callable[[Draw], Sample]:
    """(..., n, n) well-conditioned; "positive": symmetric positive definite;
    `columns`: with a right side (..., n, k)."""

    def samples(draw: Draw) -> Sample:
        lead = tuple(draw(st.lists(st.integers(1, 2), max_size=1)))
        n = draw(st.integers(low, 4))
        m = n + draw(st.integers(0, 2)) if tall else n
        a = array(draw, (*lead, m, n), low=-1, high=1)
        if kind == "positive":
            a = a @ np.swapaxes(a, -1, -2) + 2 * np.eye(n)
        elif kind == "symmetric":
            a = a + np.swapaxes(a, -1, -2) + np.diag(np.arange(n) * 3.0)
        elif not tall:
            a = a + 2 * np.eye(n) * np.sign(np.diagonal(a, 0, -2, -1))[..., None]
        else:
            a = a + np.eye(m, n) * (2 + np.arange(n))
        return Sample((a, array(draw, (*lead, m, 2), low=-1, high=1)) if columns else (a,))

    return samples


def vectors(*names: str) -> Callable[[Draw], Sample]:
    """Arrays whose dims are letters: equal letters are equal sizes."""

    def samples(draw: Draw) -> Sample:
        sizes = {c: draw(st.integers(0, 4)) for c in sorted(set("".join(names)))}
        return Sample(tuple(array(draw, tuple(sizes[c] for c in n), low=-2, high=2) for n in names))

    return samples


def scaled(*names: str) -> Callable[[Draw], Sample]:
    def samples(draw: Draw) -> Sample:
        s = vectors(*names)(draw)
        return Sample(
            s.arrays, (), {"beta": draw(st.sampled_from([0.5, 1, 2.0])), "alpha": draw(st.sampled_from([1, -1.5]))}
        )

    return samples


def kron_shapes(draw: Draw) -> Sample:
    return Sample((array(draw, shapes(draw, max_dims=2), low=-2), array(draw, shapes(draw, max_dims=2), low=-2)))


def crossed(draw: Draw) -> Sample:
    shape = list(shapes(draw, 1, 3))
    d = draw(st.integers(0, len(shape) - 1))
    shape[d] = 3
    return Sample(
        (array(draw, tuple(shape)), array(draw, tuple(shape))),
        (),
        {"dim": d - len(shape) if draw(st.booleans()) else d},
    )


def expm(a: np.ndarray) -> np.ndarray:
    out, term = np.zeros_like(a), np.broadcast_to(np.eye(a.shape[-1]), a.shape).copy()
    for k in range(1, 60):
        out = out + term
        term = term @ a / k
    return out


def positive(a: np.ndarray) -> np.ndarray:
    return (a + np.swapaxes(a, -1, -2)) / 2


def spd(f: str) -> Callable[..., Any]:
    return lambda lib, a, *rest, **k: getattr((a + a.mT) * 0.5, f)(*rest, **k)


def powers(draw: Draw) -> Sample:
    return Sample(matrices()(draw).arrays, (draw(st.integers(-3, 5)),))


def einsums(draw: Draw) -> Sample:
    formula = draw(
        st.sampled_from(
            [
                "ij,jk->ik",
                "ij,jk",
                "bij,bjk->bik",
                "i,j->ij",
                "ij->",
                "ij->ji",
                "ii->i",
                "ii",
                "...ij,...jk->...ik",
                "ij,ij->i",
                "ij,j,i->",
                "i...->...",
            ]
        )
    )
    sizes = {c: draw(st.integers(1, 4)) for c in "bijk"}
    arrays = []
    for name in formula.partition("->")[0].split(","):
        lead = (2,) * draw(st.integers(0, 1)) if "..." in name else ()
        inner = tuple(sizes[c] for c in name if c in sizes)
        arrays.append(array(draw, (*inner, *lead) if name.startswith("i...") else (*lead, *inner), low=-2, high=2))
    return Sample(tuple(arrays), (formula,))


def plus(product: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x, a, b, beta=1, alpha=1: beta * x + alpha * product(a, b)


CASES = [
    Case("Tensor.matmul", np.matmul, vectors("bij", "bjk"), variant="batched"),
    Case("Tensor.matmul", np.matmul, vectors("bij", "jk"), variant="broadcast"),
    Case("Tensor.matmul", np.matmul, vectors("j", "bjk"), variant="vector"),
    Case("Tensor.mm", np.matmul, vectors("ij", "jk")),
    Case("Tensor.bmm", np.matmul, vectors("bij", "bjk")),
    Case("Tensor.mv", np.matmul, vectors("ij", "j")),
    Case("Tensor.dot", np.dot, vectors("i", "i")),
    Case("Tensor.vdot", np.vdot, vectors("i", "i")),
    Case("Tensor.inner", np.inner, vectors("aij", "bj")),
    Case("Tensor.outer", np.outer, vectors("i", "j")),
    Case("Tensor.ger", np.outer, vectors("i", "j")),
    Case("Tensor.addmm", plus(np.matmul), scaled("ik", "ij", "jk")),
    Case("Tensor.addmv", plus(np.matmul), scaled("i", "ij", "j")),
    Case("Tensor.addr", plus(np.outer), scaled("ij", "i", "j")),
    Case("Tensor.baddbmm", plus(np.matmul), scaled("bik", "bij", "bjk")),
    Case("Tensor.addbmm", plus(lambda a, b: (a @ b).sum(0)), scaled("ik", "bij", "bjk")),
    Case("torch.einsum", lambda *a: np.einsum(a[-1], *a[:-1]), einsums,
         call=lambda lib, *a: lib.top.einsum(a[-1], *a[:-1])),
    Case("Tensor.kron", np.kron, kron_shapes),
    Case("Tensor.cross", lambda a, b, dim: np.cross(a, b, axis=dim), crossed),
    Case("torch.tensordot", lambda a, b: np.tensordot(a, b, 2), vectors("ijk", "jkl"),
         call=lambda lib, a, b: lib.top.tensordot(a, b, 2)),
    Case("Tensor.matrix_power", lambda a, n: np.linalg.matrix_power(a, n), powers, dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.matrix_exp", expm, matrices(), dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.inverse", np.linalg.inv, matrices(), dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.det", np.linalg.det, matrices(), dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.logdet", lambda a: np.linalg.slogdet(a)[1], matrices("positive"), dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.slogdet", lambda a: tuple(np.linalg.slogdet(a)), matrices(), dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.solve", np.linalg.solve, matrices(columns=True), dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.cholesky", lambda a: np.linalg.cholesky(positive(a)), matrices("positive"), dtypes=BOTH, rtol=LOOSE,
         call=spd("cholesky")),
    Case("Tensor.cholesky_inverse", lambda a: np.linalg.inv(np.tril(a) @ np.swapaxes(np.tril(a), -1, -2)), matrices(),
         dtypes=BOTH, rtol=LOOSE),
    Case("Tensor.cholesky_solve", lambda a, b: np.linalg.solve(np.tril(a) @ np.swapaxes(np.tril(a), -1, -2), b),
         matrices(columns=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a, b: b.cholesky_solve(a)),
    Case("Tensor.triangular_solve", lambda a, b: (np.linalg.solve(np.triu(a), b), a), matrices(columns=True),
         dtypes=BOTH, rtol=LOOSE, call=lambda lib, a, b: b.triangular_solve(a)),
    Case("Tensor.lu", lambda a: a, matrices(), dtypes=BOTH, rtol=LOOSE, call=lambda lib, a: _from_lu(a)),
    Case("Tensor.lu_solve", np.linalg.solve, matrices(columns=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a, b: b.lu_solve(*a.lu())),
    Case("Tensor.qr", lambda a: _np_qr(a), matrices(tall=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a: _signed_qr(*a.qr())),
    Case("Tensor.geqrf", lambda a: np.abs(np.linalg.qr(a)[1]), matrices(tall=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a: a.geqrf()[0].triu()[..., : a.shape[-1], :].abs()),
    Case("Tensor.orgqr", lambda a: np.linalg.qr(a)[0], matrices(tall=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a: a.geqrf()[0].orgqr(a.geqrf()[1])),
    Case("Tensor.ormqr", lambda a, b: np.linalg.qr(a, mode="complete")[0].swapaxes(-1, -2) @ b,
         matrices(tall=True, columns=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a, b: a.geqrf()[0].ormqr(a.geqrf()[1], b, True, True)),
    Case("Tensor.svd", lambda a: (np.linalg.svd(a, compute_uv=False), a), matrices(tall=True), dtypes=BOTH, rtol=LOOSE,
         call=lambda lib, a: (lambda d: (d[1], (d[0] * d[1].unsqueeze(-2)) @ d[2].mT))(a.svd())),
    Case("Tensor.pinverse", np.linalg.pinv, matrices(tall=True), dtypes=BOTH, rtol=LOOSE),
]  # fmt: skip


def _np_qr(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _signed_np(*np.linalg.qr(a))


def _signed_np(q: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sign = np.sign(np.diagonal(r, 0, -2, -1))
    return q * sign[..., None, :], r * sign[..., None]


def _signed_qr(q: Any, r: Any) -> tuple[Any, Any]:
    """The factorisation with R's diagonal positive, which is unique."""
    sign = r.detach().diagonal(0, -2, -1).sign()
    return q * sign.unsqueeze(-2), r * sign.unsqueeze(-1)


def _from_lu(a: Any) -> Any:
    """P L U, from the packed factors and LAPACK's pivots."""
    packed, pivots = a.lu()
    low, up = packed.tril(-1), packed.triu()
    eye = packed.new_ones(packed.shape[-1]).diag()
    rows = (low + eye) @ up
    for i in reversed(range(packed.shape[-1])):
        at = pivots[..., i : i + 1].to(a.new_zeros(1).long().dtype) - 1  # (..., 1)
        index = eye.cumsum(1).sum(0).long() - 1  # 0, 1, ..., n − 1
        order = ((index == at) & (index != i)) * i + (index == i) * at + ((index != at) & (index != i)) * index
        rows = rows.gather(-2, order.unsqueeze(-1).expand(rows.shape))
    return rows
