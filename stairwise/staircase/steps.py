r"""Which dimension was learned when: steps found in measured spectra.

A mode that is being learned grows as e^{8γt}, crosses half of its plateau p and saturates: the log-odds of λ/p are a
straight line of slope 8γ (`theory.modes`). A step is such a rise that has ended; its time is where the line crosses
zero, its rise time the inverse of the slope.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, matrix, vector

__all__ = ["Coupling", "Rise", "Steps", "coupling", "detect_steps", "find_rise", "records"]

Floats = NDArray[np.float64]

FEWEST = 8  # records that a curve must have
LOW, HIGH = np.exp(-6), 0.4  # part of a rise to which the line is fitted, as λ/p: above, few samples bias it
FEW = 3  # but at least these many records, where the rise is faster than they are
BENT = 0.3  # the last record so far above the line: the rise accelerates, or began later; early ones are dropped
RANGE = 10.0  # a step multiplies its eigenvalue at least by this
GROWN = 0.02  # and ends at no less than this share of the highest plateau
SATURATED = 2.0  # and is followed by at least this many rise times at its level
APART = 3.0  # steps closer than this many rise times are one event


@dataclass(frozen=True)
class Rise:
    """One mode's way up.

    Attributes:
        time: when it is, or was, at half of its plateau.
        rate: slope of the log-odds, 8γ.
        level: the plateau.
        ended: whether it has reached it.
    """

    time: float
    rate: float
    level: float
    ended: bool


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in order of time.

    Attributes:
        times: when the eigenvalue crossed half of its plateau, to about a rise time or the records' spacing, (K,).
        modes: which, counted from 0, (K,).
        rise_times: 1/8γ, (K,): the smaller, the sharper.
        levels: plateaus, (K,).
        events: number of the event each belongs to, (K,); steps within three rise times of one another are one.
    """

    times: Floats
    modes: NDArray[np.int64]
    rise_times: Floats
    levels: Floats
    events: NDArray[np.int64]

    @property
    def multiplicity(self) -> NDArray[np.int64]:
        """Number of modes of each event."""
        return np.bincount(self.events) if len(self.events) else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.times)


def detect_steps(t: ArrayLike, lam: ArrayLike) -> Steps:
    """Find the steps in eigenvalues over time.

    Arguments:
        t: times of the records, increasing, (T,).
        lam: eigenvalues, descending at every time, (T, d), of C or of a covariance.

    Example:
        >>> t = np.linspace(0, 6, 300)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [1.0, 0.5])))
        >>> steps = detect_steps(t, lam)
        >>> steps.times.round(2), steps.modes, steps.rise_times.round(3)
        (array([1.73, 3.45]), array([0, 1]), array([0.125, 0.25 ]))
    """
    times, spectra = records(t, lam)
    found = [(rise, j) for j in range(spectra.shape[1]) if (rise := find_rise(times, spectra, j)) and rise.ended]
    highest = max((rise.level for rise, _ in found), default=0.0)
    found = [(rise, j) for rise, j in found if rise.level >= GROWN * highest]
    found.sort(key=lambda pair: pair[0].time)
    at = np.array([rise.time for rise, _ in found])
    rises = np.array([1 / rise.rate for rise, _ in found])
    near = np.diff(at) < APART * np.maximum(rises[1:], rises[:-1])
    events = np.concatenate([[0], np.cumsum(~near)]) if found else np.zeros(0)
    return Steps(
        at,
        np.array([j for _, j in found], dtype=np.int64),
        rises,
        np.array([rise.level for rise, _ in found]),
        events.astype(np.int64),
    )


@dataclass(frozen=True)
class Coupling:
    """How two staircases go together.

    Attributes:
        correlation: of the rates at which modes rise, over time, at the best lag.
        lag: by how much the second is later, in units of t.
        unshifted: the correlation without lag.
        by_chance: what 99 % of the correlations stay below when one is shifted against the other, round and round, by
            at least a twentieth of the whole time.
    """

    correlation: float
    lag: float
    unshifted: float
    by_chance: float


