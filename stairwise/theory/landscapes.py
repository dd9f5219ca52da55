r"""Loss landscapes of a single mode, and the exact solutions of their gradient flows.

In the coordinate s̄ = √γ s (so that s̄² = λ, an eigenvalue of C) all modes descend the same landscape L(s̄), each at a
speed set by its γ (App. F and G):

    s̄' = −γ dL/ds̄,   γ > 0.

`BarlowTwins` is the paper's model: 0 is an unstable equilibrium, so a mode waits and then steps. `Supervised` has no
such equilibrium and no step. The others are the appendix's proposals for faster training.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import scipy.special
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import LARGEST, InputError, number, real, times

__all__ = [
    "ALL",
    "AbstractLandscape",
    "BarlowTwins",
    "DoubleWell",
    "FourthPower",
    "Hinged",
    "Sharpened",
    "Smoothed",
    "Supervised",
]

Floats = NDArray[np.float64]

LARGEST_WEIGHT = 1e30  # of s̄


class AbstractLandscape(ABC):
    """The loss of one mode with its exact flow. All methods broadcast their arguments like numpy functions."""

    @abstractmethod
    def loss(self, s_bar: ArrayLike) -> Floats:
        """L(s̄)."""

    @abstractmethod
    def slope(self, s_bar: ArrayLike) -> Floats:
        """dL/ds̄."""

    @abstractmethod
    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats: ...

    @abstractmethod
    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats: ...

    def rate(self, s_bar: ArrayLike, gamma: ArrayLike) -> Floats:
        """s̄' = −γ dL/ds̄."""
        return -_positive(gamma) * self.slope(s_bar)

    def solve(self, t: ArrayLike, s_bar0: ArrayLike, gamma: ArrayLike) -> Floats:
        """s̄(t) from s̄(0); t may be infinite."""
        t, s, gamma = _together(t=times(t, "t"), s_bar0=_real(s_bar0, "s_bar0"), gamma=_positive(gamma))
        with np.errstate(over="ignore", under="ignore"):  # large times are as good as infinite
            return self._solve(t, s, gamma)

    def step_times(self, s_bar0: ArrayLike, gamma: ArrayLike) -> Floats:
        """When s̄² reaches half of its final value from below; 0 if it starts above, infinite if it never does."""
        s, gamma = _together(s_bar0=_real(s_bar0, "s_bar0"), gamma=_positive(gamma))
        with np.errstate(divide="ignore", over="ignore"):
            return np.maximum(self._time_to_half(s, gamma), 0.0)


@dataclass(frozen=True)
class DoubleWell(AbstractLandscape):
    r"""L = (b s̄² − a)²/b, the quartic of Landau's theory of symmetry breaking, with minima at s̄ = ±√(a/b).

    Solution of s̄' = 4γ s̄ (a − b s̄²): s̄(t) = s̄₀ / √(e^{−8aγt} + (b/a) s̄₀² (1 − e^{−8aγt})).

    >>> DoubleWell(a=4.0, b=1.0).solve([0.0, np.inf], -0.1, gamma=1.0)
    array([-0.1, -2. ])
    """

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "a", number(self.a, "a", above=0, least=1e-30, most=1e30))
        object.__setattr__(self, "b", number(self.b, "b", above=0, least=1e-30, most=1e30))

    def loss(self, s_bar: ArrayLike) -> Floats:
        return (self.b * np.square(_real(s_bar)) - self.a) ** 2 / self.b

    def slope(self, s_bar: ArrayLike) -> Floats:
        return 4 * _real(s_bar) * (self.b * np.square(_real(s_bar)) - self.a)

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        x = self.a * gamma * t
        down = np.hypot(np.exp(-4 * x), s * np.sqrt(self.b / self.a * -np.expm1(-8 * x)))
        return np.divide(s, down, out=np.zeros_like(down), where=down > 0)

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        lam = s**2 * self.b / self.a
        return _log_odds_against(np.minimum(lam, 0.5)) / (8 * self.a * gamma)


@dataclass(frozen=True)
class BarlowTwins(AbstractLandscape):
    """L = (1 − s̄²)² (Eq. 14): the paper's model, a double well with minima at ±1.

    >>> BarlowTwins().step_times(1e-3, gamma=[1.0, 0.5]).round(3)
    array([1.727, 3.454])
    """

    def loss(self, s_bar: ArrayLike) -> Floats:
        return (1 - np.square(_real(s_bar))) ** 2

    def slope(self, s_bar: ArrayLike) -> Floats:
        return DoubleWell().slope(s_bar)

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        return DoubleWell()._solve(t, s, gamma)

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        return DoubleWell()._time_to_half(s, gamma)


