r"""Detect steps in measured spectra: when each dimension was learned.

A mode that is being learned grows as e^{8γt}, crosses half of its plateau p and saturates, so that the log-odds of λ/p
are a straight line of slope 8γ (`theory.modes`). A step is such a rise that has ended; its time is the zero of the
line, and its rise time is the inverse of the slope.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, matrix, vector

Floats = NDArray[np.float64]

FEWEST = 8  # least number of records
LOW, HIGH = np.exp(-6), 0.4  # range of λ/p to which the line is fitted; above it, few samples bias the spectrum
FEW = 3  # but fit to at least this many records, if the rise is faster than they are spaced
BENT = 0.3  # if the last record is this far above the line, the rise accelerates or began later: drop early records
RANGE = 10.0  # a step multiplies its eigenvalue by at least this factor,
GROWN = 0.02  # ends at no less than this share of the highest plateau,
SATURATED = 2.0  # and is followed by at least this many rise times on the plateau
APART = 3.0  # steps closer than this many rise times are one event


@dataclass(frozen=True)
class _Rise:
    """The rise of one mode.

    Attributes:
        time: when it reaches half of its plateau.
        rate: slope of the log-odds, 8γ.
        level: the plateau.
        ended: whether it has reached the plateau.
    """

    time: float
    rate: float
    level: float
    ended: bool


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in order of time.

    Attributes:
        times: when the eigenvalue crossed half of its plateau, (K,); accurate to about a rise time or the spacing of
            records.
        modes: indices, counted from 0, (K,).
        rise_times: 1/8γ, (K,); smaller means sharper.
        levels: plateaus, (K,).
        events: number of the event that each step belongs to, (K,); steps within three rise times form one event.
    """

    times: Floats
    modes: NDArray[np.int64]
    rise_times: Floats
    levels: Floats
    events: NDArray[np.int64]

    @property
    def multiplicity(self) -> NDArray[np.int64]:
        """Number of modes in each event."""
        return np.bincount(self.events) if len(self.events) else np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.times)


