"""Collapse, judged in the geometry of the loss: directions of z, total variance, and the share of one dimension."""

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]

ALIKE, APART = 0.9, 0.1  # all embeddings point the same way: cosine of negatives above, positives at most this closer
MEAN = 0.08  # C has learned its constant mode, which is no collapse, if ‖mean of z‖² is 1 up to this
LOST, LOSING = 0.02, 0.2  # the variance has collapsed, or is collapsing, below this share of its maximum,
CLOSE = 0.3  # if positives are no closer than this
ALONE = 0.9  # one dimension has at least this share of the variance
CHEAP = 0.6  # although the loss has fallen to this share of its first value
AT_VALUE = 0.04  # a loss sits at a telling value if it is this close to it
RECENT = 5  # records over which a trend is judged


def collapse(lam: Floats, level: float | None, signs: Signs) -> tuple[str, str]:
    """The state ("collapsing", "collapsed" or "") and the kind of collapse: "zero", "point", "variance" or "one"."""
    v = _tail(signs.variance)
    most = float(np.nanmax(signs.variance)) if np.isfinite(signs.variance).any() else np.nan
    now, ms = v[-1], _tail(signs.mean_square)
    if now <= 1e-6 * most and ms[-1] <= 1e-6 * np.nanmax(signs.mean_square):
        return "collapsed", "zero"
    mean_learned = abs(ms[-1] - 1) <= MEAN or (ms[-1] < 1 and ms[-1] > 1.1 * ms[0])
    gap, negative = signs.positive - signs.negative, _tail(signs.negative)
    if not mean_learned:
        if _alike(signs) and not _never_started(signs) and negative[-1] > negative.max() - 0.015:
            return "collapsed", "point"
        steady = now <= 1.3 * v.min()
        if now <= LOST * most and gap[-1] <= CLOSE and steady:
            return "collapsed", "variance"
        if now <= LOSING * most and gap[-1] <= CLOSE and now <= 0.6 * v[0]:
            return "collapsing", "variance"
    if _alone(lam, level, signs):
        return "collapsed", "one"
    return "", ""


def _tail(values: Floats) -> Floats:
    return values[-RECENT:]


def _alike(signs: Signs) -> bool:
    return bool(signs.negative[-1] >= ALIKE and signs.positive[-1] - signs.negative[-1] <= APART)


def _never_started(signs: Signs) -> bool:
    """Whether a contrastive loss has never been clearly below its value for equal embeddings."""
    n, loss = signs.batch[-1], signs.loss[np.isfinite(signs.loss)]
    if not len(loss) or not n > 1:
        return False
    return any(abs(loss[-1] / at - 1) <= AT_VALUE and loss.min() >= (1 - 2 * AT_VALUE) * at for at in (np.log(2 * n - 1), np.log(n)))


def _alone(lam: Floats, level: float | None, signs: Signs) -> bool:
    """Whether one dimension has held nearly all the variance for a while, although the loss has fallen."""
    width = max(4, round(0.05 * len(lam)))
    d, recent = lam.shape[1], np.maximum(lam[-width:], 0)
    loss = signs.loss[np.isfinite(signs.loss)]
    if d < 4 or len(lam) < width or not len(loss) or not 0 < loss[-1] <= CHEAP * loss[0]:
        return False
    share = recent[:, 0] / np.maximum(recent.sum(axis=1), 1e-300)
    if level is not None and not (recent[:, 0] > 2 * level).all():
        return False
    return bool((share >= ALONE).all())
