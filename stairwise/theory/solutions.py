"""The end of training: the top spectral weights, which are the zero-loss solution of smallest norm."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, number, positive_int
from stairwise.theory.correlation import Correlation, checked

Floats = NDArray[np.float64]

ZERO = 1e-12  # eigenvalues below this fraction of the largest are rounding error


def top_spectral_weights(corr: Correlation, d: int) -> Floats:
    """W = diag(γ_j^{-1/2}) Vᵀ over the top d modes, (d, m) (Def. 4.3 with U = I).

    Among all W with L(W) = 0, these weights and their rotations minimize ‖W‖²_F, which is Σ 1/γ_j (Prop. 4.2).

    >>> top_spectral_weights(Correlation.from_matrix([4.0, 1.0, -1.0]), 2)
    array([[0.5, 0. , 0. ],
           [0. , 1. , 0. ]])
    """
    gamma, vectors = _positive_modes(corr, d)
    return (vectors / np.sqrt(gamma)).T


def penalized_weights(corr: Correlation, d: int, epsilon: float) -> Floats:
    """The minimizer of L(W) + ε‖W‖²_F up to rotation: s_j² = (γ_j − ε/2)/γ_j², zero where γ_j ≤ ε/2 (App. B.1).

    As ε → 0 it tends to the top spectral weights; the paper uses this to prove that they are minimal.

    >>> penalized_weights(Correlation.from_matrix([4.0, 1.0]), 2, epsilon=1.0).diagonal().round(3)
    array([0.468, 0.707])
    """
    gamma, vectors = _positive_modes(corr, d)
    above = np.maximum(gamma - number(epsilon, "epsilon", least=0) / 2, 0)
    return (vectors * (np.sqrt(above) / gamma)).T


def positive_modes(gamma: ArrayLike) -> int:
    """The number of eigenvalues γ that are positive beyond rounding error.

    >>> positive_modes([2.0, 1.0, 1e-15, -1.0])
    2
    """
    gamma = np.asarray(gamma)
    return int((gamma > ZERO * np.abs(gamma).max()).sum())


def check_dimension(d: int, gamma: ArrayLike) -> int:
    """Return d if at least d eigenvalues γ are positive beyond rounding error; otherwise raise InputError."""
    usable = positive_modes(gamma)
    if usable == 0:
        remedy = "the views share nothing, or are so small that their products vanish: check the pairs, or scale them"
        raise InputError("Γ", "must have a positive eigenvalue", None, remedy)
    rule = f"must be at most {usable}, the number of positive eigenvalues of Γ"
    if positive_int(d, "d") > usable:
        raise InputError("d", rule, d, "lower d")
    return d


def _positive_modes(corr: Correlation, d: int) -> tuple[Floats, Floats]:
    gamma, vectors = checked(corr).top(positive_int(d, "d", corr.rank_bound, "give more pairs or features, or lower d"))
    check_dimension(d, gamma)
    return gamma, vectors
