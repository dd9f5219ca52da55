"""Gradient flow of Tr(W A Wᵀ) + Tr((W B Wᵀ)²) for any symmetric A and B, commuting or not."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import matrix, time_vector
from stairwise.dynamics.integrate import integrate
from stairwise.theory.quartic import Quartic

__all__ = ["quartic_flow"]


def quartic_flow(W0: ArrayLike, problem: Quartic, t: ArrayLike, rtol: float = 1e-9) -> NDArray[np.float64]:
    """W(t) of dW/dt = −∇L, shape (T, d, m).

    >>> gamma = np.diag([2.0, 1.0])
    >>> quartic_flow(1e-3 * np.eye(2), Quartic(-2 * gamma, gamma), [9.0])[0].round(3)
    array([[0.707, 0.   ],
           [0.   , 1.   ]])
    """
    start = np.asarray(matrix(W0, "W0", len(np.asarray(problem.A))), dtype=np.float64)
    moments = time_vector(t, infinite=False)
    return integrate(lambda w: -problem.gradient(w), start, moments, rtol)
