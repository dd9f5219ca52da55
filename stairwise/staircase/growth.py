r"""Which dimensions are in use, which are rising, and how long nothing has moved.

Growth is judged in the log of λ (of C) or of its share λ_j/Σλ (of a covariance, whose scale may drift), against the
scatter of the records: over the latest records, and over the latest fifth of the run. What is said of a record depends
on earlier records only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, positive_int, real

Floats = NDArray[np.float64]

IN_USE = 0.2  # a dimension is in use if its variance is at least this share of the typical one, Σλ²/Σλ,
HALF = 0.5  # or, where the plateau is known, if it is above half of it
WINDOW, SHORTEST = 0.2, 5  # growth is measured over this share of the records, and over so many latest ones
RISES, QUICK = 0.2, 0.2  # a dimension rises if it grows by this much (in log λ) over the long or the short window,
CERTAIN = 2.5  # and by this many standard errors
STEADY = 20  # records from which the scatter is estimated
VISIBLE = 0.05  # dimensions above this share of the typical variance change what is learned; lower ones are to come
TO_COME = 0.4  # a dimension below that is coming if it grows by this much over the window
MODES = 512  # leading modes that are looked at
NEXT = 4  # dimensions not in use that are looked at before the run is called finished


@dataclass(frozen=True, eq=False)
class Rest:
    """The eigenvalues below those that were recorded: their sum at every record, (T,), and their number.

    Where their squares are needed, they are taken as equal, which gives the least sum of squares.
    """

    sum: Floats
    number: int = 0

    @classmethod
    def of(cls, lam: Floats, total: ArrayLike | None = None, dimensions: int | None = None) -> "Rest":
        """The rest of spectra (T, k) of which the sum of all d eigenvalues is known, (T,).

        >>> Rest.of(np.array([[2.0, 1.0]]), total=[3.5], dimensions=10)
        Rest(sum=array([0.5]), number=8)
        """
        records, k = lam.shape
        if dimensions is None or (isinstance(dimensions, int) and dimensions == k):
            return cls(np.zeros(records))
        if positive_int(dimensions, "dimensions") < k:
            raise InputError("dimensions", f"must be at least {k}, the number of eigenvalues", dimensions)
        if total is None:
            remedy = "give Run.totals(…), or the sum of all eigenvalues at every record"
            raise InputError("total", f"must be given if lam has {k} of {dimensions} eigenvalues", None, remedy)
        sums = np.asarray(real(total, "total"), dtype=np.float64)
        if sums.shape != (records,):
            raise InputError("total", f"must have {records} numbers, one per row of lam", f"shape {sums.shape}")
        with np.errstate(invalid="ignore", over="ignore"):  # records that are not finite
            rest = np.nan_to_num(sums - lam.sum(axis=1), posinf=0.0, neginf=0.0)
        return cls(np.maximum(rest, 0.0), dimensions - k)

    def where(self, kept: NDArray[np.bool_] | slice) -> "Rest":
        """The rest at some records."""
        return Rest(self.sum[kept], self.number)

    def totals(self, lam: Floats) -> Floats:
        """Sum of all positive eigenvalues at every record, (T, 1)."""
        return np.asarray(np.maximum(lam, 0.0).sum(axis=1, keepdims=True) + self.sum[:, None])

    def squares(self, lam: Floats) -> Floats:
        """Sum of their squares, (T, 1)."""
        own = np.asarray((np.maximum(lam, 0.0) ** 2).sum(axis=1, keepdims=True))
        return own + self.sum[:, None] ** 2 / self.number if self.number else own


def learned(spectrum: Floats, level: float | None = None, rest: Rest | None = None) -> int:
    """Number of dimensions in use: λ above half of the plateau `level`, or above a fifth of the typical variance.

    The typical variance Σλ²/Σλ is the mean of λ over units of variance; for k equal eigenvalues it is their value.

    >>> learned(np.array([2.7, 2.1, 1.6, 0.5, 0.01])), learned(np.array([1.0, 0.9, 0.3]), level=1.0)
    (4, 2)
    """
    lam = np.maximum(spectrum, 0.0)
    bar = HALF * level if level is not None else IN_USE * float(typical(lam[None], rest)[0, 0])
    return int((lam >= max(bar, 1e-300)).sum())


def typical(spectra: Floats, rest: Rest | None = None) -> Floats:
    """The typical variance Σλ²/Σλ of every row, (T, 1); 1 where no eigenvalue is positive."""
    below = rest if rest is not None else Rest.of(spectra)
    total = below.totals(spectra)
    ratio = below.squares(spectra) / np.maximum(total, 1e-300)
    return np.asarray(np.where(total > 0, np.maximum(ratio, 1e-300), 1.0))


def relative(spectra: Floats, rest: Rest | None = None) -> Floats:
    """Spectra (T, d) in units of the typical variance of each record.

    The plateau is then near 1, even if the scale of z drifts, as it does with losses that normalize z.

    >>> relative(np.array([[4.0, 4.0, 0.04], [0.2, 0.2, 0.2]])).round(2)
    array([[1.  , 1.  , 0.01],
           [1.  , 1.  , 1.  ]])
    """
    return spectra / typical(spectra, rest)


@dataclass(frozen=True, eq=False)
class Growth:
    """What moves in the followed spectrum at one record.

    Attributes:
        learned: dimensions in use.
        rising: indices of dimensions in use, or nearly so, that grow.
        coming: indices of lower dimensions that grow and could arrive within the time the run has lasted.
        gains: growth of each leading dimension over the window, in log λ, (modes,); 0 where it is not certain.
        quiet: number of records since something visible grew.
        arrival: number of records until the next dimension would be in use, at its pace since things became quiet.
        moved: largest change of a leading dimension since the first records, in log λ.
        unseen: growth of the sum of the eigenvalues that are not recorded, if some of them may be visible; 0 if none.
    """

    learned: int
    rising: NDArray[np.int64]
    coming: NDArray[np.int64]
    gains: Floats
    quiet: int
    arrival: float
    moved: float
    unseen: float = 0.0


class History:
    """Growth at every record of spectra (T, d), which must be finite and descending; `rest` is what lies below them."""

    def __init__(self, lam: Floats, level: float | None, rest: Rest | None = None) -> None:
        self.level, self.lam, self.rest = level, lam, rest if rest is not None else Rest.of(lam)
        totals = np.maximum(self.rest.totals(lam), 1e-300)
        curves = np.maximum(lam[:, :MODES], 1e-12 * totals)
        units = typical(lam, self.rest) if level is None else np.full((len(lam), 1), level)
        self.heights = curves / units
        self.logs = np.log(curves if level is not None else curves / totals)
        self.gains, self.rates = _growth(self.logs)
        self.unseen = np.zeros(len(lam))
        if self.rest.number:  # some of the rest may be visible if the smallest recorded eigenvalue is
            sums = np.maximum(self.rest.sum[:, None], 1e-12 * totals)
            gains, _ = _growth(np.log(sums if level is not None else sums / totals))
            self.unseen = np.where(lam[:, -1] >= VISIBLE * units[:, 0], gains[:, 0], 0.0)
        visible: NDArray[np.bool_] = np.asarray(((self.heights >= VISIBLE) & (self.gains > 0)).any(axis=1))
        self.active = visible | (self.unseen > 0)

    def at(self, i: int) -> Growth:
        """Growth at record i."""
        heights, gains, rates = self.heights[i], self.gains[i], self.rates[i]
        visible = heights >= VISIBLE
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # zeros, and no growth
            left = np.where(rates > 0, np.log(2 * VISIBLE / heights) / rates, np.inf)
        busy = np.flatnonzero(self.active[: i + 1])
        quiet = i - int(busy[-1]) if len(busy) else i + 1
        now = learned(self.lam[i], self.level, self.rest.where(slice(i, i + 1)))
        first, last = (np.median(part, axis=0) for part in (self.logs[:3], self.logs[max(0, i - 2) : i + 1]))
        return Growth(
            now,
            np.flatnonzero(visible & (gains > 0)),
            np.flatnonzero(~visible & (gains >= TO_COME) & (left <= i + 1)),
            gains,
            quiet,
            self._arrival(i, now, max(quiet, SHORTEST)),
            float(np.abs(last - first)[:5].max()),
            float(self.unseen[i]),
        )

    def _arrival(self, i: int, used: int, width: int) -> float:
        """Records until one of the next dimensions is in use, from straight lines through the last `width` records."""
        if used >= MODES or (used + NEXT > self.lam.shape[1] and self.rest.number):  # the next ones are not looked at
            return 0.0
        logs = self.logs[max(0, i + 1 - width) : i + 1, used : used + NEXT]
        if not logs.size or len(logs) < 3:
            return np.inf
        x = np.arange(len(logs)) - (len(logs) - 1) / 2
        slope = x @ logs / (x**2).sum()
        bar = HALF if self.level is not None else IN_USE
        with np.errstate(over="ignore"):
            left = np.log(bar / self.heights[i, used : used + NEXT])
        return float(np.where(slope > 0, left / np.maximum(slope, 1e-300), np.inf).min())


def _growth(logs: Floats) -> tuple[Floats, Floats]:
    """Certain growth of each curve, (T, modes), up to every record, and its rate per record."""
    gains, rates, noise = np.zeros_like(logs), np.zeros_like(logs), _noise(logs)
    for end in range(SHORTEST, len(logs) + 1):
        gains[end - 1], rates[end - 1] = _gains(logs[:end], noise[end - 1])
    return gains, rates


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