def detect_steps(t: ArrayLike, lam: ArrayLike) -> Steps:
    """Detect the steps in eigenvalues over time.

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
    ended = [(rise, j) for j in range(spectra.shape[1]) if (rise := _find_rise(times, spectra, j)) and rise.ended]
    highest = max((rise.level for rise, _ in ended), default=0.0)
    steps = sorted((pair for pair in ended if pair[0].level >= GROWN * highest), key=lambda pair: pair[0].time)
    at = np.array([rise.time for rise, _ in steps])
    rise_times = np.array([1 / rise.rate for rise, _ in steps])
    near = np.diff(at) < APART * np.maximum(rise_times[1:], rise_times[:-1])
    events = np.concatenate([[0], np.cumsum(~near)]) if steps else np.zeros(0)
    modes, levels = np.array([j for _, j in steps], dtype=np.int64), np.array([rise.level for rise, _ in steps])
    return Steps(at, modes, rise_times, levels, events.astype(np.int64))


@dataclass(frozen=True)
class Coupling:
    """Whether two staircases rise at the same times.

    Attributes:
        correlation: correlation over time of the rates at which modes rise, at the best lag.
        lag: delay of the second staircase, in units of t.
        unshifted: correlation without lag.
        by_chance: 99 % quantile of the correlations if one staircase is shifted cyclically by at least a twentieth of
            the whole time.
    """

    correlation: float
    lag: float
    unshifted: float
    by_chance: float


def coupling(t: ArrayLike, lam: ArrayLike, other: ArrayLike, most: float = 0.1) -> Coupling:
    """Test whether two staircases, of embeddings and hidden representations for example, rise at the same times.

    It compares the changes of the total variance Σ_j λ_j, which for C counts the grown modes. It tries lags up to the
    share `most` of the whole time and prefers small ones.

    Example:
        >>> t = np.linspace(0, 6, 300)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [1.0, 0.5])))
        >>> late = 5 / (1 + 1e6 * np.exp(-8 * np.outer(t - 0.5, [1.0, 0.5])))
        >>> pair = coupling(t, lam, late)
        >>> round(pair.lag, 1), pair.correlation > 0.99, pair.unshifted < 0.5
        (0.5, True, True)
    """
    times, first = records(t, lam)
    second = records(t, other)[1]
    even = np.linspace(times[0], times[-1], len(times))
    x, y = (np.diff(np.interp(even, times, np.maximum(spectra, 0.0).sum(axis=1))) for spectra in (first, second))
    reach = max(1, int(most * len(x)))
    far = range(max(1, len(x) // 20), len(x) - max(1, len(x) // 20))
    chance = float(np.quantile([_correlation(x, np.roll(y, shift)) for shift in far], 0.99))
    best = Coupling(-np.inf, 0.0, _correlation(x, y), chance)
    for shift in sorted(range(-reach, reach + 1), key=abs):
        one = _correlation(x[max(0, -shift) : len(x) - max(0, shift)], y[max(0, shift) : len(y) + min(0, shift)])
        if one > best.correlation:
            best = replace(best, correlation=one, lag=float(shift * (even[1] - even[0])))
    return best


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / size) if size > 0 else 0.0


def records(t: ArrayLike, lam: ArrayLike) -> tuple[Floats, Floats]:
    """Check times and spectra, and return them as arrays."""
    spectra = np.asarray(matrix(lam, "lam"), dtype=np.float64)
    times = vector(t, "t")
    if len(times) != len(spectra):
        raise InputError("t", f"must have {len(spectra)} times, one per row of lam", len(times))
    if len(times) < FEWEST:
        raise InputError("t", f"must hold at least {FEWEST} records", len(times), "wait, or record more often")
    if not (np.diff(times) > 0).all():
        raise InputError("t", "must increase", None, "sort the records and drop repeated ones")
    return times, spectra


def _find_rise(t: Floats, spectra: Floats, mode: int) -> _Rise | None:
    """The last rise of one eigenvalue by at least a factor of ten, ended or not; None if there is none."""
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
    cross = int(risen[0]) if len(risen) else len(t)  # first record above one half
    level = _level(spectra, own, high)
    line = _line(t, curve / level, cross)
    if line is None:
        return None
    time, rate = line
    return _Rise(time, rate, level, bool(len(risen) and rate * (t[-1] - time) > SATURATED))


def _level(spectra: Floats, own: float, high: NDArray[np.bool_]) -> float:
    """The plateau of a mode measured at `own`, from the records at which it is high.

    With few samples, eigenvalues repel each other (equal ones are measured as far apart as 0.5 and 1.5), but their sum
    is unbiased. The plateau is therefore the mean of all eigenvalues within a factor of four of `own`.
    """
    near = (spectra[high] > own / 4) & (spectra[high] < own * 4)
    near[~near.any(axis=1)] = True  # keeps the mean defined; never the median record
    grown = np.where(near, spectra[high], np.nan)
    return float(np.median(np.nanmean(grown, axis=1)))


def _line(t: Floats, share: Floats, cross: int) -> tuple[float, float] | None:
    """Zero and slope of a line through the log-odds before record `cross`, the first above one half."""
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
    # not a straight line: keep the zero between the two records around one half
    return float(np.clip(line[0], t[cross - 1], t[cross])), line[1]


def _fit(t: Floats, share: Floats) -> tuple[tuple[float, float] | None, float]:
    """Fit the log-odds by weighted least squares: zero and slope, and the last record's height above the line."""
    p = np.clip(share, 1e-300, 0.98)
    odds = np.log(p / (1 - p))
    weights = (1 - p) ** 2  # the noise of λ is relative, and the log-odds amplify it by 1/(1 − p)
    mean_t, mean_y = np.average(t, weights=weights), np.average(odds, weights=weights)
    rate = np.average((t - mean_t) * (odds - mean_y), weights=weights) / np.average((t - mean_t) ** 2, weights=weights)
    late = float(odds[-1] - mean_y - rate * (t[-1] - mean_t))
    return (float(mean_t - mean_y / rate), float(rate)) if rate > 0 else None, late
