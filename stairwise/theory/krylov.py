"""The largest eigenpairs of a symmetric operator, using only its products with blocks of vectors."""

from collections.abc import Callable

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from stairwise.checks import NotConverged

Floats = NDArray[np.float64]


def top_eigenpairs(
    matmul: Callable[[Floats], Floats], size: int, k: int, *, tol: float = 1e-10, passes: int = 200, seed: int = 0
) -> tuple[Floats, Floats]:
    """Block Krylov with Rayleigh–Ritz and thick restart: the k algebraically largest eigenpairs.

    Each pass adds the residuals of the wanted Ritz pairs to the basis. Once it holds six blocks, it restarts from the
    best two. A pair has converged when its residual ‖A v − θ v‖ ≤ tol · max|θ|.

    Arguments:
        matmul: X ↦ A X for X of shape (size, b), A symmetric.
        size: number of rows of A.
        k: number of pairs.
        passes: maximum number of products with a block.

    Returns:
        eigenvalues (k,) descending, and eigenvectors (size, k) in columns.

    Raises:
        NotConverged: the pairs did not converge within `passes`.

    Example:
        >>> a = np.diag(np.arange(100.0))
        >>> top_eigenpairs(lambda x: a @ x, 100, 3)[0].round(9)
        array([99., 98., 97.])
    """
    block = min(size, k + 8)
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, block)))
    image = matmul(basis)
    worst = np.inf
    for _ in range(passes):
        ritz, vectors = np.linalg.eigh(_symmetrized(basis.T @ image))
        ritz, vectors = ritz[::-1], vectors[:, ::-1]
        residual = image @ vectors[:, :block] - (basis @ vectors[:, :block]) * ritz[:block]
        error = np.linalg.norm(residual, axis=0)
        worst = error[:k].max() / np.abs(ritz).max(initial=np.finfo(float).tiny)
        if worst <= tol or basis.shape[1] == size:
            return ritz[:k], basis @ vectors[:, :k]
        if basis.shape[1] + block > 6 * block:
            keep = vectors[:, : 2 * block]
            basis, image = basis @ keep, image @ keep
        new = _orthonormal_to(basis, residual)
        basis, image = np.hstack([basis, new]), np.hstack([image, matmul(new)])
    raise NotConverged(f"eigenpairs did not converge in {passes} passes: residual {worst:.1e} is above {tol:.1e}")


def _symmetrized(a: Floats) -> Floats:
    return (a + a.T) / 2


def _orthonormal_to(basis: Floats, block: Floats) -> Floats:
    """An orthonormal basis of the part of `block` outside `basis`; together they have at most `size` columns."""
    scale = np.linalg.norm(block, axis=0)
    block = block[:, scale > 0] / scale[scale > 0]
    block = block - basis @ (basis.T @ block)
    q, r, _ = scipy.linalg.qr(block, mode="economic", pivoting=True)
    strength = np.abs(np.diag(r))
    q = q[:, strength > 1e-8 * strength[0]]  # smaller columns are rounding error of directions already in the basis
    q, _ = np.linalg.qr(q - basis @ (basis.T @ q))  # orthogonalizing twice is enough
    return q[:, : basis.shape[0] - basis.shape[1]]