@dataclass(frozen=True)
class Sharpened(AbstractLandscape):
    """L = (1 − |s̄|)², that is ‖g(C) − I‖² with g = sign·√|·| (App. G): a kink at 0, so modes do not wait.

    Solution: |s̄(t)| = 1 − (1 − |s̄₀|) e^{−2γt}.

    >>> Sharpened().solve([0.0, 0.5, np.inf], 1e-9, gamma=1.0).round(3)
    array([0.   , 0.632, 1.   ])
    """

    def loss(self, s_bar: ArrayLike) -> Floats:
        return (1 - np.abs(_real(s_bar))) ** 2

    def slope(self, s_bar: ArrayLike) -> Floats:
        return 2 * (_real(s_bar) - np.sign(_real(s_bar)))

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        return np.sign(s) + (s - np.sign(s)) * np.exp(-2 * gamma * t)

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        left = np.where(s != 0, 1 - np.minimum(np.abs(s), np.sqrt(0.5)), np.inf)
        return np.log(left / (1 - np.sqrt(0.5))) / (2 * gamma)


@dataclass(frozen=True)
class Smoothed(AbstractLandscape):
    """L = (g(s̄²) − 1)² with g(λ) = min(λ, 1 + ε(λ − 1)) (App. G): less steep beyond the minimum, flat if ε = 0.

    >>> Smoothed(epsilon=0.0).solve(np.inf, [0.1, 3.0], gamma=1.0)
    array([1., 3.])
    """

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", number(self.epsilon, "epsilon", least=0))
        if self.epsilon > 1:
            raise InputError("epsilon", "must be at most 1", self.epsilon, "1 is the plain Barlow Twins loss")

    def loss(self, s_bar: ArrayLike) -> Floats:
        return self._softening(s_bar) * BarlowTwins().loss(s_bar)

    def slope(self, s_bar: ArrayLike) -> Floats:
        return self._softening(s_bar) * BarlowTwins().slope(s_bar)

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        softening = self._softening(s)
        slowed = np.where(softening == 0, 0.0, softening) * np.where(softening == 0, 0.0, t)  # 0 · ∞ = 0
        return np.where(softening == 0, s, DoubleWell()._solve(slowed, s, gamma))

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        return DoubleWell()._time_to_half(s, gamma)

    def _softening(self, s_bar: ArrayLike) -> Floats:
        return np.where(np.abs(_real(s_bar)) > 1, self.epsilon**2, 1.0)


@dataclass(frozen=True)
class Hinged(AbstractLandscape):
    """L = max(|1 − s̄²| − width, 0)² (App. G): a flat floor of the given width around λ = 1.

    >>> Hinged(width=0.19).solve(np.inf, [0.1, 1.05], gamma=1.0)
    array([0.9 , 1.05])
    """

    width: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", number(self.width, "width", least=0))
        if self.width >= 1:
            raise InputError("width", "must be below 1", self.width, "the floor must not reach the origin")

    def loss(self, s_bar: ArrayLike) -> Floats:
        return np.maximum(np.abs(1 - np.square(_real(s_bar))) - self.width, 0) ** 2

    def slope(self, s_bar: ArrayLike) -> Floats:
        off = np.square(_real(s_bar)) - 1
        return 4 * _real(s_bar) * np.sign(off) * np.maximum(np.abs(off) - self.width, 0)

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        low, high = DoubleWell(1 - self.width), DoubleWell(1 + self.width)
        outside = np.where(s**2 < 1, low._solve(t, s, gamma), high._solve(t, s, gamma))
        return np.where(np.abs(1 - s**2) <= self.width, s, outside)

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        return DoubleWell(1 - self.width)._time_to_half(s, gamma)


