r"""Detect steps in measured spectra: when each dimension was learned.

A mode that is being learned grows as e^{8γt}, crosses half of its plateau p and saturates, so that the log-odds of λ/p
are a straight line of slope 8γ (`theory.modes`). A step is such a rise that has ended; its time is the zero of the
line, and its rise time is the inverse of the slope.

Modes that rise by another law are still found, but not placed as well: under Muon λ grows as t², and steps are placed
15 to 20 % early. A mode that grows slowly for long and then goes from a few hundredths of its plateau to all of it
between two records is placed late, by up to three rise times or four records in our runs. If plateaus are known to be
1, `Trajectory.step_times` gives the crossings of ½ themselves.
"""

from dataclasses import dataclass, replace
from typing import Any

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
BLOCK = 64  # modes at a time, so that their curves stay in the processor's cache
APART = 3.0  # steps closer than this many rise times are one event


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in order of time.

    Attributes:
        times: when the eigenvalue crossed half of its plateau, (K,); accurate to about a rise time or the spacing of
            records, if it rises by the law above.
        modes: indices, counted from 0, (K,).
        rise_times: 1/8γ, (K,); smaller means sharper.
        levels: plateaus, (K,); those of modes within a factor of four of each other are averaged, because few samples
            spread equal eigenvalues that far.
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
    modes, at, rates, levels = _ended_rises(times, spectra)
    order = np.argsort(at, kind="stable")
    order = order[levels[order] >= GROWN * levels.max(initial=0.0)]
    at, rise_times = at[order], 1 / rates[order]
    near = np.diff(at) < APART * np.maximum(rise_times[1:], rise_times[:-1])
    events = np.concatenate([[0], np.cumsum(~near)]) if len(at) else np.zeros(0)
    return Steps(at, modes[order], rise_times, levels[order], events.astype(np.int64))


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


def running_median(curves: Floats) -> Floats:
    """Median of three neighbouring records, over the last axis; the first and the last record keep their value."""
    before, after = (
        np.concatenate(two, axis=-1)
        for two in ((curves[..., :1], curves[..., :-1]), (curves[..., 1:], curves[..., -1:]))
    )
    return np.maximum(np.minimum(before, after), np.minimum(np.maximum(before, after), curves))


def _ended_rises(t: Floats, spectra: Floats) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """Modes whose last rise by at least a factor of ten has ended: indices, times at half, rates and levels.

    The rate is the slope of the log-odds, 8γ.
    """
    curves = np.ascontiguousarray(spectra.T)  # modes are rows from here on
    smooth = running_median(curves)
    highest = smooth.max(axis=1)
    high = curves >= highest[:, None] / 2
    own = _medians(curves, high)
    low = smooth < own[:, None] / 4
    last_low = len(t) - 1 - np.argmax(low[:, ::-1], axis=1)
    risen = (smooth >= own[:, None] / 2) & (np.arange(len(t)) > last_low[:, None])
    deep = low.any(axis=1) & (smooth.min(axis=1) <= own / RANGE)
    modes = np.flatnonzero((highest > 0) & deep & risen.any(axis=1))
    cross = np.argmax(risen[modes], axis=1)  # first record above one half
    levels = _levels(spectra, own[modes], high[modes])
    blocks = [slice(i, i + BLOCK) for i in range(0, max(len(modes), 1), BLOCK)]
    lines = [_lines(t, curves[modes[b]] / levels[b, None], cross[b]) for b in blocks]
    times, rates = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    with np.errstate(invalid="ignore"):  # NaN where there is no line
        ended = rates * (t[-1] - times) > SATURATED
    return modes[ended], times[ended], rates[ended], levels[ended]


