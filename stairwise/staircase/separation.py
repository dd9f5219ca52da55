r"""How stepwise is a run? Two numbers that do not depend on the scale of the loss, the embedding or the learning rate.

Every record is measured in units of its typical variance Σλ²/Σλ, x_j = λ_j / (Σλ²/Σλ), because some losses do not fix
the scale of z and let it drift. A mode rises if x_j goes from below ¼ to ½ and does not fall below ¼ again.

*Gap*: when x_j = ½, how many decades is mode j + 1 below mode j? No clock enters, so that a schedule, a warm-up or
another learning rate change nothing. In the linear theory x_j grows as e^{8γ_j t} and the gap is
(1 − γ_{j+1}/γ_j) log₁₀ 1/(2 x_j(0)): it grows with the logarithm of 1/α². A gap above one decade is a clean step: the
next mode then needs less time from a tenth to a half than has passed since the step before. A spectrum that grows in
proportion has no rising mode, and one that flattens smoothly, λ_j = j^{-a(t)}, has a median gap of 0.06.

*Contrast of the loss*: the loss falls while mode j rises from x = 0.1 to 0.5. How much more than its share of the time
in log t, between the middles to the steps before and after? 1: the loss falls evenly and no step can be seen in it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import vector
from stairwise.staircase.steps import records, running_median

Floats = NDArray[np.float64]
FLOOR = 1e-4  # share of the typical variance below which modes are treated as equal, because they are noise
LOW, WAITING, RISEN = 0.1, 0.25, 0.5
FIRST = 10  # rising modes that count; later ones crowd in every run, and a run that learns more must not score lower
CLEAN = 1.0  # decades


@dataclass(frozen=True, eq=False)
class Separation:
    """How far the first rising modes of a run are apart.

    Attributes:
        modes: indices of the modes that rise, counted from 0, (K,).
        begins: when they passed a tenth of the typical variance, (K,).
        times: when they passed half of it, (K,).
        gaps: decades between each mode and the next one at that time, (K,).
    """

    modes: NDArray[np.int64]
    begins: Floats
    times: Floats
    gaps: Floats

    @property
    def gap(self) -> float:
        """Median gap in decades; 0 if no mode rises."""
        return float(np.median(self.gaps)) if len(self.gaps) else 0.0

    @property
    def clean(self) -> int:
        """Number of clean steps."""
        return int((self.gaps > CLEAN).sum())


def relative_variance(lam: ArrayLike) -> Floats:
    """x = λ / (Σλ²/Σλ), at least 1e-4, smoothed by the median of three records, (T, d)."""
    spectra = np.maximum(np.asarray(lam, dtype=np.float64), 0.0)
    squares = np.maximum((spectra**2).sum(axis=1, keepdims=True), 1e-300)
    x = spectra * (spectra.sum(axis=1, keepdims=True) / squares)
    return np.maximum(running_median(x.T).T, FLOOR)


def separation(t: ArrayLike, x: ArrayLike) -> Separation:
    """Gaps of the first ten modes that rise.

    Arguments:
        t: times of the records, increasing, (T,).
        x: `relative_variance` of all modes, or of the leading ones, (T, k).

    Example:
        >>> t = np.linspace(0.01, 12, 600)
        >>> gamma = 1 / np.arange(1, 9)
        >>> for start in (1e-8, 1e-2):
        ...     lam = 1 / (1 + np.exp(-8 * np.outer(t, gamma)) / start)
        ...     found = separation(t, relative_variance(lam))
        ...     print(len(found.times), round(found.gap, 1), found.clean)
        4 1.5 4
        5 0.2 0
    """
    times, curves = records(t, x)
    at = np.arange(len(times))
    rows = []
    for j in range(curves.shape[1] - 1):
        low = curves[:, j] <= WAITING
        last_low = int(at[low][-1]) if low.any() else len(at)
        risen = np.flatnonzero((curves[:, j] >= RISEN) & (at > last_low))
        if not len(risen):
            continue
        half = _crossing(np.log(curves[:, j]), int(risen[0]), np.log(RISEN))
        below = np.flatnonzero(curves[: risen[0], j] <= LOW)
        begin = _crossing(np.log(curves[:, j]), int(below[-1]) + 1, np.log(LOW)) if len(below) else 0.0
        following = np.interp(half, at, np.log(curves[:, j + 1]))
        rows.append((j, *np.interp([begin, half], at, times), (np.log(RISEN) - following) / np.log(10)))
    modes, begins, halves, gaps = np.array(rows[:FIRST]).reshape(-1, 4).T
    return Separation(modes.astype(np.int64), begins, halves, gaps)


def loss_contrast(t: ArrayLike, loss: ArrayLike, steps: Separation) -> float:
    """How much faster the loss falls while modes rise than on average around the steps, per unit of log t.

    1 if it falls evenly or if fewer than three modes rise.
    """
    times, values = vector(t, "t"), vector(loss, "loss")
    if len(steps.times) < 3:
        return 1.0
    middles = np.sqrt(steps.times[:-1] * steps.times[1:])
    rising, expected = 0.0, 0.0
    for begin, half, *ends in zip(steps.begins[1:-1], steps.times[1:-1], middles[:-1], middles[1:], strict=True):
        if ends[1] > ends[0]:
            begin = max(begin, ends[0])
            first, last, low, high = np.interp([begin, half, *ends], times, values)
            rising += first - last
            expected += (low - high) * np.log(half / begin) / np.log(ends[1] / ends[0])
    return float(rising / expected) if expected > 0 else 1.0


def _crossing(curve: Floats, i: int, level: float) -> float:
    """Fractional index between records i − 1 and i at which a curve passes a level."""
    before, after = curve[i - 1 : i + 1]
    return i - 1 + float(np.clip((level - before) / (after - before), 0.0, 1.0)) if after != before else float(i)
