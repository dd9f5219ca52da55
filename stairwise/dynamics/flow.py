"""Gradient flow of the linear model: dW/dt = −4 (W Γ Wᵀ − I) W Γ."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import matrix, number, time_vector, vector
from stairwise.dynamics.eigenbasis import Split, jacobian, rhs
from stairwise.dynamics.integrate import integrate
from stairwise.theory.correlation import Correlation
from stairwise.theory.trajectory import Trajectory

__all__ = ["appendix_flow", "gradient_flow"]

Floats = NDArray[np.float64]


def gradient_flow(
    W0: ArrayLike, corr: Correlation, times: ArrayLike, weights: bool = False, rtol: float = 1e-8
) -> Trajectory:
    """Integrate Eq. 6 from any W0, small or not.

    Arguments:
        W0: initial weights, (d, m).
        corr: the data.
        times: finite, nonnegative, (T,).
        weights: also return W(t), (T, d, m); slower, because then all columns are integrated.
        rtol: relative tolerance of the integrator; at the default the spectrum is good to about 1e-6.

    Example:
        >>> corr = Correlation.from_matrix([2.0, 1.0])
        >>> W0 = 1e-3 * np.eye(2)
        >>> gradient_flow(W0, corr, [0.0, 1.0, 4.0]).eigenvalues.round(4)
        array([[0.    , 0.    ],
               [0.9467, 0.003 ],
               [1.    , 1.    ]])
    """
    t = time_vector(times, infinite=False)
    rtol = number(rtol, "rtol", above=0)
    split = Split.of(W0, corr, float(t.max(initial=0.0)), tolerance=0.0 if weights else min(1e-9, rtol))
    gamma = split.gamma[split.active]
    # turned so that rows of different size are rows of their own; the flow does not mind
    turn, _, _ = np.linalg.svd(split.u[:, split.active], full_matrices=True)
    size = 1 / np.sqrt(max(gamma[0], np.finfo(float).tiny))
    start = turn.T @ split.u[:, split.active]
    u = integrate(lambda u: rhs(u, gamma), start, t, rtol, size, lambda u: jacobian(u, gamma))
    return split.trajectory(t, turn @ u, "gradient flow", weights, lr=None)


def appendix_flow(A0: ArrayLike, gamma: ArrayLike, times: ArrayLike, rtol: float = 1e-10) -> Floats:
    """A(t) of dA/dt = (I − A Λ Aᵀ) A Λ (Eq. 45), shape (T, d, m); its time is 4 × that of `gradient_flow`.

    >>> A0 = 1e-6 * np.array([[1.0, 2.0], [0.0, 1.0]])
    >>> abs(appendix_flow(A0, [1.0, 0.5], [100.0])[0]).round(4)
    array([[1.    , 0.0031],
           [0.0022, 1.4142]])
    """
    gamma = vector(gamma, "gamma")
    a = np.asarray(matrix(A0, "A0", len(gamma)), dtype=np.float64)
    t = time_vector(times, infinite=False)
    return integrate(lambda u: rhs(u, gamma) / 4, a, t, rtol, jacobian=lambda u: jacobian(u, gamma) / 4)
