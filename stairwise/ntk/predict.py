r"""The embeddings that the theory predicts from a kernel among pairs, and the baseline without pairs.

Rows of K̃ (2n, 2n) are x_1 … x_n, x'_1 … x'_n, where x'_i is the other view of x_i. A kernel on a GPU is decomposed
there, by dense eigensolvers.
"""

from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from stairwise.checks import InputError, as_numpy, positive_int, real
from stairwise.kernel.arrays import Matrix, cast, namespace, on_gpu
from stairwise.kernel.operators import DensePairs
from stairwise.kernel.solution import above_rounding
from stairwise.kernel.solvers import MOST_DENSE, solve

Floats = NDArray[np.float64]
UNSHARED = "must have modes above its rounding error that both views share"
ASYMMETRY = 1e-4  # relative to the largest entry; rounding in low precision may cause it


def predict_embeddings(K: Any, d: int, *, at_most: bool = False) -> Floats:
    r"""f_th = S̃ bᵀ K̃^{1/2} (Eq. 15), transposed and up to a rotation: (2n, d), with C = I.

    Arguments:
        K: symmetric positive semidefinite, (2n, 2n), numpy or torch.
        at_most: return fewer columns if K resolves fewer modes, instead of raising an error.

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
    F = _by_decomposition(pairs, d) if on_gpu(K) and len(K) <= MOST_DENSE else _by_products(pairs, d)
    known = F.shape[1]
    if known == 0:
        raise InputError("K", UNSHARED, None, "check which rows are pairs, or compute K in float64")
    if known < d and not at_most:
        rule = f"must be at most {known}: the other modes of K are below its rounding error"
        remedy = f"lower d to {known}" + (", or compute K in float64" if eps > 1e-12 else "")
        raise InputError("d", rule, d, remedy)
    return F


def _by_products(pairs: DensePairs, d: int) -> Floats:
    """Predicted embeddings by the solvers of `kernel`, up to d columns."""
    pairs.refuse_indefinite("K")
    try:
        modes = solve(pairs, d, at_most=True)
    except InputError as error:
        raise InputError("K", UNSHARED, None, "check which rows are pairs, or compute K in float64") from error
    F = pairs.swap(modes.coefficients) * len(pairs.matrix)
    return np.asarray(as_numpy(F) * np.sqrt(modes.eigenvalues), dtype=np.float64)


def _by_decomposition(pairs: DensePairs, d: int) -> Floats:
    """The same from K̃ = V S Vᵀ: f = V S^{1/2} b γ^{-1/2}, with b the leading eigenvectors of S^{1/2} Vᵀ P V S^{1/2}."""
    K = pairs.matrix
    eigh = namespace(K).linalg.eigh
    sizes, vectors = eigh(K)
    if float(sizes[0]) < -max(pairs.eps, 1e-12) * len(K) * float(abs(K.diagonal()).max()):
        low = f"an eigenvalue of {float(sizes[0]):.3g}"
        raise InputError("K", "must be positive semidefinite", low, "clip it, or add a multiple of I")
    root = vectors * sizes.clip(0.0) ** 0.5
    inner = root.T @ pairs.swap(root)
    theta, b = eigh((inner + inner.T) / 2)
    gamma = as_numpy(theta)[::-1][:d] / len(K)
    usable = above_rounding(pairs, gamma)
    F = as_numpy(root @ b[:, len(K) - usable :])[:, ::-1]
    return np.asarray(F / np.sqrt(gamma[:usable]), dtype=np.float64)


def kernel_pca(K: Any, d: int) -> Floats:
    """The d leading eigenvectors of K̃, (2n, d): the prediction without knowing which points are pairs (P_NTK)."""
    K, _ = _symmetric(K)
    if not 0 < d <= len(K):
        raise InputError("d", f"must lie between 1 and {len(K)}", d)
    if on_gpu(K):
        vectors = as_numpy(namespace(K).linalg.eigh(K)[1][:, len(K) - d :])
    else:
        vectors = scipy.linalg.eigh(K, subset_by_index=(len(K) - d, len(K) - 1))[1]
    return np.asarray(vectors[:, ::-1], dtype=np.float64)


def unit_diagonal(K: Matrix) -> Matrix:
    """K_ij / √(K_ii K_jj), in the type of K: the kernel of gradients of length 1."""
    size = K.diagonal().clip(np.finfo(np.float32).tiny) ** 0.5
    return K / (size[:, None] * size)


def _symmetric(K: Any) -> tuple[Matrix, float]:
    """(K + Kᵀ) / 2 in float64, and its relative precision: that of its type, or its asymmetry.

    A matrix of floats on a GPU stays there; all else becomes a numpy array."""
    K = K.detach() if on_gpu(K) and K.is_floating_point() else np.asarray(real(K, "K"))
    if K.ndim != 2 or K.shape[0] != K.shape[1] or not len(K):
        raise InputError("K", "must be square and not empty", f"shape {tuple(K.shape)}")
    if len(K) % 2:
        rule = "must have two rows per pair, first views first"
        raise InputError("K", rule, len(K), "leave no view without its partner")
    if not namespace(K).isfinite(K).all():
        raise InputError("K", "must be finite")
    if not K.any():
        raise InputError("K", "must not be zero everywhere")
    single = "float" in str(K.dtype) and K.dtype.itemsize < 8
    K = cast(K, "float64")
    asymmetry = float(abs(K - K.T).max() / abs(K).max())
    if asymmetry > ASYMMETRY:
        raise InputError("K", "must be symmetric", None, "use (K + K.T) / 2 if it should be")
    return (K + K.T) / 2, max(asymmetry, float(np.finfo(np.float32).eps) if single else 0.0)