@dataclass(frozen=True)
class FourthPower(AbstractLandscape):
    """L = (1 − s̄²)⁴ (App. G): no curvature at the minimum, so large learning rates are stable but the end is slow.

    λ' = 16γ λ (1 − λ)³ has the implicit solution log(λ/(1−λ)) + y + y²/2 = 16γt + const with y = 1/(1 − λ). It is
    monotone; Newton's method solves it to rounding error.

    >>> s = FourthPower().solve(5.0, 0.01, gamma=1.0)
    >>> bool(FourthPower().loss(s) < 1e-3)
    True
    """

    def loss(self, s_bar: ArrayLike) -> Floats:
        return (1 - np.square(_real(s_bar))) ** 4

    def slope(self, s_bar: ArrayLike) -> Floats:
        return -8 * _real(s_bar) * (1 - np.square(_real(s_bar))) ** 3

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        size = np.asarray(np.abs(s))
        moves = (size > 0) & (size != 1)
        low, high = moves & (size < 1), moves & (size > 1)
        out = size.copy()
        out[low] = self._rise(16 * gamma[low] * t[low], size[low])
        out[high] = self._sink(16 * gamma[high] * t[high], size[high])
        return np.sign(s) * out

    @staticmethod
    def _rise(clock: Floats, size: Floats) -> Floats:
        """Start below 1: with x the log-odds of λ and y = 1 + eˣ, x + y + y²/2 grows linearly in time."""
        x0 = 2 * np.log(size) - np.log1p(-(size**2))
        goal = x0 + 1.5 + 2 * np.exp(x0) + np.exp(2 * x0) / 2 + clock
        end = np.minimum(goal, 1e150)
        x = np.minimum(end - 1.5, np.log(2 * np.maximum(end, 1.0)) / 2)  # right of the root: the function is convex,
        for _ in range(100):  # so Newton approaches it without overshooting
            x = x - (x + 1.5 + 2 * np.exp(x) + np.exp(2 * x) / 2 - end) / (1 + np.exp(x)) ** 2
        return np.where(np.isinf(goal), 1.0, np.exp(scipy.special.log_expit(x) / 2))

    @staticmethod
    def _sink(clock: Floats, size: Floats) -> Floats:
        """Start above 1: with y = 1/(λ − 1), y²/2 − y + log(1 + y) grows linearly in time."""

        def passed(y: Floats) -> Floats:
            small = np.minimum(y, 0.03)
            series = sum((-1) ** (k + 1) * small**k / k for k in range(3, 12))  # avoids cancellation at small y
            return np.where(y < 0.03, series, y**2 / 2 - y + np.log1p(y))

        goal = passed(1 / (size**2 - 1)) + clock
        end = np.minimum(goal, 1e150)
        y = 1 + np.sqrt(1 + 2 * end)
        for _ in range(100):
            y = y - (passed(y) - end) * (1 + y) / y**2
        return np.where(np.isinf(goal), 1.0, np.sqrt(1 + 1 / y))

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        lam = np.minimum(s**2, 0.5)
        y = 1 / (1 - lam)
        return (4.0 - (y + y**2 / 2) + _log_odds_against(lam)) / (16 * gamma)


@dataclass(frozen=True)
class Supervised(AbstractLandscape):
    """L = (target − c̄)², one coefficient of supervised kernel regression (App. F): no symmetry, so no step.

    Solution: c̄(t) = target + (c̄₀ − target) e^{−2γt}.

    >>> Supervised().solve([0.0, 0.5, np.inf], 0.0, gamma=1.0).round(3)
    array([0.   , 0.632, 1.   ])
    """

    target: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", number(self.target, "target", least=-1e30, most=1e30))

    def loss(self, s_bar: ArrayLike) -> Floats:
        return (self.target - _real(s_bar)) ** 2

    def slope(self, s_bar: ArrayLike) -> Floats:
        return 2 * (_real(s_bar) - self.target)

    def _solve(self, t: Floats, s: Floats, gamma: Floats) -> Floats:
        return self.target + (s - self.target) * np.exp(-2 * gamma * t)

    def _time_to_half(self, s: Floats, gamma: Floats) -> Floats:
        # distance relative to the target; a start of the other sign has to cross 0 first
        left = 1 - s / self.target if self.target else np.zeros_like(s)
        half = 1 - np.sqrt(0.5)
        return np.log(np.maximum(left, half) / half) / (2 * gamma)


ALL: tuple[type[AbstractLandscape], ...] = (
    BarlowTwins,
    Sharpened,
    Smoothed,
    FourthPower,
    Hinged,
    DoubleWell,
    Supervised,
)


def _real(s_bar: ArrayLike, name: str = "s_bar") -> Floats:
    """s̄ of any shape, up to 1e30, so that its eighth power is finite."""
    out = np.asarray(real(s_bar, name), dtype=np.float64)
    if not (np.abs(out) <= LARGEST_WEIGHT).all():
        raise InputError(name, "must be finite and at most 1e30 in magnitude", out)
    return out


def _positive(gamma: ArrayLike) -> Floats:
    out = np.asarray(real(gamma, "gamma"), dtype=np.float64)
    if not ((out > 0) & (out <= LARGEST)).all():
        rule = f"must be positive and at most {LARGEST:g}"
        raise InputError("gamma", rule, out, "landscapes use s̄ = √γ s; for γ ≤ 0 use Modes")
    return out


def _together(**arrays: Floats) -> tuple[Floats, ...]:
    """Arrays of one shape, to which all are broadcast."""
    try:
        return tuple(np.broadcast_arrays(*arrays.values()))
    except ValueError:
        shapes = ", ".join(str(one.shape) for one in arrays.values())
        raise InputError(" and ".join(arrays), "must have shapes that fit together", shapes) from None


def _log_odds_against(lam: Floats) -> Floats:
    """log((1 − λ)/λ), infinite at 0."""
    return np.log1p(-lam) - np.log(lam)
