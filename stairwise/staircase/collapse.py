"""Collapse, judged in the geometry of the loss: directions of z, total variance, and the share of few dimensions.

A collapse that was named stays named until it is plainly mended, so that noise does not revoke it.
"""

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.growth import Rest
from stairwise.staircase.redundancy import BARLOW, FEWEST, RECORDS, few, most_few, participation, uncharged
from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]

FIRST = 3  # index of the first record at which a collapse may be seen
RECENT = 5  # records over which a trend is judged
SOONEST = 6  # the first records may overshoot: most kinds of collapse are named from this one on

# All embeddings point the same way
ALIKE, APART = 0.9, 0.1  # if the cosine of negatives is above the first, and of positives at most the second closer
EXACT, NEARLY = 0.01, 0.05  # at 6 records, or 3 if the loss is a cosine or distance of the views; or nearly a cosine.
PLAIN = 0.96  # Two records in a row must show all this; one, if the loss is such and the cosine is as high.
ROUNDING = 1e-4  # A loss that is further below −1 is no cosine.
KEPT = 0.5  # The mean may only have drifted: the variance is above this share of its maximum since the second record,
CONSISTENT = 0.5  # or what differs agrees between views, at least this much,
SURELY, DRIFTING = 0.985, 0.75  # or this much, if the cosine is as high.
EQUAL = 0.998  # Below this cosine, embeddings that come to differ are no collapse:
MENDING = 0.03  # views agree better, by this much over six records,
SPREADING = 1.25  # or 1 − cosine has grown by this factor over the latest ones
CHOSEN, AT_MOST = 0.5, 1.2  # Or a loss over d prototypes, not above the second multiple of ln d, is below the first,
SWING = 20  # which counts so many records after the last one above, since the loss may swing back,
LESS = 0.9  # below this share of its first value,
DEARER = 0.7  # and below this share of what Barlow Twins asks for views that agree so little: all choose the same one,
STARTED = 1.15  # or it began below this multiple, and the cosine has always been high.
NEAR, PLAINLY = 0.5, 0.08  # C learns its constant mode, no collapse, if ‖mean of z‖² is 1 up to this; the second if the
# loss looks like a cosine, as −1 does; unless z is normalized,
UNIT = 0.01  # which means that variance and ‖mean of z‖² sum to 1, up to this, at every record

# Embeddings are a point, zero, or small
SAME = 1e-8  # a point: the variance is below this multiple of the squared mean
GONE = 1e-6  # zero: nothing is left above this share of the largest variance and mean
LOST, LOSING = 0.02, 0.1  # small, or becoming so: the variance is below this share of its maximum,
VANISHED = 1e-3  # and the loss is a distance of the views, or has fallen to this share of its maximum,
UNSEEN = 2e-5  # or, where it was not recorded how well views agree, below this share
HALVED, CONSTANT = 2.0, 0.15  # the loss is a distance if their ratio is the same, in log, since that halved
SHRINKS, FOLLOWS = 0.1, 0.15  # z shrinks if distance and variance fall by this, in log, and their ratio by this share
AT_VALUE = 0.04  # a loss sits at a telling value if it is this close to it

# Few dimensions hold all
BEYOND = 2.0  # the first eigenvalue of C is above this multiple of its plateau, to which a healthy loss pulls it back.
ALONE = 0.9  # Or one dimension has this share of the variance,
CHEAP = 0.6  # although the loss has fallen to this share of its first value,
RISEN = 1.5  # has not risen by this factor since,
CHARGED = 0.5 * BARLOW  # and is below this times d(d − 1): Barlow Twins would see the redundancy

# Mended
APART_AGAIN, AGREE_AGAIN = (0.85, 0.15), 0.9  # cosine of negatives, or how much closer positives are; agreement
GROWN_AGAIN = 0.2  # the variance, as a share of its maximum
SHARED_AGAIN = 0.25  # the share of all dimensions but one; and twice as many dimensions as count as few

DOUBTFUL = "doubtful"  # a collapse if it is seen again
KINDS = ("zero", "point", "variance", "falling", "one", "few")


