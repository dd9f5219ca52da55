"""Loss and spectrum over time: the common result of closed forms, flow, descent and trained networks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, matrix, number, time_vector

Floats = NDArray[np.float64]

LARGEST_EIGENVALUE = 1e150  # the squares of the loss, and sums of them, then stay below 1e308
OVERSHOT = 1 + 1e-6  # integrators overshoot by less


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Spectrum of C over time.

    Attributes:
        times: t = lr × step, shape (T,).
        eigenvalues: of C, descending, shape (T, d).
        method: how the trajectory was computed.
        weights: W(t), shape (T, d, m), if requested.

    Example:
        >>> rise = Trajectory(np.array([0.0, 1.0, 2.0]), np.array([[0.1, 0.0], [0.5, 0.0], [0.9, 0.0]]), "toy")
        >>> rise.loss.round(2), rise.step_times()
        (array([1.81, 1.25, 1.01]), array([ 1., inf]))
    """

    times: Floats
    eigenvalues: Floats
    method: str
    weights: Floats | None = None

    def __post_init__(self) -> None:
        t, lam = time_vector(self.times), matrix(self.eigenvalues, "eigenvalues", most=LARGEST_EIGENVALUE, empty=True)
        if len(t) != len(lam):
            raise InputError("eigenvalues", f"must have {len(t)} rows, one per time", len(lam))
        object.__setattr__(self, "times", t)
        object.__setattr__(self, "eigenvalues", np.asarray(lam, np.float64))

    @property
    def loss(self) -> Floats:
        """L(t) = ‖C − I‖² = Σ_j (1 − λ_j)², shape (T,)."""
        with np.errstate(over="ignore"):
            return ((1 - self.eigenvalues) ** 2).sum(axis=-1)

    def step_times(self, level: float = 0.5) -> Floats:
        """When each λ_j first reaches `level`, shape (d,); infinite if it never does within the finite times.

        The log-odds of λ are interpolated linearly between records, which is exact for the logistic law; of spectral
        methods √λ, and also where λ overshoots 1, since there are no log-odds.
        """
        if not 0 < (level := number(level, "level")) < 1:
            raise InputError("level", "must lie strictly between 0 and 1", level)
        order = np.argsort(self.times, kind="stable")
        order = order[np.isfinite(self.times[order])]
        times, eigenvalues = self.times[order], self.eigenvalues[order]
        if len(times) == 0:
            return np.full(self.eigenvalues.shape[1], np.inf)
        above = eigenvalues >= level
        after = above.argmax(axis=0)
        before, modes = np.maximum(after - 1, 0), np.arange(above.shape[1])
        ends = eigenvalues[before, modes], eigenvalues[after, modes]
        linear = (ends[1] > OVERSHOT) | ("spectral" in self.method)
        share = np.where(linear, _share(_root, level, *ends), _share(_log_odds, level, *ends))
        crossing = times[before] + np.where(after > before, share, 0) * (times[after] - times[before])
        return np.where(above.any(axis=0), crossing, np.inf)


def _share(scale: Callable[[Floats | float], Floats], level: float, low: Floats, high: Floats) -> Floats:
    """How far along the way from low to high the level is reached, if `scale` of the values grows linearly."""
    first, last = scale(low), scale(high)
    return np.asarray((scale(level) - first) / np.where(last > first, last - first, 1))


def _root(p: Floats | float) -> Floats:
    return np.sqrt(np.maximum(p, 0))


def _log_odds(p: Floats | float) -> Floats:
    p = np.clip(p, 1e-300, 1 - 1e-15)
    return np.log(p) - np.log1p(-p)