def coupling(t: ArrayLike, lam: ArrayLike, other: ArrayLike, most: float = 0.1) -> Coupling:
    """Do embeddings and hidden representations, say, rise at the same times?

    Compared are the changes of the total variance Σ_j λ_j, which for C counts the modes that have grown. Lags of at
    most the share `most` of the whole time are tried; among equals the smallest is taken.

    Example:
        >>> t = np.linspace(0, 6, 300)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [1.0, 0.5])))
        >>> late = 5 / (1 + 1e6 * np.exp(-8 * np.outer(t - 0.5, [1.0, 0.5])))
        >>> found = coupling(t, lam, late)
        >>> round(found.lag, 1), found.correlation > 0.99, found.unshifted < 0.5
        (0.5, True, True)
    """
    times, first = records(t, lam)
    second = records(t, other)[1]
    even = np.linspace(times[0], times[-1], len(times))
    x, y = (np.diff(np.interp(even, times, np.maximum(spectra, 0.0).sum(axis=1))) for spectra in (first, second))
    reach = max(1, int(most * len(x)))
    far = range(max(1, len(x) // 20), len(x) - max(1, len(x) // 20))
    chance = float(np.quantile([_correlation(x, np.roll(y, shift)) for shift in far], 0.99))
    found = Coupling(-np.inf, 0.0, _correlation(x, y), chance)
    for shift in sorted(range(-reach, reach + 1), key=abs):
        one = _correlation(x[max(0, -shift) : len(x) - max(0, shift)], y[max(0, shift) : len(y) + min(0, shift)])
        if one > found.correlation:
            found = replace(found, correlation=one, lag=float(shift * (even[1] - even[0])))
    return found


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / size) if size > 0 else 0.0


def records(t: ArrayLike, lam: ArrayLike) -> tuple[Floats, Floats]:
    """Checked times and spectra."""
    spectra = np.asarray(matrix(lam, "lam"), dtype=np.float64)
    times = vector(t, "t")
    if len(times) != len(spectra):
        raise InputError("t", f"must have {len(spectra)} times, one per row of lam", len(times))
    if len(times) < FEWEST:
        raise InputError("t", f"must hold at least {FEWEST} records", len(times), "wait, or record more often")
    if not (np.diff(times) > 0).all():
        raise InputError("t", "must increase", None, "sort the records and drop repeated ones")
    return times, spectra


def find_rise(t: Floats, spectra: Floats, mode: int) -> Rise | None:
    """The last rise of one eigenvalue by at least a factor of ten, ended or not; None where there is none."""
    curve = spectra[:, mode]
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(curve, 1, mode="edge"), 3), axis=1)
    high = curve >= smooth.max() / 2
    if smooth.max() <= 0:
        return None
    own = float(np.median(curve[high]))
    low = np.flatnonzero(smooth < own / 4)
    if len(low) == 0 or smooth[low].min() > own / RANGE:
        return None
    risen = low[-1] + 1 + np.flatnonzero(smooth[low[-1] + 1 :] >= own / 2)
    cross = int(risen[0]) if len(risen) else len(t)  # the first record above one half
    level = _level(spectra, own, high)
    line = _line(t, curve / level, cross)
    if line is None:
        return None
    time, rate = line
    return Rise(time, rate, level, bool(len(risen) and rate * (t[-1] - time) > SATURATED))


def _level(spectra: Floats, own: float, high: NDArray[np.bool_]) -> float:
    """The plateau of a mode that is measured at `own`, from the records at which it is high.

    Eigenvalues of few samples repel each other (equal ones are measured as far apart as 0.5 and 1.5), but their sum is
    unbiased. So it is the mean of all at about this level, within a factor of four.
    """
    near = (spectra[high] > own / 4) & (spectra[high] < own * 4)
    near[~near.any(axis=1)] = True  # cannot happen to the median record, and keeps the mean defined
    grown = np.where(near, spectra[high], np.nan)
    return float(np.median(np.nanmean(grown, axis=1)))


def _line(t: Floats, share: Floats, cross: int) -> tuple[float, float] | None:
    """Time of the zero and slope of the log-odds before record `cross`, the first above one half."""
    first = cross
    while first > 0 and (share[first - 1] > LOW or first > cross - FEW):
        first -= 1
    chosen = np.arange(first, cross)
    chosen = chosen[(share[chosen] < HIGH) & (share[chosen] > 0)]
    if len(chosen) < 2:
        chosen = np.arange(max(0, cross - 1), min(cross + 1, len(t)))
    if len(chosen) < 2:
        return None
    line, late = _fit(t[chosen], share[chosen])
    kept = len(chosen)
    while late > BENT and kept > FEW:
        kept -= 1
        shorter, late = _fit(t[chosen[-kept:]], share[chosen[-kept:]])
        line = shorter or line
    if line is None or 2 * kept > len(chosen) or not 0 < cross < len(t):
        return line
    # no straight line at all: it crosses between the records around one half
    return float(np.clip(line[0], t[cross - 1], t[cross])), line[1]


def _fit(t: Floats, share: Floats) -> tuple[tuple[float, float] | None, float]:
    """Zero and slope of the log-odds by weighted least squares, and how far above the line the last of them is."""
    p = np.clip(share, 1e-300, 0.98)
    odds = np.log(p / (1 - p))
    weights = (1 - p) ** 2  # the noise of λ is relative: that of the log-odds is 1/(1 − p) times it
    mean_t, mean_y = np.average(t, weights=weights), np.average(odds, weights=weights)
    rate = np.average((t - mean_t) * (odds - mean_y), weights=weights) / np.average((t - mean_t) ** 2, weights=weights)
    late = float(odds[-1] - mean_y - rate * (t[-1] - mean_t))
    return (float(mean_t - mean_y / rate), float(rate)) if rate > 0 else None, late
