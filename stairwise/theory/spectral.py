r"""The staircase under Muon: the closed form of spectral flow, W' = polar(−∇L), from aligned initialization.

The polar factor replaces every singular value of the gradient by one. So all modes grow at the same speed,

    s_j(t) = s_j(0) + t   until γ_j s_j² = 1,      λ_j(t) = min(1, γ_j (s_j(0) + t)²),

and λ_j = 1/2 at t_j = (2γ_j)^{-1/2} − s_j(0): steps follow γ^{-1/2} instead of 1/γ, and the size of the initialization
does not delay them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, rate, times
from stairwise.theory.modes import AbstractModes

Floats = NDArray[np.float64]

MOST_STEPS = 1e15  # beyond, a float does not tell odd from even
REST = 1e-12  # a descent that meets its goal to this accuracy stays there


@dataclass(frozen=True, eq=False)
class SpectralModes(AbstractModes):
    r"""Exact spectral flow, or spectral descent, of aligned modes; the interface of `Modes`.

    A mode with γ > 0 moves at speed 1 to s = γ^{-1/2} from either side; one with γ < 0 shrinks at speed 1 to s = 0. One
    with γ = 0 or s(0) = 0 has no gradient and rests. Descent moves by `lr` per step; past its goal, it turns around at
    every step: from then on s alternates between two values that are lr apart (if lr > γ^{-1/2}, their sum may be lr).

    Arguments:
        gamma: eigenvalues γ_j of Γ, shape (d,).
        s0: initial singular values s_j(0) ≥ 0, shape (d,) or scalar.
        lr: learning rate of spectral descent; None: flow. Times are then rounded down to whole steps, t = lr × step.

    Example:
        >>> modes = SpectralModes(gamma=[2.0, 1.0, -1.0], s0=1e-3)
        >>> modes.eigenvalues([0.0, 0.5, 1.0, np.inf]).round(3)
        array([[ 0.   ,  0.   , -0.   ],
               [ 0.502,  0.251, -0.   ],
               [ 1.   ,  1.   , -0.   ],
               [ 1.   ,  1.   , -0.   ]])
        >>> modes.step_times().round(3)
        array([0.499, 0.706,   inf])
        >>> SpectralModes([2.0, 1.0], 1e-3, lr=0.1).limits().round(3)
        array([[0.701, 0.901],
               [0.801, 1.001]])
    """

    lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is not None:
            object.__setattr__(self, "lr", rate(self.lr))

    def singular_values(self, t: ArrayLike) -> Floats:
        """s_j(t), shape (*t.shape, d)."""
        t = times(t, "t")[..., None]
        s0, goal = np.asarray(self.s0), self._goals()
        if self.lr is not None:
            return self._descent(t)
        return np.where(s0 < goal, np.minimum(s0 + t, goal), np.maximum(s0 - t, goal))

    def step_times(self) -> Floats:
        """When λ_j first reaches 1/2: (2γ_j)^{-1/2} − s_j(0), for descent the next whole step; infinite if never."""
        tau = self._where_growing(lambda gamma, s0: np.maximum((2 * gamma) ** -0.5 - s0, 0.0))
        return tau if self.lr is None else self.lr * np.ceil(tau / self.lr - REST)

    def limits(self) -> Floats:
        """The smaller and the larger s_j between which descent alternates for good, (2, d); equal for flow."""
        if self.lr is None:
            return np.stack([self._goals()] * 2)
        return np.sort(np.stack(self._orbit()), axis=0)

    def _goals(self) -> Floats:
        gamma, s0 = np.asarray(self.gamma), np.asarray(self.s0)
        goals = np.where(gamma > 0, 1 / np.sqrt(np.where(gamma > 0, gamma, 1.0)), np.where(gamma < 0, 0.0, s0))
        return np.where(s0 > 0, goals, 0.0)

    def _arrival(self) -> tuple[Floats, Floats]:
        """Number of steps to the goal or past it, and the signed singular value there."""
        s0, goal = np.asarray(self.s0), self._goals()
        lr = float(self.lr or 0.0)
        steps = np.maximum(np.ceil(np.abs(goal - s0) / lr - REST), 0.0)
        return steps, s0 + np.sign(goal - s0) * lr * steps

    def _orbit(self) -> tuple[Floats, Floats]:
        """The two values that alternate from the arrival on, in this order; equal where the mode rests."""
        goal, first, lr = self._goals(), np.abs(self._arrival()[1]), float(self.lr or 0.0)
        first = np.where(np.abs(first - goal) <= REST * np.maximum(goal, lr), goal, first)
        first = np.where(first <= REST * lr, 0.0, first)  # a step to zero, where there is no gradient
        second = np.where(first > goal, np.abs(first - lr), first + lr)
        return first, np.where((first == goal) | (first == 0), first, second)

    def _descent(self, t: Floats) -> Floats:
        s0, goal, lr = np.asarray(self.s0), self._goals(), float(self.lr or 0.0)
        if np.isinf(t).any():
            raise InputError("t", "must be finite for descent, which never comes to rest", np.inf, "use limits()")
        if (t > MOST_STEPS * lr).any():
            raise InputError("t", f"must be at most {MOST_STEPS:g} steps of lr", t.max(), "use limits()")
        count = np.floor(t / lr + 1e-9)
        steps, _ = self._arrival()
        first, second = self._orbit()
        later = np.where((count - steps) % 2 == 0, first, second)
        return np.where(count < steps, s0 + np.sign(goal - s0) * lr * count, later)
