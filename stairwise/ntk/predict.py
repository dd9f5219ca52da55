r"""The embeddings that the theory predicts from a kernel among pairs, and the baseline without pairs.

Rows of K̃ (2n, 2n) are x_1 … x_n, x'_1 … x'_n, where x'_i is the other view of x_i.
"""

from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from stairwise.checks import InputError, positive_int, real
from stairwise.kernel.operators import DensePairs
from stairwise.kernel.solvers import solve

Floats = NDArray[np.float64]
ASYMMETRY = 1e-4  # relative to the largest entry; rounding in low precision may cause it


def predict_embeddings(K: Any, d: int) -> Floats:
    r"""f_th = S̃ bᵀ K̃^{1/2} (Eq. 15), transposed and up to a rotation: (2n, d), with C = I.

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
    K, eps = _symmetric(K)
    d = positive_int(d, "d", len(K), f"there are {len(K)} points: take more pairs, or fewer dimensions")
    pairs = DensePairs(K, precision=eps)
    pairs.refuse_indefinite("K")
    try:
        modes = solve(pairs, d, at_most=True)
    except InputError as error:
        rule = "must have modes above its rounding error that both views share"
        raise InputError("K", rule, None, "check which rows are pairs, or compute K in float64") from error
    known = len(modes.eigenvalues)
    if known < d:
        rule = f"must be at most {known}: the other modes of K are below its rounding error"
        remedy = f"lower d to {known}" + (", or compute K in float64" if eps > 1e-12 else "")
        raise InputError("d", rule, d, remedy)
    return np.asarray(pairs.swap(modes.coefficients) * len(K) * np.sqrt(modes.eigenvalues), dtype=np.float64)


def kernel_pca(K: Any, d: int) -> Floats:
    """The d leading eigenvectors of K̃, (2n, d): the prediction without knowing which points are pairs (P_NTK)."""
    K, _ = _symmetric(K)
    if not 0 < d <= len(K):
        raise InputError("d", f"must lie between 1 and {len(K)}", d)
    vectors = scipy.linalg.eigh(K, subset_by_index=(len(K) - d, len(K) - 1))[1]
    return np.asarray(vectors[:, ::-1], dtype=np.float64)


def _symmetric(K: Any) -> tuple[Floats, float]:
    """(K + Kᵀ) / 2 in float64, and its relative precision: that of its type, or its asymmetry."""
    K = np.asarray(real(K, "K"))
    if K.ndim != 2 or K.shape[0] != K.shape[1] or not len(K):
        raise InputError("K", "must be square and not empty", f"shape {K.shape}")
    if len(K) % 2:
        rule = "must have two rows per pair, first views first"
        raise InputError("K", rule, len(K), "leave no view without its partner")
    if not np.isfinite(K).all():
        raise InputError("K", "must be finite")
    if not K.any():
        raise InputError("K", "must not be zero everywhere")
    single = np.issubdtype(K.dtype, np.floating) and K.dtype.itemsize < 8
    K = K.astype(np.float64)
    asymmetry = float(np.abs(K - K.T).max() / np.abs(K).max())
    if asymmetry > ASYMMETRY:
        raise InputError("K", "must be symmetric", None, "use (K + K.T) / 2 if it should be")
    return (K + K.T) / 2, max(asymmetry, float(np.finfo(np.float32).eps) if single else 0.0)
