"""`manygrad.linalg`: factorisations and what follows from them, with torch.linalg's names,
by straightforward algorithms.

Loops over columns are one traced function, compiled once; each step is O(n²) work on all matrices of the batch.
"""

from manygrad.tensor.linalg.cholesky import (
    cholesky,
    cholesky_ex,
    cholesky_inverse,
    cholesky_solve,
    solve_triangular,
    triangular_solve,
)
from manygrad.tensor.linalg.factored import inv_ex, lu, lu_factor, lu_factor_ex, lu_solve, lu_unpack, solve_ex
from manygrad.tensor.linalg.jacobi import eigh, eigvalsh, svd, svdvals
from manygrad.tensor.linalg.lu import det, inv, slogdet, solve
from manygrad.tensor.linalg.norms import matrix_norm, norm, vector_norm
from manygrad.tensor.linalg.power import matrix_exp, matrix_power
from manygrad.tensor.linalg.products import cross, diagonal, multi_dot, tensorinv, tensorsolve, vander, vecdot
from manygrad.tensor.linalg.qr import geqrf, orgqr, ormqr, qr
from manygrad.tensor.linalg.qr import orgqr as householder_product
from manygrad.tensor.linalg.rank import cond, lstsq, matrix_rank, pinv

__all__ = [
    "cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve", "cond", "cross", "det", "diagonal", "eigh",
    "eigvalsh", "geqrf", "householder_product", "inv", "inv_ex", "lstsq", "lu", "lu_factor", "lu_factor_ex", "lu_solve",
    "lu_unpack", "matrix_exp", "matrix_norm", "matrix_power", "matrix_rank", "multi_dot", "norm", "orgqr", "ormqr",
    "pinv", "qr", "slogdet", "solve", "solve_ex", "solve_triangular", "svd", "svdvals", "tensorinv", "tensorsolve",
    "triangular_solve", "vander", "vecdot", "vector_norm",
]  # fmt: skip
