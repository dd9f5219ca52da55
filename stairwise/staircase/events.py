r"""Does something move at given times? A score against the same times shifted, which is what chance would give.

Times are placed among the records, and all of them are shifted together, around the end of the run, by every number of
records in turn. A quantity that moves at the times scores higher unshifted; z counts standard deviations of the shifted
scores.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, matrix, vector
from stairwise.staircase.steps import records

Floats = NDArray[np.float64]
NEAR = 1  # records around a time that count as at this time
LOCAL = 10  # records to each side whose median is the usual rate


@dataclass(frozen=True)
class Events:
    """A score at the times, and at shifted times.

    Attributes:
        score: mean over the times.
        shifted: mean over all shifts.
        z: how many standard deviations of the shifted scores the score lies above their mean.
        lag: shift with the highest score, in records; positive: it moves after the times.
        count: number of times.
    """

    score: float
    shifted: float
    z: float
    lag: int
    count: int


def score_events(rates: ArrayLike, places: ArrayLike, near: int = NEAR) -> Events:
    """Score rates at places against all shifts.

    Arguments:
        rates: between consecutive records, (R,), or (K, R) with one row per place.
        places: index of the rate at each time, (K,); need not be whole.
        near: the largest rate within this many records counts; shifts by no more than twice as many are left out.

    >>> rates = np.ones(60)
    >>> rates[[10, 33, 41]] = 5.0
    >>> found = score_events(rates, [10, 33, 41])
    >>> found.score, found.z > 4, score_events(rates, [5, 20, 50]).z < 2
    (5.0, True, True)
    """
    at = np.round(vector(places, "places")).astype(int)
    values = np.atleast_2d(np.asarray(rates, dtype=np.float64))
    R = values.shape[1]
    if len(values) not in (1, len(at)) or not len(at):
        raise InputError("rates", f"must have 1 or {len(at)} rows, one per place", len(values))
    if 8 * (2 * near + 1) > R:
        raise InputError("rates", f"must span at least {8 * (2 * near + 1)} records", R, "record more often")
    around = np.stack([np.roll(values, k, axis=1) for k in range(-near, near + 1)]).max(axis=0)
    rows = np.arange(len(at)) if len(values) > 1 else np.zeros(len(at), int)
    scores = np.array([around[rows, (at + shift) % R].mean() for shift in range(R)])
    others = scores[2 * near + 1 : R - 2 * near]
    spread = max(float(others.std()), 1e-12 * max(1.0, abs(float(scores[0]))))
    lag = (int(np.argmax(scores)) + R // 2) % R - R // 2
    return Events(float(scores[0]), float(others.mean()), float((scores[0] - others.mean()) / spread), lag, len(at))


def places_of(t: ArrayLike, times: ArrayLike) -> Floats:
    """Index of the interval between consecutive records t in which each time lies."""
    centres = np.convolve(vector(t, "t"), [0.5, 0.5], "valid")
    return np.asarray(np.interp(vector(times, "times"), centres, np.arange(len(centres))))


def spectrum_events(t: ArrayLike, lam: ArrayLike, times: ArrayLike) -> Events:
    """Whether the shape of a spectrum moves at the times: its rate |Δp|, p = λ/Σλ, over the usual rate nearby.

    The total variance of hidden representations drifts, because the batch norm of the head makes their scale free, so
    that it is left out.
    """
    moments, spectra = records(t, lam)
    p = np.maximum(spectra, 0.0)
    p = p / np.maximum(p.sum(axis=1, keepdims=True), 1e-300)
    rates = np.abs(np.diff(p, axis=0)).sum(axis=1)
    usual = [np.median(rates[max(0, i - LOCAL) : i + LOCAL + 1]) for i in range(len(rates))]
    return score_events(rates / np.maximum(usual, 1e-300), places_of(moments, times))


def share_events(t: ArrayLike, shares: ArrayLike, times: ArrayLike) -> Events:
    """Whether each share (T, K) rises at its own time: the part of all its rises that is near, times the records.

    >>> t = np.linspace(0, 10, 101)
    >>> shares = 1 / (1 + np.exp(-20 * (t[:, None] - [2.0, 5.1, 7.7])))
    >>> share_events(t, shares, [2.0, 5.1, 7.7]).z > 4, share_events(t, shares, [5.1, 7.7, 2.0]).z < 2
    (True, True)
    """
    moments, curves = vector(t, "t"), matrix(shares, "shares")
    rises = np.maximum(np.diff(curves, axis=0), 0.0).T
    return score_events(
        len(rises[0]) * rises / np.maximum(rises.sum(axis=1, keepdims=True), 1e-300), places_of(moments, times)
    )