class Collapses:
    """Collapses at any record of spectra (T, d), judged by the records up to it."""

    def __init__(self, lam: Floats, level: float | None, signs: Signs, rest: Rest) -> None:
        self.lam, self.level, self.signs, self.rest = lam, level, signs, rest
        self.shown: dict[int, tuple[str, str]] = {}
        self.mended = _mended(lam, signs, rest)
        self.uncharged = uncharged(lam, signs, rest)

    def at(self, i: int) -> tuple[str, str, int]:
        """The state ("collapsing", "collapsed" or ""), its kind, one of `KINDS`, and the record at which it was seen.

        A kind that was seen at an earlier record is kept, unless it has been mended since.
        """
        kept = set(KINDS)
        for j in range(i, FIRST - 1, -1):
            state, kind = self._seen(j)
            if kind in kept:
                return state, kind, j
            kept = {kind for kind in kept if not self.mended[kind][j]}
            if not kept:
                break
        return "", "", i

    def _seen(self, i: int) -> tuple[str, str]:
        """What a record shows; what is doubtful counts if the record before shows a collapse, too."""
        state, kind = self._shown(i)
        if state == DOUBTFUL:
            state, kind = ("collapsed", kind) if i > FIRST and self._shown(i - 1)[0] else ("", "")
        return ("collapsed", "few") if not state and i + 1 >= SOONEST and self.uncharged[i] else (state, kind)

    def _shown(self, i: int) -> tuple[str, str]:
        if i not in self.shown:
            past = slice(i + 1)
            self.shown[i] = _shown(self.level, self.lam[past], self.signs.where(past), self.rest.where(past))
        return self.shown[i]


def _shown(level: float | None, lam: Floats, signs: Signs, rest: Rest) -> tuple[str, str]:
    """State and kind of a collapse that the last record shows; the state may be doubtful."""
    d = lam.shape[1] + rest.number
    v, ms = _tail(signs.variance), _tail(signs.mean_square)
    most = float(np.nanmax(signs.variance)) if np.isfinite(signs.variance).any() else np.nan
    if v[-1] <= GONE * most and not ms[-1] > GONE * np.nanmax(signs.mean_square, initial=0.0):
        return "collapsed", "zero"
    distance = len(lam) >= SOONEST and _is_distance(signs)
    if (distance or not _mean_learned(level, signs)) and (
        v[-2:].max() <= VANISHED * most or not _never_started(signs, d)
    ):
        alike = _alike(signs, most)
        if (alike and _plain(signs)) or _one_prototype(signs, d):
            return "collapsed", "point"
        shortest = v[-1] <= 1.3 * v.min() and len(lam) >= SOONEST
        unseen = np.isnan(signs.agreement) and shortest and v[-2:].max() <= UNSEEN * most
        if unseen or (v[-2:].max() <= LOST * most and ((distance and shortest) or _vanished(signs))):
            return "collapsed", "variance"
        if v[-2:].max() <= LOSING * most and distance:
            return "collapsing", "falling"
        if alike:
            return DOUBTFUL, "point"
    if level is None:
        return ("collapsed", "one") if _alone(lam, signs, rest) else ("", "")
    return ("collapsed", "few") if _beyond(lam, level, signs.loss, rest) else ("", "")


def _mended(lam: Floats, signs: Signs, rest: Rest) -> dict[str, NDArray[np.bool_]]:
    """At which records there is evidence that a collapse of each kind is over, (T,)."""
    negative, gap = signs.negative, signs.positive - signs.negative
    most = np.fmax.accumulate(signs.variance)
    agree = (signs.agreements >= AGREE_AGAIN) & ~_cosines(signs)
    grown = ~(signs.variance <= GROWN_AGAIN * most)
    return dict.fromkeys(("zero", "variance", "falling"), grown) | {
        "point": ~((negative >= APART_AGAIN[0]) & (gap <= APART_AGAIN[1])) | agree,
        "one": _others(lam, rest) > SHARED_AGAIN,
        "few": participation(lam, rest) > 2 * most_few(lam.shape[1] + rest.number),
    }


def one_point(signs: Signs) -> bool:
    """Whether all embeddings are the same point up to rounding, also if they have been so from the start."""
    return bool(signs.variance[-1] <= SAME * signs.mean_square[-1])


