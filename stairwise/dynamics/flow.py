"""Gradient and spectral flow of the linear model, and gradient flow of the quartic family and of single modes."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import LARGEST, InputError, flag, instance, matrix, number, one_of, real, time_vector, vector
from stairwise.dynamics.eigenbasis import Split, jacobian, rhs
from stairwise.dynamics.integrate import integrate
from stairwise.dynamics.spectral import spectral_flow
from stairwise.theory.correlation import Correlation, checked
from stairwise.theory.landscapes import AbstractLandscape
from stairwise.theory.quartic import Quartic
from stairwise.theory.trajectory import Trajectory

Floats = NDArray[np.float64]

RULES = ("gradient", "spectral")


def gradient_flow(
    W0: ArrayLike,
    corr: Correlation,
    times: ArrayLike,
    weights: bool = False,
    rtol: float = 1e-8,
    rule: str = "gradient",
) -> Trajectory:
    """Integrate dW/dt = −∇L (Eq. 6), or the spectral flow dW/dt = polar(−∇L) of Muon, from any W0, small or not.

    Arguments:
        W0: initial weights, (d, m).
        corr: the data.
        times: finite, nonnegative, (T,).
        weights: also return W(t), (T, d, m). This is slower, because all columns are integrated.
        rtol: relative tolerance of the integrator. With the default the spectrum is accurate to about 1e-6.
        rule: "gradient" or "spectral". A mode that the spectral flow has learned comes to rest at once, and the flow
            ends when all are learned; `weights` costs nothing there.

    Example:
        >>> corr = Correlation.from_matrix([2.0, 1.0])
        >>> W0 = 1e-3 * np.eye(2)
        >>> gradient_flow(W0, corr, [0.0, 1.0, 4.0]).eigenvalues.round(4)
        array([[0.    , 0.    ],
               [0.9467, 0.003 ],
               [1.    , 1.    ]])
        >>> gradient_flow(W0, corr, [0.0, 0.5, 4.0], rule="spectral").eigenvalues.round(4)
        array([[0.   , 0.   ],
               [0.502, 0.251],
               [1.   , 1.   ]])
    """
    t = time_vector(times, infinite=False)
    rtol, weights = number(rtol, "rtol", least=1e-13, most=1e-2), flag(weights, "weights")
    if one_of(rule, "rule", RULES) == "spectral":
        whole = Split.of(W0, corr, 0.0, tolerance=0.0)
        return whole.trajectory(t, spectral_flow(whole.u, whole.gamma, t, rtol), "spectral flow", weights, lr=None)
    _refuse_late(t, checked(corr).eigenvalues)
    split = Split.of(W0, corr, float(t.max(initial=0.0)), tolerance=0.0 if weights else min(1e-9, rtol))
    gamma = split.gamma[split.active]
    # rotate so that large and small directions are separate rows; the flow is rotation-invariant
    rotation, _, _ = np.linalg.svd(split.u[:, split.active], full_matrices=True)
    size = 1 / np.sqrt(max(gamma[0], np.finfo(float).tiny))
    start = rotation.T @ split.u[:, split.active]
    u = integrate(lambda u: rhs(u, gamma), start, t, rtol, size, lambda u: jacobian(u, gamma))
    return split.trajectory(t, rotation @ u, "gradient flow", weights, lr=None)


def appendix_flow(A0: ArrayLike, gamma: ArrayLike, times: ArrayLike, rtol: float = 1e-10) -> Floats:
    """A(t) of dA/dt = (I − A Λ Aᵀ) A Λ (Eq. 45), shape (T, d, m). Its time is 4 × that of `gradient_flow`.

    >>> A0 = 1e-6 * np.array([[1.0, 2.0], [0.0, 1.0]])
    >>> abs(appendix_flow(A0, [1.0, 0.5], [100.0])[0]).round(4)
    array([[1.    , 0.0031],
           [0.0022, 1.4142]])
    """
    gamma = vector(gamma, "gamma", LARGEST)
    a = np.asarray(matrix(A0, "A0", len(gamma), LARGEST), dtype=np.float64)
    t = time_vector(times, infinite=False)
    _refuse_late(t, gamma)
    return integrate(lambda u: rhs(u, gamma) / 4, a, t, rtol, jacobian=lambda u: jacobian(u, gamma) / 4)


def quartic_flow(W0: ArrayLike, problem: Quartic, t: ArrayLike, rtol: float = 1e-9) -> Floats:
    """W(t) of dW/dt = −∇L for L = Tr(W A Wᵀ) + Tr((W B Wᵀ)²), shape (T, d, m); A and B need not commute.

    >>> gamma = np.diag([2.0, 1.0])
    >>> quartic_flow(1e-3 * np.eye(2), Quartic(-2 * gamma, gamma), [9.0])[0].round(3)
    array([[0.707, 0.   ],
           [0.   , 1.   ]])
    """
    instance(problem, "problem", Quartic, "use Quartic(A, B)")
    start = np.asarray(matrix(W0, "W0", len(np.asarray(problem.A)), LARGEST), dtype=np.float64)
    return integrate(lambda w: -problem.gradient(w), start, time_vector(t, infinite=False), rtol)


def landscape_flow(
    landscape: AbstractLandscape, s_bar0: ArrayLike, gamma: ArrayLike, t: ArrayLike, rtol: float = 1e-9
) -> Floats:
    """s̄(t) of s̄' = −γ dL/ds̄, by numerical integration; shape (T, *modes)."""
    instance(landscape, "landscape", AbstractLandscape, "use one of sw.landscapes")
    start, gamma = np.broadcast_arrays(real(s_bar0, "s_bar0").astype(float), real(gamma, "gamma").astype(float))
    moments = time_vector(t, infinite=False)
    return integrate(lambda s: landscape.rate(s, gamma), start.copy(), moments, rtol)


def _refuse_late(t: Floats, gamma: Floats) -> None:
    """Times at which even the exponent of the growth overflows."""
    steepest = max(float(np.abs(gamma).max(initial=0.0)), 1.0)
    latest = 1e300 / steepest
    if t.max(initial=0.0) > latest:
        raise InputError("times", f"must be at most {latest:.3g}", t.max(), "use closed_form for the limit")
