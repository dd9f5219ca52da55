r"""Forecast steps: fit the logistic law, with the acceleration seen in networks, to modes that are still growing.

In the linear model the log-odds y = log(λ/(p − λ)) of a growing mode are a straight line, y' = 8γ (`theory.modes`; p is
the plateau of grown modes). In deep networks features align while a mode grows, so its rate rises. We fit
y' = r e^{κ y}: κ = 0 is the linear law, and for any κ, e^{−κy} is a straight line in t. κ is estimated from the run's
earlier steps and from the mode's own records, and the interval averages over its remaining uncertainty. The interval is
then widened by the law's errors on past steps: each is forecast from the time when it reached a hundredth of its
plateau, and compared with what happened.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, number, times
from stairwise.staircase.steps import Steps, detect_steps, records

Floats = NDArray[np.float64]

FOLDS = 5.0  # the law is fitted to the most recent growth by a factor of e^5,
FEWEST = 6  # and to at least this many records
KAPPAS = np.linspace(-0.3, 0.9, 61)
PRIOR = 0.07  # standard deviation of κ around 0 before the first step
LEVEL_NOISE = 0.15  # uncertainty of log p, and bias of spectra from few samples
SIGNIFICANT = 3.0  # a mode grows if its slope exceeds this many standard errors
HORIZON = 10.0  # no forecast further ahead than this multiple of the time so far
EARLY = 0.01  # share of the plateau at which past steps are forecast again, to measure the error
NEEDED, RECENT = 2, 10  # least and greatest number of past steps used for that
NORMAL = np.array([NormalDist().inv_cdf((k + 0.5) / 15) for k in range(15)])  # importing scipy.stats takes 0.5 s


@dataclass(frozen=True, eq=False)
class Forecast:
    """Expected steps, in order of mode.

    Attributes:
        modes: indices of the growing modes, from 0, (K,).
        times: expected times of their steps, (K,).
        low, high: ends of the interval that holds the step with probability `coverage`, (K,).
        rates: current slopes of the log-odds, 8γ in the linear model, (K,).
        level: p, the plateau of grown modes.
        now: time of the last record.
        done: steps that have been taken.
        arriving: number of modes that are above half of the plateau but have not settled there.
        dimensions: d.
    """

    modes: NDArray[np.int64]
    times: Floats
    low: Floats
    high: Floats
    rates: Floats
    level: float
    now: float
    done: Steps
    arriving: int
    dimensions: int
    coverage: float

    def eigenvalues(self, t: ArrayLike) -> Floats:
        """Expected eigenvalues of the growing modes at times t, (…, K): logistic curves around their steps."""
        moments = times(t, "t")[..., None]
        return self.level / (1 + np.exp(-np.clip(self.rates * (moments - self.times), -700, 700)))

    def loss(self, t: ArrayLike) -> Floats:
        """Expected loss at times t in units of one step, Σ (1 − λ/p)²: the dimensions not yet learned, (…)."""
        ahead = ((1 - self.eigenvalues(t) / self.level) ** 2).sum(axis=-1)
        return np.asarray(ahead + self.dimensions - len(self.done) - self.arriving - len(self.modes))

    def when(self, share: float = 1.0) -> float:
        """Time at which this share of the d dimensions will be learned; infinite if too few are growing."""
        if not 0 < number(share, "share") <= 1:
            raise InputError("share", "must be above 0 and at most 1", share)
        needed = int(np.ceil(share * self.dimensions))
        all_times = np.sort(np.concatenate([self.done.times, np.full(self.arriving, self.now), self.times]))
        return float(all_times[needed - 1]) if needed <= len(all_times) else np.inf


def forecast_steps(t: ArrayLike, lam: ArrayLike, coverage: float = 0.8, level: float | None = 1.0) -> Forecast:
    """Predict the steps of modes that are growing at the last record.

    Arguments:
        t: times of the records, increasing, (T,).
        lam: eigenvalues, descending at every time, (T, d).
        coverage: probability of the intervals.
        level: expected plateau before the first step: 1 for C in the linear theory. None: unknown, as for covariances;
            then there is no forecast before the first step.

    Example:
        >>> t = np.linspace(0, 1.5, 100)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [2.0, 1.0, 0.9])))
        >>> ahead = forecast_steps(t, lam)
        >>> ahead.modes, ahead.times.round(1)  # the first mode has taken its step
        (array([1, 2]), array([1.7, 1.9]))
    """
    moments, spectra = records(t, lam)
    if not 0 < number(coverage, "coverage") < 1:
        raise InputError("coverage", "must lie strictly between 0 and 1", coverage)
    done = detect_steps(moments, spectra)
    if len(done):
        level = float(np.median(done.levels))
    elif level is None:
        no, d = np.zeros(0), spectra.shape[1]
        return Forecast(np.zeros(0, np.int64), no, no, no, no, np.nan, float(moments[-1]), done, 0, d, coverage)
    prior = _acceleration(moments, spectra, done)
    left = [j for j in range(spectra.shape[1]) if j not in done.modes]
    low = [j for j in left if spectra[-1, j] < level / 2]
    fits = [(j, _fit(moments, spectra[:, j] / level, len(moments), prior)) for j in low]
    rows = [(j, *fit.outlook(moments[-1], coverage)) for j, fit in fits if fit is not None]
    end = moments[-1] + HORIZON * (moments[-1] - moments[0])
    columns = np.array([row for row in rows if row[1] < end], dtype=np.float64).reshape(-1, 5)
    missed = _typical_error(moments, spectra, done, prior, coverage)
    ahead = columns[:, 1] - moments[-1]
    columns[:, 2] = np.minimum(columns[:, 2], moments[-1] + ahead * np.exp(-missed))
    columns[:, 3] = np.maximum(columns[:, 3], moments[-1] + ahead * np.exp(missed))
    # eigenvalues are sorted, so a mode takes its step no later than the next mode
    columns[:, 1:4] = np.minimum.accumulate(columns[::-1, 1:4], axis=0)[::-1]
    return Forecast(
        columns[:, 0].astype(np.int64),
        columns[:, 1],
        columns[:, 2],
        columns[:, 3],
        columns[:, 4],
        level,
        float(moments[-1]),
        done,
        len(left) - len(low),
        spectra.shape[1],
        coverage,
    )


@dataclass(frozen=True, eq=False)
class _Fit:
    """For every κ: its weight, the time of the step, the standard error of that time, and the current rate."""

    weights: Floats
    times: Floats
    errors: Floats
    rates: Floats

    @property
    def kappa(self) -> float:
        return float((self.weights * KAPPAS).sum())

    def outlook(self, now: float, coverage: float) -> tuple[float, float, float, float]:
        """Median, lower and upper end of the time of the step, and the current rate."""
        likely = self.weights > 1e-6
        draws = (self.times[likely, None] + self.errors[likely, None] * NORMAL).ravel()
        order = np.argsort(draws)
        share = np.cumsum(np.repeat(self.weights[likely], len(NORMAL))[order]) / len(NORMAL)
        low, middle, high = np.interp([(1 - coverage) / 2, 0.5, (1 + coverage) / 2], share, draws[order])
        return max(middle, now), max(low, now), max(high, now), float((self.weights * self.rates).sum())


def _acceleration(t: Floats, spectra: Floats, done: Steps) -> tuple[float, float]:
    """Median and standard deviation of κ over the steps that have been taken."""
    kappas = []
    for time, mode, level in zip(done.times, done.modes, done.levels, strict=True):
        fit = _fit(t, spectra[:, mode] / level, int(np.searchsorted(t, time)), (0.0, 0.5))
        if fit is not None:
            kappas.append(fit.kappa)
    if len(kappas) < 2:
        return 0.0, PRIOR
    recent = np.array(kappas[-6:])
    return float(np.median(recent)), float(np.clip(recent.std(), 0.03, 0.3))


def _typical_error(t: Floats, spectra: Floats, done: Steps, prior: tuple[float, float], coverage: float) -> float:
    """The `coverage` quantile of |log(true / forecast remaining time)| over the run's past steps; 0 if too few."""
    missed = []
    for time, mode, level in zip(done.times, done.modes, done.levels, strict=True):
        low = np.flatnonzero((spectra[:, mode] < EARLY * level) & (t < time))
        end = int(low[-1]) + 2 if len(low) else len(t)  # including the first record above
        if end >= len(t) or t[end - 1] >= time:
            continue
        fit = _fit(t, spectra[:, mode] / level, end, prior)
        if fit is not None:
            left = time - t[end - 1]
            forecast = fit.outlook(t[end - 1], coverage)[0] - t[end - 1]
            missed.append(abs(np.log(left / max(forecast, 1e-3 * left))))
    recent = missed[-RECENT:]
    if len(recent) < NEEDED:
        return 0.0
    return float(np.quantile(recent, min(1.0, coverage * (len(recent) + 1) / len(recent))))


