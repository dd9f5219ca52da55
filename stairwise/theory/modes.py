r"""The idea of the whole package: self-supervised learning grows one mode at a time.

Train a linear map f(x) = W x on pairs of views with the loss L = ‖C − I‖². The data enters only through Γ, the
cross-correlation of the two views. Each eigenvalue γ_j of Γ has one *mode*: a singular value s_j of W that evolves
independently of the others,

    s' = 4 γ s (1 − γ s²)                                                        (12)

For λ = γ s², the eigenvalue of C that belongs to this mode, it is the logistic equation λ' = 8 γ λ (1 − λ). From a
small start λ grows exponentially, rises to 1 within about 1/8γ, and stays there. The rise happens at

    τ = −log(γ s(0)²) / 8γ                                                       (16)

so modes with large γ rise first, and the loss, the sum of (1 − λ_j)² over the modes, falls like a staircase.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import LARGEST, InputError, times, vector

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AbstractModes(ABC):
    """Modes that evolve independently of each other; γ and s(0) as described at `Modes`."""

    gamma: ArrayLike
    s0: ArrayLike

    def __post_init__(self) -> None:
        gamma, s0 = vector(self.gamma, "gamma", LARGEST), vector(self.s0, "s0", LARGEST)
        if s0.shape not in {(1,), gamma.shape}:
            raise InputError("s0", f"must be one number or {len(gamma)} numbers, one per gamma", f"shape {s0.shape}")
        if (s0 < 0).any():
            raise InputError("s0", "must be nonnegative", s0.min(), "put the sign into the singular vector")
        object.__setattr__(self, "gamma", gamma)
        object.__setattr__(self, "s0", np.broadcast_to(s0, gamma.shape))

    @abstractmethod
    def singular_values(self, t: ArrayLike) -> Floats:
        """s_j(t), shape (*t.shape, d)."""

    @abstractmethod
    def step_times(self) -> Floats:
        """When each mode steps, (d,)."""

    def eigenvalues(self, t: ArrayLike) -> Floats:
        """λ_j(t) = γ_j s_j(t)², the eigenvalues of C, shape (*t.shape, d)."""
        s = self.singular_values(t)
        return np.asarray(self.gamma) * s * s  # in this order, because s² may overflow where γ is tiny

    def loss(self, t: ArrayLike) -> Floats:
        """L(t) = Σ_j (1 − λ_j(t))² (Eq. 14), shape of t."""
        return ((1 - self.eigenvalues(t)) ** 2).sum(axis=-1)

    def _where_growing(self, time: Callable[[Floats, Floats], Floats]) -> Floats:
        """time(γ, s(0)) of the modes that grow, infinity for the others, (d,)."""
        gamma, s0 = np.asarray(self.gamma), np.asarray(self.s0)
        grows = (gamma > 0) & (s0 > 0)
        times = np.full(gamma.shape, np.inf)
        times[grows] = time(gamma[grows], s0[grows])
        return times


@dataclass(frozen=True, eq=False)
class Modes(AbstractModes):
    r"""Exact dynamics of aligned modes (Prop. "Trajectory of W(t) from aligned initialization", Eq. 10).

    .. math:: s_j(t) = \frac{e^{4γ_j t}}{\sqrt{s_j(0)^{-2} + (e^{8γ_j t} - 1) γ_j}}

    Times may be scalars or arrays and may be infinite. The mode index comes last. γ may have any sign.

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

    def singular_values(self, t: ArrayLike) -> Floats:
        """s_j(t), shape (*t.shape, d)."""
        t = times(t, "t")[..., None]
        gamma, s0 = np.asarray(self.gamma), np.asarray(self.s0)
        with np.errstate(over="ignore", under="ignore"):
            x = np.abs(gamma) * np.where(gamma == 0, 0.0, t)  # γ = 0: 0 · ∞ = 0
            decay = np.exp(-4 * x)
            # Eq. 10; for γ > 0 both numerator and denominator are multiplied by e^{-4γt} to avoid overflow
            grown = s0 * np.sqrt(np.abs(gamma) * -np.expm1(-8 * x))
        numerator = np.where(gamma > 0, s0, s0 * decay)
        denominator = np.hypot(np.where(gamma > 0, decay, 1.0), grown)
        return np.divide(numerator, denominator, out=np.zeros_like(denominator), where=denominator > 0)

    def step_times(self) -> Floats:
        """τ_j = −log(γ_j s_j(0)²) / 8γ_j (Eq. 16), where λ_j = 1/(2 − λ_j(0)); infinite where γ_j ≤ 0 or s_j(0) = 0.

        0 where λ_j(0) is 1 or more.
        """
        with np.errstate(over="ignore"):  # beyond 1e308 is never
            times = self._where_growing(lambda gamma, s0: -(np.log(gamma) + 2 * np.log(s0)) / 8 / gamma)
        return np.maximum(times, 0.0)
