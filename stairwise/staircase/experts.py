r"""Two experts on the time that a growing mode still needs to its step.

Write y = log(λ/(p − λ)) for the log-odds of a mode, p for the plateau; the step is at y = 0.

- *past*: all modes of a run but the first few rise alike. The time D that is left is the time that the modes before it
  took from the same y to their steps: log D is the mean of log D_i(y), the latest first, with weights 0.3^i.
- *own*: the law y' = r e^{κy} is fitted to the mode's own records. κ = 0 is the linear theory, y' = 8γ
  (`theory.modes`); in deep networks features align while a mode grows, so that its rate rises, κ > 0. For any κ,
  e^{−κy} is a straight line in t. κ is estimated from the rises that have ended and from the mode itself.

How good they are is seen from the steps that the run has already taken: each is forecast again from the records up to
the one at which it reached 1e-4, and 1e-2, of its plateau (`MOMENTS`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.steps import BLOCK, Steps, running_median

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]

DECAY = 0.3  # weight of a past rise relative to the next later one
MOST = 12  # past rises in use, the latest
MOMENTS = np.array([1e-4, 1e-2])  # shares of the plateau at which past steps are forecast again
FEWEST = 6  # the law is fitted to at least this many records,
ABOVE = 10.0  # or at up to this multiple, if a mode began above
HIGHEST = -0.05  # no mode that is asked about is above these log-odds
BINS = 32  # averaged in groups to at most this many points
KAPPAS = np.linspace(-0.3, 0.9, 21)
SCATTER = 0.1  # of records around the law, in y: worth one record
RECENT = 6  # rises from which κ is estimated
SIGNIFICANT = 3.0  # a mode grows if its slope exceeds this many standard errors


class Law(NamedTuple):
    """What is known of the law y' = r e^{κy} before the second step.

    Attributes:
        folds: it is fitted to the most recent growth by a factor of e^folds.
        kappa, width: mean and standard deviation of κ.
    """

    folds: float
    kappa: float
    width: float


OF_C = Law(folds=5.0, kappa=0.0, width=0.07)
OF_COVARIANCE = Law(folds=3.0, kappa=0.15, width=0.2)  # relative to the typical variance, modes start to rise abruptly


@dataclass(frozen=True, eq=False)
class Rises:
    """Modes that are past half of their plateau, in order of time, the latest `MOST`.

    Attributes:
        modes: indices, (n,).
        times: when they crossed half, (n,).
        share: λ/p, (n, T).
        odds: y from the running median of the records, (n, T).
    """

    modes: Indices
    times: Floats
    share: Floats
    odds: Floats


@dataclass(frozen=True, eq=False)
class Questions:
    """Modes whose step is to be forecast from their first records.

    Attributes:
        share: λ/p, (Q, T).
        ends: number of known records, (Q,).
    """

    share: Floats
    ends: Indices

    @staticmethod
    def join(parts: "Sequence[Questions]") -> "Questions":
        """One after another."""
        return Questions(*(np.concatenate([getattr(part, key) for part in parts]) for key in ("share", "ends")))

    def odds(self, t: Floats, rates: Floats) -> Floats:
        """y at the last known record, (Q,): the median of the last three records, each carried on at the given rate."""
        row, last = np.arange(len(self.ends)), self.ends - 1
        steady = np.nan_to_num(rates)
        carried = [log_odds(self.share[row, last - k]) + steady * (t[last] - t[last - k]) for k in range(3)]
        return np.minimum(np.median(carried, axis=0), HIGHEST)


def log_odds(share: Floats) -> Floats:
    """y = log(share/(1 − share)), for shares clipped to (0, 1)."""
    inside = np.clip(share, 1e-300, 1 - 1e-9)
    return np.asarray(np.log(inside / (1 - inside)))


def past_rises(t: Floats, spectra: Floats, done: Steps, arriving: Indices, level: float) -> Rises:
    """The rises behind the steps that were taken, and those of `arriving` modes, above half but not settled."""
    smooth = running_median(spectra[:, arriving].T / level)
    low = smooth < 0.5
    crossed = np.flatnonzero(low.any(axis=1))
    last = len(t) - 1 - np.argmax(low[crossed][:, ::-1], axis=1)
    next_one = np.minimum(last + 1, len(t) - 1)
    before, after = (log_odds(smooth[crossed, at]) for at in (last, next_one))
    part = -before / np.maximum(after - before, 1e-9)
    halves = t[last] + np.clip(part, 0, 1) * (t[next_one] - t[last])
    times, modes = np.concatenate([done.times, halves]), np.concatenate([done.modes, arriving[crossed]])
    levels = np.concatenate([done.levels, np.full(len(crossed), level)])
    latest = np.argsort(times, kind="stable")[-MOST:]
    share = spectra[:, modes[latest]].T / levels[latest, None]
    return Rises(modes[latest], times[latest], share, log_odds(running_median(share)))


def asked_again(t: Floats, rises: Rises, moment: float) -> tuple[Questions, Floats]:
    """Past steps as questions, from the records until they reached a share of their plateau; the true times left, (n,).

    NaN where there is no such record, or the step came within one record.
    """
    before = np.arange(len(t)) < np.searchsorted(t, rises.times)[:, None]
    low = before & (rises.share < moment)
    ends = np.where(low.any(axis=1), len(t) - np.argmax(low[:, ::-1], axis=1) + 1, FEWEST)
    ends = np.minimum(ends, len(t))
    row = np.arange(len(ends))
    left = rises.times - t[ends - 1]
    # a mode may have begun somewhat above
    valid = (left > 0) & (low.any(axis=1) | (rises.share[row, ends - 1] < ABOVE * moment))
    return Questions(rises.share, ends), np.where(valid, left, np.nan)


def past_expert(t: Floats, rises: Rises, now: Floats, asked: Floats) -> Floats:
    """log D of modes at log-odds `asked` at times `now`, (Q,), from the rises that had passed half by then.

    NaN if none of them had begun as low.
    """
    lengths = np.full((len(rises.times), len(asked)), np.nan)
    for i, (time, odds) in enumerate(zip(rises.times, rises.odds, strict=True)):
        end = int(np.searchsorted(t, time))
        # the last passage through y: from the end, the lowest value so far
        lowest = np.minimum(np.minimum.accumulate(odds[:end][::-1])[::-1], 0.0)
        lengths[i] = time - np.interp(asked, np.append(lowest, 0.0), np.append(t[:end], time), left=np.nan)
    known = rises.times[:, None] <= now
    usable = known & (np.nan_to_num(lengths) > 0)
    rank = np.cumsum(usable[::-1], axis=0)[::-1]
    weights = np.where(usable, DECAY**rank, 0.0)
    total = weights.sum(axis=0)
    mean = (weights * np.log(np.where(usable, lengths, 1.0))).sum(axis=0) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, mean, np.nan)


def own_expert(t: Floats, rises: Rises, asked: Questions, law: Law) -> tuple[Floats, Floats]:
    """log D of every question from the law fitted to the mode itself, and its rate, (Q,); NaN if it does not grow."""
    ends = np.searchsorted(t, rises.times)
    wide = np.tile([0.0, 0.5], (len(ends), 1))
    kappas = _fit(t, Questions(rises.share, ends), wide, law.folds)[2]
    priors = np.array([_acceleration(kappas[:known], law) for known in range(len(kappas) + 1)])
    return _fit(t, asked, priors[np.searchsorted(rises.times, t[asked.ends - 1], side="right")], law.folds)[:2]


def _acceleration(kappas: Floats, law: Law) -> tuple[float, float]:
    """Median and standard deviation of κ over the latest rises."""
    recent = kappas[np.isfinite(kappas)][-RECENT:]
    if len(recent) < 2:
        return law.kappa, law.width
    return float(np.median(recent)), float(np.clip(recent.std(), 0.03, 0.3))


def _fit(t: Floats, asked: Questions, priors: Floats, folds: float) -> tuple[Floats, Floats, Floats]:
    """Fit the law: log of the time left, current rate and κ, each (Q,); NaN where the mode does not grow."""
    out = np.full((3, len(asked.ends)), np.nan)
    chosen = _window(asked.share, asked.ends, folds)
    able = np.flatnonzero(chosen.sum(axis=1) >= FEWEST)
    if len(able) == 0:
        return out[0], out[1], out[2]
    x, y, size = _binned(t, asked.share[able], chosen[able])
    blocks = [slice(i, i + BLOCK) for i in range(0, len(able), BLOCK)]
    lines = [_lines(x[b], y[b], size[b]) for b in blocks]
    squares, at, rates = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    scatter2 = (squares.min(axis=1) + SCATTER**2) / ((size > 0).sum(axis=1) - 2)
    grows = np.isfinite(scatter2) & _grows(x, y, size, scatter2)
    able, squares, at, rates, scatter2 = (v[grows] for v in (able, squares, at, rates, scatter2))
    centre, width = priors[able].T[:, :, None]
    cost = squares / scatter2[:, None] + ((KAPPAS - centre) / width) ** 2
    weights = np.exp(-0.5 * (cost - cost.min(axis=1, keepdims=True)))
    weights /= weights.sum(axis=1, keepdims=True)
    now = t[asked.ends[able] - 1]
    left = np.maximum(at - now[:, None], 1e-3 * (now - t[0])[:, None] / asked.ends[able, None])
    out[:, able] = [(weights * v).sum(axis=1) for v in (np.log(left), rates, np.broadcast_to(KAPPAS, left.shape))]
    return out[0], out[1], out[2]


def _window(share: Floats, ends: Indices, folds: float) -> Bools:
    """The records to which the law is fitted, (Q, T): the latest growth by e^folds, below half of the plateau."""
    at, row, end = np.arange(share.shape[1]), np.arange(len(ends)), ends[:, None]
    recent = np.median([share[row, np.maximum(ends - back, 0)] for back in (1, 2, 3)], axis=0)
    before = (share <= recent[:, None] * np.exp(-folds)) & (at < end - FEWEST)
    first = np.where(before.any(axis=1), share.shape[1] - np.argmax(before[:, ::-1], axis=1), 0)
    return (at >= first[:, None]) & (at < end) & (share > 0) & (share < 0.5) & (recent[:, None] > 0)


def _binned(t: Floats, share: Floats, chosen: Bools) -> tuple[Floats, Floats, Floats]:
    """Mean t and mean y of groups of chosen records, and the sizes of the groups, (Q, BINS); the latest are last."""
    count = chosen.sum(axis=1, keepdims=True)
    back = count - np.cumsum(chosen, axis=1)  # 0 for the last chosen record
    group = BINS - 1 - np.where(count > BINS, back * BINS // count, back)
    place = (np.arange(len(share))[:, None] * BINS + group)[chosen]
    moments = np.broadcast_to(t, share.shape)[chosen]
    size, x, y = (
        np.bincount(place, v, len(share) * BINS).reshape(-1, BINS)
        for v in (np.ones(len(place)), moments, log_odds(share[chosen]))
    )
    full = np.maximum(size, 1.0)
    return x / full, y / full, np.asarray(size, np.float64)


def _grows(x: Floats, y: Floats, size: Floats, scatter2: Floats) -> Bools:
    mean_x = (size * x).sum(axis=1, keepdims=True) / size.sum(axis=1, keepdims=True)
    spread = (size * (x - mean_x) ** 2).sum(axis=1)
    slope = (size * (x - mean_x) * y).sum(axis=1) / spread
    return np.asarray(slope > SIGNIFICANT * np.sqrt(scatter2 / spread))


def _lines(x: Floats, y: Floats, size: Floats) -> tuple[Floats, Floats, Floats]:
    """For every mode and κ: sum of squares in y, time at which y = 0, rate at the last record, (Q, κ).

    u = (e^{−κ(y − y_last)} − 1)/κ (which is y_last − y for κ = 0) is a straight line of slope −rate in t.
    """
    k = KAPPAS[:, None]
    straight = np.abs(k) < 1e-9
    safe = np.where(straight, 1.0, k)
    last, size, x = y[:, -1:, None], size[:, None], x[:, None]
    back = np.where(size > 0, y[:, None] - last, 0.0)
    u = np.where(straight, -back, np.expm1(-safe * back) / safe)
    weights = size * np.exp(np.minimum(2 * k * back, 600.0))  # size / (1 + κu)², for equal noise in y
    total = weights.sum(axis=2)
    mean_x, mean_u = (np.einsum("qkb,qkb->qk", weights, np.broadcast_to(v, u.shape)) / total for v in (x, u))
    from_mean = np.where(size > 0, x - mean_x[..., None], 0.0)
    weighted = weights * from_mean
    slope = np.einsum("qkb,qkb->qk", weighted, u) / np.einsum("qkb,qkb->qk", weighted, from_mean)
    line = mean_u[..., None] + slope[..., None] * from_mean
    inner = 1 + k * line
    possible = (slope < 0) & (inner.min(axis=2) > 0)
    slope = np.where(possible, slope, -1.0)
    off = np.where(straight, line, np.log(np.where(inner > 0, inner, 1.0)) / safe) + back
    goal = np.where(straight, last, np.expm1(safe * last) / safe)[..., 0]  # u where y = 0
    at = mean_x + (goal - mean_u) / slope
    rates = -slope / np.where(possible, inner[..., -1], 1.0)
    squares = np.where(possible, np.einsum("qkb,qkb,qkb->qk", np.broadcast_to(size, off.shape), off, off), np.inf)
    return squares, at, rates