def _fit(t: Floats, share: Floats, end: int, prior: tuple[float, float]) -> _Fit | None:
    """Fit the law to the records of one mode before record `end`; None if it does not grow."""
    recent = np.median(share[max(0, end - 3) : end]) if end else 0.0
    if recent <= 0:
        return None
    first = max(0, end - FEWEST)
    while first > 0 and share[first - 1] > recent * np.exp(-FOLDS):
        first -= 1
    chosen = np.arange(first, end)
    chosen = chosen[(share[chosen] > 0) & (share[chosen] < 0.5)]
    if len(chosen) < FEWEST:
        return None
    x, y = t[chosen], np.log(share[chosen] / (1 - share[chosen]))
    squares, at, errors, rates = _lines(x, y)
    scatter2 = squares.min() / (len(x) - 3)
    if not np.isfinite(scatter2) or not _grows(x, y, scatter2):
        return None
    # data that follow the law exactly have no scatter
    cost = squares / max(scatter2, 1e-12) + ((KAPPAS - prior[0]) / prior[1]) ** 2
    weights = np.exp(-0.5 * (cost - cost.min()))
    weights /= weights.sum()
    return _Fit(weights, at, np.sqrt(scatter2 * errors**2 + (LEVEL_NOISE / rates) ** 2), rates)


