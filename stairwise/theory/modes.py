r"""The idea of the whole package: self-supervised learning grows one mode at a time.

Train a linear map f(x) = W x on pairs of views with the loss L = ‖C − I‖². All that matters about the data is
Γ, the cross-correlation of the two views. Each eigenvalue γ_j of Γ owns one *mode*: a singular value s_j of W that
obeys an equation of its own,

    s' = 4 γ s (1 − γ s²)                                                        (12)

Write λ = γ s², the eigenvalue of C that this mode carries, and the equation is Verhulst's: λ' = 8 γ λ (1 − λ).
From a small start λ creeps up exponentially, rises to 1 within about 1/8γ, and stays. It does so at

    τ = −log(γ s(0)²) / 8γ                                                       (16)

so large γ comes first, and the loss, which is the sum of (1 − λ_j)² over the modes, comes down a staircase.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, times, vector

__all__ = ["Modes"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Modes:
    r"""Exact dynamics of aligned modes (Prop. "Trajectory of W(t) from aligned initialization", Eq. 10).

    .. math:: s_j(t) = \frac{e^{4γ_j t}}{\sqrt{s_j(0)^{-2} + (e^{8γ_j t} - 1) γ_j}}

    Times may be scalars or arrays and may be infinite; the mode index comes last. Any sign of γ is allowed.

    Arguments:
        gamma: eigenvalues γ_j of Γ, shape (d,).
        s0: initial singular values s_j(0) ≥ 0, shape (d,) or scalar.

    Example:
        >>> modes = Modes(gamma=[2.0, 1.0, -1.0], s0=1e-3)
        >>> modes.eigenvalues([0.5, 1.0, 2.0, np.inf]).round(3)
        array([[ 0.006,  0.   , -0.   ],
               [ 0.947,  0.003, -0.   ],
               [ 1.   ,  0.899, -0.   ],
               [ 1.   ,  1.   , -0.   ]])
        >>> modes.step_times().round(3)
        array([0.82 , 1.727,   inf])
        >>> modes.loss([0.0, 1.3, np.inf]).round(2)
        array([3.  , 1.94, 1.  ])
    """

    gamma: ArrayLike
    s0: ArrayLike

    def __post_init__(self) -> None:
        gamma, s0 = vector(self.gamma, "gamma"), vector(self.s0, "s0")
        if s0.shape not in {(1,), gamma.shape}:
            raise InputError("s0", f"must be one number or {len(gamma)}, one per gamma", f"shape {s0.shape}")
        if (s0 < 0).any():
            raise InputError("s0", "must be nonnegative", s0.min(), "a sign belongs to the singular vector")
        object.__setattr__(self, "gamma", gamma)
        object.__setattr__(self, "s0", np.broadcast_to(s0, gamma.shape))

    def singular_values(self, t: ArrayLike) -> Floats:
        """s_j(t), shape (*t.shape, d)."""
        t = times(t, "t")[..., None]
        gamma, s0 = np.asarray(self.gamma), np.asarray(self.s0)
        x = np.abs(np.where(gamma == 0, 0.0, gamma)) * np.where(gamma == 0, 0.0, t)  # 0 · ∞ = 0: such modes rest
        decay = np.exp(-4 * x)
        # Eq. 10 with numerator and denominator times e^{-4γt} where γ > 0: nothing overflows
        grown = s0 * np.sqrt(np.abs(gamma) * -np.expm1(-8 * x))
        numerator = np.where(gamma > 0, s0, s0 * decay)
        denominator = np.hypot(np.where(gamma > 0, decay, 1.0), grown)
        return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 0)

    def eigenvalues(self, t: ArrayLike) -> Floats:
        """λ_j(t) = γ_j s_j(t)², the eigenvalues of C, shape (*t.shape, d)."""
        return np.asarray(self.gamma) * self.singular_values(t) ** 2

    def loss(self, t: ArrayLike) -> Floats:
        """L(t) = Σ_j (1 − λ_j(t))² (Eq. 14), shape of t."""
        return ((1 - self.eigenvalues(t)) ** 2).sum(axis=-1)

    def step_times(self) -> Floats:
        """τ_j = −log(γ_j s_j(0)²) / 8γ_j (Eq. 16), where λ_j = 1/(2 − λ_j(0)); infinite where γ_j ≤ 0 or s_j(0) = 0."""
        gamma, s0 = np.asarray(self.gamma), np.asarray(self.s0)
        grows = (gamma > 0) & (s0 > 0)
        tau = np.full(gamma.shape, np.inf)
        tau[grows] = -(np.log(gamma[grows]) + 2 * np.log(s0[grows])) / (8 * gamma[grows])
        return tau
