r"""Forecast steps: ask two experts how long a growing mode still needs, and trust each as far as this run bears it out.

The experts (`staircase.experts`) answer with the logarithm E of the time left: *past* with the time that earlier modes
took from the same share of the plateau, *own* with a law fitted to the mode's own records. Both are asked again about
the steps that the run has already taken. From its n errors an expert gets a bias b and a spread s, shrunk to what was
found in other runs (β and σ, worth n_b and n_s errors):

    b = (n_b β + Σ err)/(n_b + n),      s² = (n_s σ² + Σ(err − b)²)/(n_s + n),
    log D = Σ_e w_e (E_e + b_e),        w_e ∝ s_e⁻⁴,
    sd² = (w₁s₁)² + (w₂s₂)² + w₁w₂s₁s₂ + (δ/D)²:

errors of the two experts have correlation ½, and a step can be placed to δ only, half a rise time and half the spacing
of records (so D is replaced by (D² + δ²)^½). The forecasts made in this way of past steps, in turn, give a factor for
sd: the root mean square of error/sd, shrunk to 1. The interval is ±z sd around log D.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, number, times
from stairwise.staircase.experts import (
    MOMENTS,
    OF_C,
    OF_COVARIANCE,
    Law,
    Questions,
    Rises,
    asked_again,
    log_odds,
    own_expert,
    past_expert,
    past_rises,
)
from stairwise.staircase.growth import Rest, typical
from stairwise.staircase.notes import noted
from stairwise.staircase.steps import FEWEST, Steps, detect_steps, records

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]

BLUR = 0.5  # rise times, and spacings of records, to which a step can be placed
WORTH = 2.0  # the factor for sd starts as 1, worth so many past steps
HORIZON = 10.0  # no forecast further ahead than this multiple of the time so far
SOON = 0.5  # a step is soon if its interval ends within this multiple of the time so far
CHECKED, NEEDED = 5, 2  # past steps in `missed`, and the fewest for a sentence about them
COUNTS = ("no", "one", "two", "three", "four", "five")


class Trust(NamedTuple):
    """An expert before the first step: bias and spread at each of `MOMENTS`, and how many errors they are worth."""

    bias: tuple[float, float]
    bias_worth: float
    spread: tuple[float, float]
    spread_worth: float


PAST = Trust(bias=(0.5, 0.15), bias_worth=6, spread=(1.5, 0.4), spread_worth=1)
OWN = Trust(bias=(0.0, 0.0), bias_worth=3, spread=(1.28, 0.5), spread_worth=0.5)


@dataclass(frozen=True, eq=False)
class Forecast:
    """Expected steps, in order of mode.

    Attributes:
        modes: indices of the growing modes, from 0, (K,).
        times: expected times of their steps, (K,).
        low, high: ends of the interval that holds the step with probability `coverage`, (K,).
        rates: current slopes of the log-odds, 8γ in the linear model, (K,).
        odds: log-odds log(λ/(p − λ)) at the last record, below 0, (K,).
        level: p, the plateau of grown modes; of a covariance, which may drift, at the last record.
        now: time of the last record.
        since: time of the first record.
        done: steps that have been taken; of a covariance in `growth.relative`, with plateaus as at the last record.
        arriving: number of modes that are above half of the plateau but have not settled there.
        dimensions: d, also if fewer eigenvalues were recorded; those that were not are taken as not yet learned.
        coverage: probability of the intervals.
    """

    modes: NDArray[np.int64]
    times: Floats
    low: Floats
    high: Floats
    rates: Floats
    odds: Floats
    level: float
    now: float
    since: float
    done: Steps
    arriving: int
    dimensions: int
    coverage: float
    _records: tuple[Floats, Floats, Rest, float | None] = field(repr=False)

    @property
    def nearness(self) -> list[str]:
        """For every mode "next", "soon" or "far off".

        Next is the first that is expected. Soon are those whose interval ends within half the time that the run has
        lasted. All others are far off.
        """
        soon = self.high <= self.now + SOON * (self.now - self.since)
        words = ["soon" if one else "far off" for one in soon]
        if words:
            words[int(np.argmin(self.times))] = "next"
        return words

    @cached_property
    def missed(self) -> Floats:
        """Relative errors of forecasts of the last steps, at most five, in order of time; infinite if not foreseen.

        Each was forecast from the records up to the one at which the mode had reached a hundredth of its plateau, and
        from no others. The error is divided by the time that was left. Computed when asked for: it costs as much as
        five forecasts.
        """
        t, followed, rest, level = self._records
        rises = past_rises(t, followed, detect_steps(t, followed), self.modes[:0], self.level)
        asked, left = asked_again(t, rises, MOMENTS[-1])
        able = np.flatnonzero((left > 0) & (asked.ends >= FEWEST))[-CHECKED:]
        return np.array(
            [
                _miss(_forecast(t[:end], followed[:end], rest.where(slice(end)), level), mode, time)
                for end, mode, time in zip(asked.ends[able], rises.modes[able], rises.times[able], strict=True)
            ]
        )

    @property
    def typical_miss(self) -> float | None:
        """Median of `missed`; None if fewer than two steps could be checked."""
        return float(np.median(self.missed)) if len(self.missed) >= NEEDED else None

    @property
    def track_record(self) -> str:
        """How far off the last steps would have been forecast, as a sentence; empty if fewer than two were checked."""
        if self.typical_miss is None:
            return ""
        number = COUNTS[len(self.missed)]
        if np.isinf(self.typical_miss):
            return noted("not foreseen", number=number)
        return noted("forecast", number=number, miss=100 * self.typical_miss)

    def eigenvalues(self, t: ArrayLike) -> Floats:
        """Expected eigenvalues of the growing modes at times t, (…, K).

        Logistic curves: they pass through the last record, and half of the plateau at the expected step.
        """
        done = (times(t, "t")[..., None] - self.now) / (self.times - self.now)
        return self.level / (1 + np.exp(np.clip(self.odds * (done - 1), -700, 700)))

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


def forecast_steps(
    t: ArrayLike,
    lam: ArrayLike,
    coverage: float = 0.8,
    level: float | None = 1.0,
    dimensions: int | None = None,
    total: ArrayLike | None = None,
) -> Forecast:
    """Predict the steps of modes that are growing at the last record.

    Arguments:
        t: times of the records, increasing, (T,).
        lam: eigenvalues, descending at every time, (T, d).
        coverage: probability of the intervals.
        level: expected plateau before the first step: 1 for C in the linear theory. None: unknown, as for covariances;
            then every record is measured in units of its typical variance (`growth.relative`), so that the plateau is
            near 1 even if the scale of z drifts.
        dimensions, total: d, and the sum of all eigenvalues at every record, (T,), if lam holds the leading ones only.

    Example:
        >>> t = np.linspace(0, 1.5, 100)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [2.0, 1.0, 0.9])))
        >>> ahead = forecast_steps(t, lam)
        >>> ahead.modes, ahead.times.round(1)  # the first mode has taken its step
        (array([1, 2]), array([1.7, 1.9]))
    """
    moments, spectra = records(t, lam)
    if not 0 < (coverage := number(coverage, "coverage")) < 1:
        raise InputError("coverage", "must lie strictly between 0 and 1", coverage)
    level = None if level is None else number(level, "level", least=1e-100, most=1e100)
    return _forecast(moments, spectra, Rest.of(spectra, total, dimensions), level, coverage)


def _forecast(moments: Floats, spectra: Floats, rest: Rest, level: float | None, coverage: float = 0.8) -> Forecast:
    """The forecast from records that have been checked."""
    units = np.ones((len(moments), 1)) if level is not None else typical(spectra, rest)
    followed, unit = spectra / units, float(units[-1, 0])
    done = detect_steps(moments, followed)
    plateau = float(np.median(done.levels)) if len(done) else 1.0 if level is None else level
    left = np.setdiff1d(np.arange(spectra.shape[1]), done.modes)
    growing, arriving = left[followed[-1, left] < plateau / 2], left[followed[-1, left] >= plateau / 2]
    rises = past_rises(moments, followed, done, arriving, plateau)
    now = Questions(followed[:, growing].T / plateau, np.full(len(growing), len(moments)))
    law = OF_COVARIANCE if level is None else OF_C
    outlook = _outlook(moments, rises, now, np.median(done.rise_times) if len(done) else np.inf, law)
    end, lasted = float(moments[-1]), float(moments[-1] - moments[0])
    near = outlook.logs < np.log(HORIZON * lasted)  # not where it is NaN
    outlook = Outlook(*(v[near] for v in outlook))
    reach = NormalDist().inv_cdf((1 + coverage) / 2) * outlook.sd
    ahead = end + np.exp([outlook.logs, outlook.logs - reach, outlook.logs + reach])
    # eigenvalues are sorted, so a mode takes its step no earlier than the one before
    expected, low, high = np.maximum.accumulate(ahead, axis=1)
    return Forecast(
        growing[near],
        expected,
        low,
        high,
        outlook.rates,
        outlook.odds,
        plateau * unit,
        end,
        float(moments[0]),
        replace(done, levels=done.levels * unit),
        len(arriving),
        spectra.shape[1] + rest.number,
        coverage,
        (moments, followed, Rest(rest.sum / units[:, 0], rest.number), level),
    )


def _miss(ahead: Forecast, mode: int, time: float) -> float:
    """Error of the forecast of one mode relative to the time that was left."""
    which = np.flatnonzero(ahead.modes == mode)
    return float(abs(ahead.times[which[0]] - time) / (time - ahead.now)) if len(which) else np.inf


class Outlook(NamedTuple):
    """Answers to questions: log of the time left, its standard deviation, current rate and log-odds, each (Q,)."""

    logs: Floats
    sd: Floats
    rates: Floats
    odds: Floats


def _outlook(t: Floats, rises: Rises, now: Questions, rise_time: float | np.floating, law: Law) -> Outlook:
    """The outlook of growing modes; NaN if there is none. `rise_time`: of the steps that were taken."""
    again = [asked_again(t, rises, moment) for moment in MOMENTS]
    asked = Questions.join([now, *(questions for questions, _ in again)])
    true = np.log([left for _, left in again])  # (moments, n)
    when = t[asked.ends - 1]
    own, rates = own_expert(t, rises, asked, law)
    odds = asked.odds(t, rates)
    past = past_expert(t, rises, when, odds)
    judge = Judge(rises.times <= when[:, None], _between_moments(odds), true)
    logs, spread = _combined([judge.corrected(past, PAST), judge.corrected(own, OWN)])
    logs = np.where(np.isfinite(own), logs, np.nan)  # a mode that does not grow has no outlook
    blur = BLUR * np.hypot(when - t[asked.ends - 2], np.minimum(1 / rates, rise_time))
    logs = np.log(np.hypot(np.exp(logs), blur))
    sd = np.hypot(spread, blur * np.exp(-logs))
    sd *= judge.factor(logs, sd)
    first = len(now.ends)
    return Outlook(logs[:first], sd[:first], rates[:first], odds[:first])


class Judge(NamedTuple):
    """Judges experts by their errors on past steps.

    Attributes:
        known: which of n past steps had been taken when each of Q questions is asked, (Q, n).
        between: weights of the moments for every question, (Q, moments).
        true: log of the time that was left, (moments, n); NaN if not asked.
    """

    known: Bools
    between: Floats
    true: Floats

    def past(self, answers: Floats) -> Floats:
        """Those of the answers (Q,) that concern past steps, (moments, n); they come last."""
        return answers[len(answers) - self.true.size :].reshape(self.true.shape)

    def corrected(self, logs: Floats, trust: Trust) -> tuple[Floats, Floats]:
        """The expert's answers less its bias, and its spread, (Q,)."""
        use, errors = self._errors(logs)
        count = use.sum(axis=2)
        bias = (trust.bias_worth * np.array(trust.bias) + (use * errors).sum(axis=2)) / (trust.bias_worth + count)
        squares = (use * (errors - bias[..., None]) ** 2).sum(axis=2)
        spread2 = (trust.spread_worth * np.square(trust.spread) + squares) / (trust.spread_worth + count)
        return logs + (self.between * bias).sum(axis=1), np.sqrt((self.between * spread2).sum(axis=1))

    def factor(self, logs: Floats, sd: Floats) -> Floats:
        """By how much errors of forecasts exceeded their standard deviations, (Q,)."""
        use, errors = self._errors(logs)
        squares = (use * np.nan_to_num(errors / self.past(sd)) ** 2).sum(axis=2)
        return np.sqrt((self.between * (WORTH + squares) / (WORTH + use.sum(axis=2))).sum(axis=1))

    def _errors(self, logs: Floats) -> tuple[Bools, Floats]:
        """Errors at past steps, 0 where there is no answer, (moments, n), and which count, (Q, moments, n)."""
        errors = self.true - self.past(logs)
        return self.known[:, None] & np.isfinite(errors), np.nan_to_num(errors)


def _between_moments(odds: Floats) -> Floats:
    """Weights with which log-odds (Q,) are interpolated between the moments, (Q, moments)."""
    return np.array([np.interp(odds, log_odds(MOMENTS), one) for one in np.eye(len(MOMENTS))]).T


def _combined(answers: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Combine two experts' answers and spreads, weighted by s⁻⁴; errors have correlation ½."""
    logs, spreads = np.array(answers).transpose(1, 0, 2)
    weights = np.where(np.isfinite(logs), spreads**-4.0, 0.0)
    weights /= np.maximum(weights.sum(axis=0), 1e-300)
    shares = weights * spreads
    mean = np.where(weights.any(axis=0), (weights * np.nan_to_num(logs)).sum(axis=0), np.nan)
    return mean, np.sqrt((shares**2).sum(axis=0) + shares.prod(axis=0))