def _grows(x: Floats, y: Floats, scatter2: float) -> bool:
    spread = ((x - x.mean()) ** 2).sum()
    slope = ((x - x.mean()) * y).sum() / spread
    return bool(slope > SIGNIFICANT * np.sqrt(scatter2 / spread))


def _lines(x: Floats, y: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """For every κ: sum of squares in y, time at which y = 0, its error per unit of scatter, rate at the last record.

    u = (e^{−κ(y − y_last)} − 1)/κ (which is y_last − y for κ = 0) is a straight line of slope −rate in t.
    """
    k = KAPPAS[:, None]
    straight = np.abs(k) < 1e-9
    safe = np.where(straight, 1.0, k)
    u = np.where(straight, y[-1] - y, np.expm1(-safe * (y - y[-1])) / safe)
    weights = 1 / (1 + k * u) ** 2  # for equal noise in y
    total = weights.sum(axis=1, keepdims=True)
    mean_x, mean_u = ((weights * v).sum(axis=1, keepdims=True) / total for v in (x, u))
    spread = (weights * (x - mean_x) ** 2).sum(axis=1, keepdims=True)
    slope = (weights * (x - mean_x) * (u - mean_u)).sum(axis=1, keepdims=True) / spread
    line = mean_u + slope * (x - mean_x)
    inner = 1 + k * line
    possible = (slope < 0) & (inner.min(axis=1, keepdims=True) > 0)
    slope = np.where(possible, slope, -1.0)
    fitted = y[-1] - np.where(straight, line, np.log(np.where(inner > 0, inner, 1.0)) / safe)
    goal = np.where(straight, y[-1], np.expm1(safe * y[-1]) / safe)  # u where y = 0
    at = mean_x + (goal - mean_u) / slope
    errors = np.sqrt(1 / total + (at - mean_x) ** 2 / spread) / -slope
    rates = -slope / np.where(possible, inner[:, -1:], 1.0)
    squares = np.where(possible[:, 0], ((fitted - y) ** 2).sum(axis=1), np.inf)
    return squares, at[:, 0], errors[:, 0], rates[:, 0]
