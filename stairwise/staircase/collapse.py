"""Collapse, judged in the geometry of the loss: directions of z, total variance, and the share of one dimension."""

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]

ALIKE, APART = 0.9, 0.1  # all embeddings point the same way: cosine of negatives above, positives at most this closer
CONSISTENT, SURELY = 0.5, 0.985  # no collapse but a drifting mean if the views agree in what differs, up to this cosine
DRIFTING = 0.75  # above that cosine, if they agree so well; but not if the loss sees nothing but cosines, or has vanished
LONG, SLOWLY = 10, 0.03
MENDING, EQUAL = 0.04, 0.998  # nor if over the latest records they agree better by this much, up to this cosine
NEAR, NEAR_C = 0.08, 0.5  # C has learned its constant mode, which is no collapse, if ‖mean of z‖² is 1 up to this
SAME = 1e-8  # all embeddings are one point if the variance is below this multiple of the squared mean
GONE = 1e-6  # nothing is left below this share of the largest variance and mean
LOST, LOSING = 0.02, 0.1  # the variance has collapsed, or is collapsing, below this share of its maximum,
DISAGREE = 0.5  # unless the views of a sample agree this well,
SOONEST = 6  # from this record on;
UNSEEN = 1e-3  # where it was not recorded how well they agree, below this multiple of those shares
ALONE = 0.9  # one dimension has at least this share of the variance
CHEAP = 0.6  # although the loss has fallen to this share of its first value,
LESS, LOW, HIGH = 0.9, 0.6, 1.5  # or to this one, if the total variance is d up to these factors: coordinates are copies
CHARGED = 0.5 * 0.0051  # unless the loss is what Barlow Twins' usual weight charges for it, times d(d − 1): it will change
FREE = 1e-3  # nothing but the size of z is learned if variance and loss both fall to this share of their maxima
AT_VALUE = 0.04  # a loss sits at a telling value if it is this close to it
RECENT = 5  # records over which a trend is judged


def collapse(lam: Floats, level: float | None, signs: Signs) -> tuple[str, str]:
    """The state ("collapsing", "collapsed" or "") and its kind: "zero", "point", "variance", "falling" or "one"."""
    v, ms = _tail(signs.variance), _tail(signs.mean_square)
    most = float(np.nanmax(signs.variance)) if np.isfinite(signs.variance).any() else np.nan
    if v[-1] <= GONE * most and not ms[-1] > GONE * np.nanmax(signs.mean_square, initial=0.0):
        return "collapsed", "zero"
    apart = len(lam) >= SOONEST and not signs.agreement > DISAGREE  # the first records may overshoot
    sure = UNSEEN if np.isnan(signs.agreement) else 1.0
    if not _mean_learned(level, signs) and (v[-2:].max() <= FREE * most or not _never_started(signs, lam.shape[1])):
        if _alike(signs):
            return "collapsed", "point"
        if v[-2:].max() <= sure * LOST * most and (apart and v[-1] <= 1.3 * v.min() or _free(signs)):
            return "collapsed", "variance"
        if v[-2:].max() <= sure * LOSING * most and apart and v[-1] <= 0.5 * v[0]:
            return "collapsing", "falling"
    return ("collapsed", "one") if _alone(lam, level, signs) else ("", "")


def one_point(signs: Signs) -> bool:
    """Whether all embeddings are the same point up to rounding, also if they have been so from the start."""
    return bool(signs.variance[-1] <= SAME * signs.mean_square[-1])


def _mean_learned(level: float | None, signs: Signs) -> bool:
    """Whether C has learned, or is learning, its constant mode, whose eigenvalue ‖mean of z‖² goes to 1."""
    first, now = _tail(signs.mean_square)[[0, -1]]
    near = abs(now - 1) <= (NEAR_C if level is not None else NEAR)
    return bool(near or (1.1 * first < now < 1 and not _is_cosine(signs)))


def _tail(values: Floats) -> Floats:
    return values[-RECENT:]


def _alike(signs: Signs) -> bool:
    """Whether all embeddings point the same way, and do not begin to differ.

    A mean that drifts makes cosines large without harm to losses that centre z: then what is left differs more between
    samples than between views.
    """
    negative, gap = signs.negative[-3:], signs.positive[-3:] - signs.negative[-3:]
    most = np.nanmax(signs.variance)
    if not ((negative >= ALIKE).all() and (gap <= APART).all()) or negative[-1] < _tail(signs.negative).max() - 0.015:
        return False
    agreements, cosine = _tail(signs.agreements), _is_cosine(signs)
    if negative[-1] < EQUAL and (len(signs.loss) < SOONEST or agreements[-1] > agreements.min() + MENDING):
        return False
    if negative[-1] >= SURELY:
        return bool(agreements[-1] < DRIFTING or cosine or _free(signs) or signs.variance[-1] <= LOST * most)
    return bool(agreements[-1] < CONSISTENT or (cosine and agreements[-1] < signs.agreements[-LONG:].min() + SLOWLY))


def _free(signs: Signs) -> bool:
    """Whether the loss has vanished: then it was lowered by making z small."""
    loss = np.abs(signs.loss[np.isfinite(signs.loss)])
    return bool(len(loss) > 1 and loss[-2:].max() <= FREE * loss.max())


def _is_cosine(signs: Signs) -> bool:
    """Whether the loss is a function of the positive cosine alone, −cos or 2 − 2 cos."""
    loss, positive = signs.loss[-1], signs.positive[-1]
    return bool(min(abs(loss + positive), abs(loss - 2 * (1 - positive))) <= 0.05)


def _never_started(signs: Signs, d: int) -> bool:
    """Whether a contrastive loss, or one over d prototypes, has never been clearly below its value for equal z."""
    n, loss = signs.batch[-1], signs.loss[np.isfinite(signs.loss)]
    if not len(loss) or not n > 1:
        return False
    equal = np.log([2 * n - 1, n, max(d, 2)])
    return bool(((np.abs(loss[-1] / equal - 1) <= AT_VALUE) & (loss.min() >= (1 - 2 * AT_VALUE) * equal)).any())


def _alone(lam: Floats, level: float | None, signs: Signs) -> bool:
    """Whether one dimension has held nearly all the variance for a while, although the loss has fallen."""
    width, d = max(6, round(0.05 * len(lam))), lam.shape[1]
    loss = signs.loss[np.isfinite(signs.loss)]
    copies = LOW * d <= signs.variance[-1] <= HIGH * d
    charged = level is None and not copies and loss.size and loss[-1] >= CHARGED * d * (d - 1)
    if d < 16 or charged or len(lam) < width or not len(loss) or not 0 < loss[-1] <= (LESS if copies else CHEAP) * loss[0]:
        return False
    recent = np.maximum(lam[-width:], 0)
    share = recent[:, 0] / np.maximum(recent.sum(axis=1), 1e-300)
    if level is not None and not (recent[:, 0] > 2 * level).all():
        return False
    others = 1 - share
    return bool((share >= ALONE).all() and others[-2:].mean() <= 1.1 * others[:2].mean())
