"""Map a small initialization to the aligned one whose trajectory it follows (Sec. 4.3, Result 4.1)."""

import numpy as np
import scipy.special
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, matrix, positive_int, scale, times, vector
from stairwise.checks import seed as check_seed
from stairwise.theory.correlation import Correlation, checked
from stairwise.theory.modes import Modes

Floats = NDArray[np.float64]

MOST = 10**7  # rows, or columns, of initial weights


def gaussian_init(d: int, features: int, alpha: float, seed: int) -> Floats:
    """W₀ with independent N(0, α²) entries, shape (d, m): the paper's small initialization."""
    rng = np.random.default_rng(check_seed(seed))
    return scale(alpha) * rng.standard_normal((positive_int(d, "d", MOST), positive_int(features, "features", MOST)))


def qr_nonnegative(m: ArrayLike) -> tuple[Floats, Floats]:
    """M = Q R, Q orthogonal (a, a), R upper triangular (a, b) with nonnegative diagonal (Def. 4.1).

    Unique when the leading a × a block of M is nonsingular. Rows of R that are only rounding error are set to zero,
    because the dynamics would amplify them.

    >>> q, r = qr_nonnegative([[0.0, 1.0, 2.0], [-3.0, 4.0, 5.0]])
    >>> bool(np.allclose(q @ r, [[0, 1, 2], [-3, 4, 5]])), np.diag(r)
    (True, array([3., 1.]))
    """
    q, r = np.linalg.qr(np.asarray(matrix(m, "m"), dtype=np.float64), mode="complete")
    signs = np.ones(len(q))
    noise = np.finfo(float).eps * np.sqrt(r.shape[1])
    r[np.abs(r).max(axis=1) < 4 * noise * np.abs(r).max(initial=0.0)] = 0.0
    diagonal = np.diag(r)
    signs[: len(diagonal)] = np.where(diagonal < 0, -1.0, 1.0)
    return q * signs, signs[:, None] * r


def align(m: ArrayLike) -> Floats:
    """The alignment transformation 𝒜(M) = Q diag(R) (Def. 4.2), same shape as M."""
    q, r = qr_nonnegative(m)
    diagonal = np.zeros_like(r)
    np.fill_diagonal(diagonal, np.diag(r))
    return q @ diagonal


def aligned_init(W0: ArrayLike, corr: Correlation) -> Floats:
    """W*(0) = 𝒜(W₀ V) Vᵀ with V the eigenvectors of Γ, (d, m): the aligned initialization that approximates W₀."""
    coordinates, _ = checked(corr).project(W0)
    return align(coordinates) @ corr.eigenvectors.T


def effective_singular_values(W0: ArrayLike, corr: Correlation) -> Floats:
    """s*_j(0) = R_jj of the QR factors of W₀ V (Eq. 19 with Gram–Schmidt vectors), shape (d,).

    R_jj is the length of W₀ v_j after removing the directions of earlier modes. It is zero beyond the rank of Γ.
    """
    coordinates, _ = checked(corr).project(W0)
    _, r = qr_nonnegative(coordinates)
    s = np.zeros(len(r))
    s[: min(r.shape)] = np.diag(r)
    return s


def step_time_quantiles(gamma: ArrayLike, alpha: float, q: ArrayLike = (0.05, 0.5, 0.95)) -> Floats:
    """Quantiles of τ_j over Gaussian initializations of scale α, shape (len(q), d).

    R_jj² / α² is χ² with d − j + 1 degrees of freedom, and τ_j (Eq. 16) decreases in R_jj, so the q-quantile of τ_j
    follows from the (1 − q)-quantile of χ². The paper's s_j(0) ≈ α√(d − j + 1) (Eq. 21) is R_jj's root mean square.

    >>> step_time_quantiles([2.0, 1.0], alpha=1e-3).round(3)
    array([[0.708, 1.559],
           [0.8  , 1.825],
           [0.962, 2.419]])
    """
    gamma, alpha, q = vector(gamma, "gamma"), scale(alpha), vector(q, "q")
    if ((q <= 0) | (q >= 1)).any():
        raise InputError("q", "must lie strictly between 0 and 1", q)
    freedom = len(gamma) - np.arange(len(gamma))
    s0 = alpha * np.sqrt(scipy.special.chdtri(freedom, q[:, None]))
    return np.stack([Modes(gamma, row).step_times() for row in s0])


def appendix_entries(A0: ArrayLike, gamma: ArrayLike, t: ArrayLike) -> Floats:
    """A(t) = W(t) in the basis in which W(0) is upper triangular (App. C), to leading order; shape (*t.shape, d, m).

    Diagonal: s_j(t) as in the Proposition (Eq. 47). Above it: a_jk(t) = a_jk(0) (s_j(t)/s_j(0))^{γ_k/γ_j} (Eq. 48).
    Below it: 0. Entries with k ≤ d are wrong once mode k is learned. Time is the appendix's: 4 × lr × step.

    >>> A0 = 1e-6 * np.array([[1.0, 2.0], [0.0, 1.0]])
    >>> appendix_entries(A0, [1.0, 0.5], 100.0).round(4)
    array([[1.    , 0.002 ],
           [0.    , 1.4142]])
    """
    A0 = np.asarray(matrix(A0, "A0"), dtype=np.float64)
    gamma = vector(gamma, "gamma")
    d, m = A0.shape
    if d > m:
        raise InputError("A0", "must have at most as many rows as columns", A0.shape)
    if gamma.shape != (m,):
        raise InputError("gamma", f"must have {m} entries, one per column of A0", gamma.shape)
    start = np.diag(A0)
    if np.any(np.tril(A0, -1)) or (start <= 0).any() or (gamma[:d] <= 0).any():
        raise InputError(
            "A0", "must be upper triangular with positive diagonal, and gamma[:d] > 0", None, "use qr_nonnegative"
        )
    s = Modes(gamma[:d], start).singular_values(times(t, "t") / 4)
    growth = (s / start)[..., None] ** (gamma / gamma[:d, None])
    return np.triu(A0) * growth
