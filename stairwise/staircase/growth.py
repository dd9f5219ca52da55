r"""Which dimensions are in use, which are rising, and how long nothing has moved.

Growth is judged in the log of λ (of C) or of its share λ_j/Σλ (of a covariance, whose scale may drift), over the latest
tenth of the records, against the scatter of the records around a straight line.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

IN_USE = 0.2  # a dimension is in use if its variance is at least this share of the typical one, Σλ²/Σλ,
HALF = 0.5  # or, where the plateau is known, if it is above half of it
WINDOW, SHORTEST = 0.2, 5  # growth is measured over this share of the records, and over so many latest ones
RISES, QUICK = 0.12, 0.25  # a dimension rises if it grows by this much (in log λ) over the long or the short window,
CERTAIN = 4.0  # and by this many standard errors
STEADY = 20  # records from which the scatter is estimated
VISIBLE = 0.05  # dimensions above this share of the typical variance change what is learned; lower ones are to come
TO_COME = 0.4  # a dimension below that is coming if it grows by this much over the window
MODES = 64  # leading modes that are looked at


def learned(spectrum: Floats, level: float | None = None) -> int:
    """Number of dimensions in use: λ above half of the plateau `level`, or above a fifth of the typical variance.

    The typical variance Σλ²/Σλ is the λ of the dimension in which a random unit of variance lies; for k equal
    eigenvalues it is their value.

    >>> learned(np.array([2.7, 2.1, 1.6, 0.5, 0.01])), learned(np.array([1.0, 0.9, 0.3]), level=1.0)
    (4, 2)
    """
    lam = np.maximum(spectrum, 0.0)
    return int((lam >= max(_bar(lam, level), 1e-300)).sum())


def _bar(lam: Floats, level: float | None) -> float:
    if level is not None:
        return HALF * level
    total = lam.sum()
    return float(IN_USE * (lam**2).sum() / total) if total > 0 else np.inf


@dataclass(frozen=True, eq=False)
class Growth:
    """What moves in the followed spectrum.

    Attributes:
        learned: dimensions in use now.
        rising: indices of dimensions in use, or nearly so, that grow now.
        coming: indices of lower dimensions that grow now.
        factors: growth of each leading dimension over the window, as a factor, (modes,).
        active: whether anything visible was growing at each record, (T,).
        quiet: number of records since something visible grew.
        waits: lengths of earlier stretches, in records, in which nothing visible grew.
        moved: largest change of a leading dimension since the first records, in log λ.
    """

    learned: int
    rising: NDArray[np.int64]
    coming: NDArray[np.int64]
    factors: Floats
    active: NDArray[np.bool_]
    quiet: int
    waits: list[int]
    moved: float


def growth(lam: Floats, level: float | None) -> Growth:
    """Measure growth in spectra (T, d) that are finite and descending."""
    curves, totals = np.maximum(lam[:, :MODES], 1e-300), np.maximum(lam.clip(0).sum(axis=1, keepdims=True), 1e-300)
    typical = level if level is not None else (lam.clip(0) ** 2).sum(axis=1, keepdims=True) / totals
    heights = curves / np.maximum(typical, 1e-300)
    logs = np.log(curves if level is not None else curves / totals)
    noise = _noise(logs)
    active = np.zeros(len(lam), dtype=bool)
    gains = rates = np.zeros(curves.shape[1])
    for end in range(SHORTEST, len(lam) + 1):
        gains, rates = _gains(logs[:end], noise[end - 1])
        active[end - 1] = ((heights[end - 1] >= VISIBLE) & (gains > 0)).any()
    visible = heights[-1] >= VISIBLE
    with np.errstate(divide="ignore"):
        ahead = np.where(rates > 0, np.log(2 * VISIBLE / heights[-1]) / rates, np.inf)
    quiet, waits = _stretches(active)
    first, last = (np.median(part, axis=0) for part in (logs[:3], logs[-3:]))
    return Growth(
        learned(lam[-1], level),
        np.flatnonzero(visible & (gains > 0)),
        np.flatnonzero(~visible & (gains >= TO_COME) & (ahead < len(lam))),
        np.exp(gains),
        active,
        quiet,
        waits,
        float(np.abs(last - first)[:5].max()),
    )


def _noise(logs: Floats) -> Floats:
    """Standard deviation of each record around a smooth curve, from the second differences of the latest records."""
    n, modes = logs.shape
    out = np.full((n, modes), np.inf)
    second = np.abs(logs[2:] - 2 * logs[1:-1] + logs[:-2])
    for end in range(SHORTEST, n + 1):
        out[end - 1] = np.median(second[max(0, end - 2 - STEADY) : end - 2], axis=0) * 1.4826 / np.sqrt(6)
    return np.maximum(out, 1e-4)


def _gains(logs: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Certain growth of each curve over the window, 0 if it is not certain or has ended, and its rate per record."""
    n = len(logs)
    quick, quick_rate, sure = _line(logs[-SHORTEST:], noise)
    gain = np.where(sure & (quick >= QUICK), quick, 0.0)
    rate = np.where(gain > 0, quick_rate, 0.0)
    width = min(n, max(SHORTEST + 3, round(WINDOW * n)))
    slow, slow_rate, sure = _line(logs[-width:], noise)
    third = max(2, width // 3)
    late = logs[-third:].mean(axis=0) - logs[-2 * third : -third].mean(axis=0)
    slow_too = sure & (slow >= RISES) & (late >= 0.1 * slow)
    return np.maximum(gain, np.where(slow_too, slow, 0.0)), np.maximum(rate, np.where(slow_too, slow_rate, 0.0))


def _line(logs: Floats, noise: Floats) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Growth of straight lines through the columns, from end to end and per record, and whether it is certain."""
    n = len(logs)
    x = np.arange(n) - (n - 1) / 2
    spread = (x**2).sum()
    slope = x @ logs / spread
    return slope * (n - 1), slope, slope * np.sqrt(spread) >= CERTAIN * noise


def _stretches(active: NDArray[np.bool_]) -> tuple[int, list[int]]:
    """Length of the last stretch without growth, and of the earlier ones."""
    ends = np.flatnonzero(active)
    if not len(ends):
        return len(active), []
    gaps = np.diff(ends) - 1
    return int(len(active) - 1 - ends[-1]), [int(g) for g in gaps if g > 0]