def _medians(values: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """Median of the chosen entries of every row; at least one must be chosen."""
    ordered = np.sort(np.where(chosen, values, np.inf), axis=1)
    count, row = chosen.sum(axis=1), np.arange(len(values))
    return np.asarray((ordered[row, (count - 1) // 2] + ordered[row, count // 2]) / 2)


def _levels(spectra: Floats, own: Floats, high: NDArray[np.bool_]) -> Floats:
    """The plateaus of modes measured at `own`, (K,), from the records at which they are high, (K, T).

    With few samples, eigenvalues repel each other (equal ones are measured as far apart as 0.5 and 1.5), but their sum
    is unbiased. The plateau is therefore the mean of all eigenvalues within a factor of four of `own`.
    """
    rising = spectra[:, ::-1]
    if (np.diff(rising, axis=1) < 0).any():
        rising = np.sort(spectra, axis=1)
    sums = np.concatenate([np.zeros((len(spectra), 1)), np.cumsum(rising, axis=1)], axis=1)
    bounds = np.stack([np.nextafter(own / 4, np.inf), own * 4])
    ends = np.zeros((len(spectra), *bounds.shape), np.int64)
    for i in np.flatnonzero(high.any(axis=0)):
        ends[i] = np.searchsorted(rising[i], bounds)
    first, end = ends.transpose(1, 2, 0)  # each (K, T)
    none = end <= first  # then the mean of all, to keep it defined; never the median record
    first, end = np.where(none, 0, first), np.where(none, spectra.shape[1], end)
    record = np.arange(len(spectra))
    means = (sums[record, end] - sums[record, first]) / (end - first)
    return _medians(means, high)


def _lines(t: Floats, share: Floats, cross: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Zeros and slopes of lines through the log-odds of modes (K, T) before their first record above one half, (K,).

    Weighted least squares, for every first record at once by sums from the end. If the last record lies above the line,
    the first records are dropped. NaN where there is no rising line.
    """
    at, row = np.arange(len(t)), np.arange(len(share))
    chosen = _fitted_records(share, cross)
    p = np.clip(share, 1e-300, 0.98)
    y = np.log(p / (1 - p))
    weights = chosen * (1 - p) ** 2  # the noise of λ is relative, and the log-odds amplify it by 1/(1 − p)
    x = t - t[cross][:, None]
    kept, total, *sums = (
        _from_the_end(v) for v in (chosen, weights, weights * x, weights * y, weights * x * x, weights * x * y)
    )
    with np.errstate(invalid="ignore", divide="ignore"):  # after the last chosen record
        mean_x, mean_y, mean_xx, mean_xy = (v / total for v in sums)
        rates = (mean_xy - mean_x * mean_y) / (mean_xx - mean_x**2)
        zeros = t[cross][:, None] + mean_x - mean_y / rates
        last = at[-1] - np.argmax(chosen[:, ::-1], axis=1)
        above = y[row, last][:, None] - mean_y - rates * (x[row, last][:, None] - mean_x)
        stop = np.argmax(chosen & ((above <= BENT) | (kept <= FEW)), axis=1)
        first = np.maximum.accumulate(np.where(chosen & (rates > 0), at, -1), axis=1)[row, stop]
    found = (first >= 0) & (kept[:, 0] >= 2)
    zeros, rates = (np.where(found, v[row, first], np.nan) for v in (zeros, rates))
    # not a straight line: keep the zero between the two records around one half
    before, after = t[cross - 1], t[cross]
    bent = 2 * kept[row, stop] <= kept[:, 0]
    zeros = np.where(bent, np.clip(zeros, before, after), zeros)
    # a jump from one record to the next, so that the line is that of the noise before
    quiet = (share[row, cross - 1] <= LOW) & (_medians(share, at < cross[:, None]) <= 1 / RANGE)
    jumped = quiet & ~((before <= zeros) & (zeros <= after))
    jump = (y[row, cross] - y[row, cross - 1]) / (after - before)
    return np.where(jumped, before - y[row, cross - 1] / jump, zeros), np.where(jumped, jump, rates)


def _fitted_records(share: Floats, cross: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The records to which lines are fitted, (K, T)."""
    at, end = np.arange(share.shape[1]), cross[:, None]
    before = (share <= LOW) & (at < end - FEW)
    first = np.where(before.any(axis=1), share.shape[1] - np.argmax(before[:, ::-1], axis=1), 0)
    chosen = (at >= first[:, None]) & (at < end) & (share < HIGH) & (share > 0)
    few = chosen.sum(axis=1, keepdims=True) < 2
    return np.where(few, (at >= end - 1) & (at <= end), chosen)


def _from_the_end(values: NDArray[Any]) -> Floats:
    """Sums of every row from each record to the last."""
    return np.cumsum(values[:, ::-1], axis=1, dtype=np.float64)[:, ::-1]
