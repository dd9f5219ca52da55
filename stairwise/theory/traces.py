"""Entries of W in the basis in which W(0) is upper triangular: the paper's A(t) (App. C), to leading order."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, matrix, times, vector
from stairwise.theory.modes import Modes

__all__ = ["appendix_entries"]

Floats = NDArray[np.float64]


def appendix_entries(A0: ArrayLike, gamma: ArrayLike, t: ArrayLike) -> Floats:
    """A(t) by Eqs. 47 and 48 from an upper triangular A(0) (d, m); shape (*t.shape, d, m).

    Diagonal: s_j(t) as in the Proposition. Above it: a_jk(t) = a_jk(0) (s_j(t)/s_j(0))^{γ_k/γ_j}. Below it: 0.
    This is leading order: entries with k ≤ d are wrong once mode k is learned. Time is the appendix's: 4 × lr × step.

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