def _mean_learned(level: float | None, signs: Signs) -> bool:
    """Whether C learns its constant mode, whose eigenvalue ‖mean of z‖² goes to 1.

    A spectral contrastive loss is −1 then, like the cosine of equal views; Barlow Twins is not.
    """
    if (np.abs(signs.variance + signs.mean_square - 1) <= UNIT).all():  # z is normalized, and always of norm 1
        return False
    off = abs(signs.mean_square[-1] - 1)
    return bool(off <= PLAINLY and level is None) if _attracts(signs) else bool(off <= NEAR)


def _tail(values: Floats) -> Floats:
    return values[-RECENT:]


def _alike(signs: Signs, most: float) -> bool:
    """Whether all embeddings point the same way, and do not begin to differ.

    A mean that drifts makes cosines large without harm to losses that centre z. Then little of the variance is lost, or
    what is left differs more between samples than between views. `most` is the largest variance so far.
    """
    attracts = _attracts(signs)
    width = RECORDS if attracts else SOONEST
    negative, gap = signs.negative[-width:], signs.positive[-width:] - signs.negative[-width:]
    if not ((negative >= ALIKE).all() and (gap <= APART).all()) or _spreading(signs.negative):
        return False
    now, cosine = signs.agreement, _is_cosine(signs)
    if negative[-1] < EQUAL and (len(signs.loss) < SOONEST or now > signs.agreements[-SOONEST:].min() + MENDING):
        return False
    if not (attracts or cosine) and signs.variance[-1] >= KEPT * np.fmax.reduce(signs.variance[1:]):
        return False
    if negative[-1] < SURELY:
        return bool(now < CONSISTENT or attracts)
    return bool(now < DRIFTING or cosine or signs.variance[-1] <= LOST * most or _vanished(signs))


def _plain(signs: Signs) -> bool:
    """Whether equal directions need no second record: the cosine is high, and the loss asks for no less."""
    return bool(signs.negative[-1] >= PLAIN and (_is_cosine(signs) or _attracts(signs)))


def _attracts(signs: Signs) -> bool:
    """Whether the loss is the cosine of the views, or their distance: nothing keeps different samples apart."""
    return bool((_off_cosine(signs)[-RECORDS:] <= EXACT).all()) or (len(signs.loss) >= SOONEST and _is_distance(signs))


def _spreading(negative: Floats) -> bool:
    """Whether embeddings that pointed almost the same way come apart."""
    return bool(negative[-1] < EQUAL and 1 - negative[-1] > SPREADING * (1 - _tail(negative).max()))


def _one_prototype(signs: Signs, d: int) -> bool:
    """Whether a loss over d prototypes falls because all samples choose the same one."""
    loss, now = signs.loss / np.log(max(d, 2)), slice(-RECORDS, None)
    if d < FEWEST or len(loss) < SOONEST or (loss[-SWING:] > AT_MOST).any():
        return False
    alike = (signs.negative[now] >= ALIKE) & (signs.positive[now] - signs.negative[now] <= APART)
    if not (alike & (loss[now] > 0)).all() or not loss[-1] <= LESS * loss[0]:
        return False
    price = np.minimum(CHOSEN * np.log(d), DEARER * d * (1 - signs.agreements[now]) ** 2)
    always = loss[0] <= STARTED and (signs.negative[FIRST:] >= ALIKE).all()
    return bool((signs.loss[now] <= price).all() or (always and (loss[now] <= CHOSEN).all()))


def _vanished(signs: Signs) -> bool:
    """Whether the loss has vanished, as it does where small embeddings are all that it asks for."""
    loss = np.abs(signs.loss[np.isfinite(signs.loss)])
    return bool(len(loss) > 1 and loss[-2:].max() <= VANISHED * loss.max())


def _is_cosine(signs: Signs) -> bool:
    """Whether the loss is near the positive cosine, −cos or 2 − 2 cos, as those of SimSiam and BYOL may be."""
    return bool(_cosines(signs)[-1])


