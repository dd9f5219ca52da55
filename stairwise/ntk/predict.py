r"""The embeddings that the theory predicts from a kernel among pairs, and the baseline without pairs.

Rows of K̃ (2n, 2n) are x_1 … x_n, x'_1 … x'_n, where x'_i is the other view of x_i.
"""

from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from stairwise.checks import InputError, positive_int
from stairwise.kernel.arrays import as_numpy
from stairwise.kernel.estimator import KernelSSL
from stairwise.kernel.operators import DensePairs
from stairwise.kernel.solvers import solve

__all__ = ["kernel_pca", "predict_embeddings"]

Floats = NDArray[np.float64]


def predict_embeddings(K: Any, d: int) -> Floats:
    r"""f_th = S̃ bᵀ K̃^{1/2} (Eq. 15), transposed and up to a rotation: (2n, d), of which C = I.

    Arguments:
        K: symmetric positive semidefinite, (2n, 2n), numpy or torch.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((20, 6))
        >>> both = np.concatenate([x, x + 0.1 * rng.standard_normal((20, 6))])
        >>> F = predict_embeddings(both @ both.T, 3)
        >>> C = (F[:20].T @ F[20:] + F[20:].T @ F[:20]) / 40
        >>> np.allclose(C, np.eye(3))
        True
    """
    K = _pairs_kernel(K)
    d = positive_int(d, "d", len(K), f"there are {len(K)} points: take more pairs, or fewer dimensions")
    try:
        found = KernelSSL(n_components=d, kernel="precomputed").fit(K)
    except InputError:
        known = len(solve(DensePairs(K), d, at_most=True).eigenvalues)
        if known in (0, d):
            raise
        rule = f"must be at most {known}: the other modes of K are below its rounding error"
        remedy = f"lower d to {known}" + (", or compute K in float64" if K.dtype != np.float64 else "")
        raise InputError("d", rule, d, remedy) from None
    return np.asarray(as_numpy(found.embedding_), dtype=np.float64)


def kernel_pca(K: Any, d: int) -> Floats:
    """The d leading eigenvectors of K̃, (2n, d): what one would take without knowing which points are pairs (P_NTK)."""
    K = _pairs_kernel(K)
    if not 0 < d <= len(K):
        raise InputError("d", f"must lie between 1 and {len(K)}", d)
    vectors = scipy.linalg.eigh((K + K.T).astype(np.float64) / 2, subset_by_index=(len(K) - d, len(K) - 1))[1]
    return np.asarray(vectors[:, ::-1], dtype=np.float64)


def _pairs_kernel(K: Any) -> NDArray[Any]:
    K = np.asarray(as_numpy(K))  # in its own precision: rounding of float32 is to be expected then
    if K.ndim != 2 or K.shape[0] != K.shape[1] or not len(K):
        raise InputError("K", "must be square and not empty", f"shape {K.shape}")
    if len(K) % 2:
        raise InputError(
            "K", "must have two rows a pair, first views first", len(K), "leave no view without its partner"
        )
    if not np.isfinite(K).all():
        raise InputError("K", "must be finite")
    if not np.allclose(K, K.T, rtol=0, atol=1e-4 * np.abs(K).max()):
        raise InputError("K", "must be symmetric", None, "use (K + K.T) / 2 if it should be")
    if not K.any():
        raise InputError("K", "must not be zero everywhere")
    return K
