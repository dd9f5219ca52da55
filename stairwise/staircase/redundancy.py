"""Whether a loss charges for redundant dimensions, read from its values.

Barlow Twins and VICReg are sums of two parts. One depends on the length, the mean and the agreement of the views only.
The other is the charge for redundancy, which is known as well where d coordinates are copies of few dimensions. A loss
that is the first part alone has lost the second, and nothing keeps its embeddings from collapsing to few dimensions.
"""

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.growth import Rest
from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]

FEWEST = 16  # with fewer dimensions one or two are no collapse
FEW = (12, 4)  # few: at most d/12 dimensions (participation ratio), and 4
GROWS = 1.05  # unless their number grows by this factor over the records that are looked at,
RECORDS = 3  # which are so many
BARLOW, VICREG = 0.0051, 25.0  # usual weights of Barlow Twins' redundancy term, and of VICReg's other two terms
FLOOR = 1e-4  # VICReg adds this to each variance
BELOW = 0.8  # a loss that was ever below this share of the first part is another loss
MISSING = 0.4  # the charge is missing if less than this share of it is paid,
SEEN = (0.2, 0.05)  # which can be seen if it is at least this share of the first part, for either loss,
EXCESS = (0.3, 0.05)  # and the loss is the first part, up to these shares of it or of the charge,
COPIES = (0.5, 4.0)  # coordinates are copies if their variance is between these multiples of 1
DOUBT, ORDINARY = 1 / 3, 1.2  # or a third of that if it was never above this multiple of contrastive losses


def participation(lam: Floats, rest: Rest) -> Floats:
    """How many dimensions share the variance: (Σλ)²/Σλ², (T,)."""
    return np.asarray(rest.totals(lam) ** 2 / np.maximum(rest.squares(lam), 1e-300))[:, 0]


def most_few(d: int) -> float:
    """The largest number of dimensions that counts as few."""
    return min(d / FEW[0], FEW[1])


def few(lam: Floats, rest: Rest) -> NDArray[np.bool_]:
    """At which records few dimensions hold the variance, (T,)."""
    d = lam.shape[1] + rest.number
    return np.asarray((participation(lam, rest) <= most_few(d)) & (d >= FEWEST))


def uncharged(lam: Floats, signs: Signs, rest: Rest) -> NDArray[np.bool_]:
    """At which records few dimensions hold the variance, no more than before, and the loss does not charge for it."""
    d, used, n = lam.shape[1] + rest.number, np.maximum(participation(lam, rest), 1.0), len(lam)
    out = np.zeros(n, dtype=bool)
    if d < FEWEST or n < RECORDS:
        return out
    loss, narrow = signs.loss, few(lam, rest)
    with np.errstate(invalid="ignore", over="ignore"):
        parts = (of_barlow_twins(signs, d, used), of_vicreg(signs, d, used))
        for (base, charge), seen in zip(parts, SEEN, strict=True):
            fits = np.logical_and.accumulate(~(loss < BELOW * base)) & (loss > 0) & narrow
            excess, first, due = (_recent(values) for values in (loss - base, base, charge))
            allowed = np.where(_ordinary(signs, d), DOUBT, 1.0) * np.maximum(EXCESS[0] * first, EXCESS[1] * due)
            out |= _lasting(fits) & (excess <= np.minimum(MISSING * due, allowed)) & (due >= seen * first)
    out[RECORDS - 1 :] &= used[RECORDS - 1 :] <= GROWS * used[: n - RECORDS + 1]
    return out


def copied(lam: Floats, signs: Signs, rest: Rest) -> bool:
    """Whether the coordinates are copies of few dimensions at the last record, and the loss is below what VICReg asks.

    That is no collapse yet, but no success either.
    """
    d, last = lam.shape[1] + rest.number, slice(-1, None)
    used = max(float(participation(lam[last], rest.where(last))[0]), 1.0)
    copies = bool(few(lam[last], rest.where(last))[0]) and COPIES[0] * d <= signs.variance[-1] <= COPIES[1] * d
    return bool(copies and 0 < signs.loss[-1] <= COPIES[0] * (d / used - 1))


def of_barlow_twins(signs: Signs, d: int, used: Floats) -> tuple[Floats, Floats]:
    """Barlow Twins without redundancy, and its charge for it."""
    correlation = np.clip((signs.trace - signs.mean_square) / np.maximum(signs.variance, 1e-300), -1.0, 1.0)
    return d * (1 - correlation) ** 2, BARLOW * d * (d / used - 1) * correlation**2


def of_vicreg(signs: Signs, d: int, used: Floats) -> tuple[Floats, Floats]:
    """VICReg without its covariance term, if all coordinates have the same variance, and that term."""
    variance = np.maximum(signs.variance, 0.0) / d
    distance = 2 * (signs.variance + signs.mean_square - signs.trace) / d
    narrow = np.maximum(1 - np.sqrt(variance + FLOOR), 0.0)
    return VICREG * (distance + narrow), 2 * (d / used - 1) * variance**2


def _ordinary(signs: Signs, d: int) -> NDArray[np.bool_]:
    """Whether the loss was never above what contrastive losses, and those over d prototypes, begin with.

    The first records do not count: they may overshoot.
    """
    high = signs.loss > ORDINARY * np.maximum(np.log(2 * signs.batch), np.log(d))
    high[:RECORDS] = False
    return np.asarray(~np.logical_or.accumulate(high))


def _recent(values: Floats) -> Floats:
    """Sums over the latest records, NaN at the first ones."""
    sums = np.convolve(values, np.ones(RECORDS))[: len(values)]
    return np.concatenate([np.full(RECORDS - 1, np.nan), sums[RECORDS - 1 :]])


def _lasting(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where all of the latest records are true."""
    return np.asarray(np.convolve(values, np.ones(RECORDS, dtype=int))[: len(values)] == RECORDS)