def _cosines(signs: Signs) -> NDArray[np.bool_]:
    return np.asarray(_off_cosine(signs) <= NEARLY)


def _off_cosine(signs: Signs) -> Floats:
    """How far the loss is from −cos or 2 − 2 cos of the views, (T,); below −1 it is no cosine."""
    loss, positive = signs.loss, signs.positive
    off = np.minimum(np.abs(loss + positive), np.abs(loss - 2 * (1 - positive)))
    return np.where(loss < -1 - ROUNDING, np.inf, off)


def _is_distance(signs: Signs) -> bool:
    """Whether the loss is proportional to the squared distance of the two views, so that small z are all it asks for.

    Both are compared since the distance halved.
    """
    distance = _distance(signs)
    before = np.flatnonzero(distance >= HALVED * distance[-1])
    if not len(before):
        return False
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = signs.loss[before[-1] :] / distance[before[-1] :]
    return bool((ratios > 0).all() and ratios.max() <= np.exp(CONSTANT) * ratios.min() < np.inf)


def _distance(signs: Signs) -> Floats:
    """Half of the mean squared distance of two views of equal length: (1 − p) E‖z‖²."""
    return np.asarray((signs.variance + signs.mean_square) * (1 - signs.positive))


def _never_started(signs: Signs, d: int) -> bool:
    """Whether a contrastive loss, or one over d prototypes, has not been clearly below its value for equal z since its
    first records."""
    n, loss = signs.batch[-1], signs.loss[np.isfinite(signs.loss)]
    equal = np.log([k for k in (2 * n - 1, n, d) if k > 1])
    if not len(loss) or not len(equal):
        return False
    least = loss[min(FIRST, len(loss) - 1) :].min()
    return bool(((np.abs(loss[-1] / equal - 1) <= AT_VALUE) & (least >= (1 - 2 * AT_VALUE) * equal)).any())


def _beyond(lam: Floats, level: float, loss: Floats, rest: Rest) -> bool:
    """Whether few dimensions hold C, and its first eigenvalue is far above its plateau, though the loss has fallen."""
    recent = slice(-RECORDS, None)
    narrow = few(lam[recent], rest.where(recent)) & (lam[recent, 0] > BEYOND * level)
    return bool(len(lam) >= SOONEST and narrow.all() and loss[-1] <= LESS * loss[0])


def _alone(lam: Floats, signs: Signs, rest: Rest) -> bool:
    """Whether one dimension has held nearly all the variance for a while, although the loss has fallen."""
    width, d = max(SOONEST, round(0.05 * len(lam))), lam.shape[1] + rest.number
    loss = signs.loss[np.isfinite(signs.loss)]
    if d < FEWEST or len(lam) < width or not len(loss):
        return False
    if signs.variance[-1] < 0.5 * signs.variance[-width]:  # the scale of z has not settled
        return False
    if not 0 < loss[-1] <= min(CHEAP * loss[0], RISEN * loss.min(), CHARGED * d * (d - 1)):
        return False
    others = _others(lam[-width:], rest.where(slice(-width, None)))
    lower = others[-1] <= 0.5 * (1 - ALONE) or others[-2:].mean() <= 1.1 * others[:2].mean()
    return bool((others <= 1 - ALONE).all() and lower)


def _others(lam: Floats, rest: Rest) -> Floats:
    """Share of the variance outside of the largest dimension, (T,)."""
    return np.asarray(1 - np.maximum(lam[:, 0], 0) / np.maximum(rest.totals(lam)[:, 0], 1e-300))


def shrinks(signs: Signs) -> bool:
    """Whether z becomes shorter because that is what the loss asks for: loss and distance of the views fall alike."""
    distance = _distance(signs)
    if not np.isfinite(distance).any():
        return False
    most = int(np.nanargmax(distance))
    with np.errstate(divide="ignore", invalid="ignore"):
        fall, lost = np.log(distance[most] / distance[-1]), np.log(np.nanmax(signs.variance) / signs.variance[-1])
        ratios = np.log(signs.loss[most:] / distance[most:])
    return bool(min(fall, lost) >= SHRINKS and np.isfinite(ratios).all() and np.ptp(ratios) <= FOLLOWS * fall)
