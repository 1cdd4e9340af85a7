"""`manygrad.linalg`: factorisations and what follows from them, with torch.linalg's names,
by straightforward algorithms.

Loops over columns are one traced function, compiled once; each step is O(n²) work on all matrices of the batch.
"""

from manygrad.tensor.linalg.cholesky import cholesky, cholesky_inverse, cholesky_solve, triangular_solve
from manygrad.tensor.linalg.jacobi import eigh, pinv, svd
from manygrad.tensor.linalg.lu import det, inv, lu, lu_solve, slogdet, solve
from manygrad.tensor.linalg.power import matrix_exp, matrix_power
from manygrad.tensor.linalg.qr import geqrf, orgqr, ormqr, qr

__all__ = [
    "cholesky", "cholesky_inverse", "cholesky_solve", "det", "eigh", "geqrf", "inv", "lu", "lu_solve", "matrix_exp",
    "matrix_power", "orgqr", "ormqr", "pinv", "qr", "slogdet", "solve", "svd", "triangular_solve",
]  # fmt: skip
