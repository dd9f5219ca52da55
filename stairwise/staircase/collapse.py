"""Collapse, judged in the geometry of the loss: directions of z, total variance, and the share of few dimensions.

A collapse that was named stays named until it is plainly mended, so that noise does not revoke it.
"""

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.growth import Rest
from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]

FIRST = 3  # index of the first record at which a collapse may be seen
RECENT = 5  # records over which a trend is judged
SOONEST = 6  # the first records may overshoot: most kinds of collapse are named from this one on

# All embeddings point the same way
ALIKE, APART = 0.9, 0.1  # if the cosine of negatives is above the first, and of positives at most the second closer
CONSISTENT = 0.5  # The mean may only have drifted: what differs then agrees between views, at least this much,
SURELY, DRIFTING = 0.985, 0.75  # or this much, if the cosine is as high.
EQUAL = 0.998  # Below this cosine, embeddings that come to differ are no collapse: views agree better
CHOSEN, AT_MOST = 0.6, 1.3  # Or a loss over d prototypes, never above the second multiple of ln d, is below the first,
DEARER = 0.75  # and below this share of what Barlow Twins asks for views that agree so little: all choose the same one,
ALWAYS, STARTED = 0.5, 1.15  # or it is below and began below these multiples, and the cosine has always been high.
MENDING = 0.04  # by this much over the latest records,
LONG, SLOWLY = 6, 0.03  # or by this much over so many, where the loss is a cosine, as for SimSiam
NEAR, NEAR_C = 0.08, 0.5  # C has learned its constant mode, which is no collapse, if ‖mean of z‖² is 1 up to this,
UNIT = 0.01  # unless z is normalized: variance and ‖mean of z‖² sum to 1, up to this, at every record

# Embeddings are a point, zero, or small
SAME = 1e-8  # a point: the variance is below this multiple of the squared mean
GONE = 1e-6  # zero: nothing is left above this share of the largest variance and mean
LOST, LOSING = 0.02, 0.1  # small, or becoming so: the variance is below this share of its maximum,
DISAGREE = 0.5  # unless the views of a sample agree this well,
VANISHED = 1e-3  # and the loss has not fallen to this share of its maximum
UNSEEN = 1e-3  # where it was not recorded how well they agree, below this multiple of those shares
HALVED, CONSTANT = 2.0, 0.15  # the loss is a distance if their ratio is the same, in log, since that halved
SHRINKS, FOLLOWS = 0.1, 0.15  # z shrinks if distance and variance fall by this, in log, and their ratio by this share
AT_VALUE = 0.04  # a loss sits at a telling value if it is this close to it

# Few dimensions hold all
FEWEST = 16  # of at least so many dimensions,
ALONE = 0.9  # one has this share of the variance,
CHEAP = 0.6  # although the loss has fallen to this share of its first value,
COPIES, LESS = (0.6, 1.5), 0.9  # or to this one, where the variance is d up to these factors: coordinates are copies
RISEN = 1.5  # not if the loss has risen to this multiple of its minimum,
BARLOW = 0.0051  # usual weight of redundancy reduction
CHARGED = 0.5 * BARLOW  # not if the loss is above this times d(d − 1): Barlow Twins still sees the redundancy
FEW = (12, 8)  # Or the variance is in d/12 dimensions (participation ratio), or 8, and coordinates are copies of them:
LARGE = 4.0  # the variance is at least as above, and at most this times d,
CONTRASTIVE = 1.2  # the loss has been above this multiple of any contrastive loss,
FREE = 0.5  # and is below this share of what VICReg and Barlow Twins charge for that.
TINY, TINY_CHARGE = 0.05, 0.1  # Or it is below these shares of its maximum and of what Barlow Twins charges
SURE = 3  # Or at so many records the variance is in so few dimensions, and one of these holds:
BEYOND = 2.0  # the first eigenvalue of C is above this multiple of its plateau, to which a healthy loss pulls it back,
UNPAID = 0.6  # coordinates are copies, and the loss is below this share of the least that Barlow Twins can have,
HELD, STEADY, HINGE = (0.9, 1.25), 1.1, 0.25  # VICReg holds the variance at d, steadily, and does not charge this much,
FEWER, FALLEN = 0.6, 0.5  # dimensions are this share of the most there were, and the loss is this share of that then

# Mended
APART_AGAIN, AGREE_AGAIN = (0.85, 0.15), 0.9  # cosine of negatives, or how much closer positives are; agreement
GROWN_AGAIN = 0.2  # the variance, as a share of its maximum
SHARED_AGAIN = 0.25  # the share of all dimensions but one; and twice as many dimensions as count as few

KINDS = ("zero", "point", "variance", "falling", "one", "few")


class Collapses:
    """Collapses at any record of spectra (T, d), judged by the records up to it."""

    def __init__(self, lam: Floats, level: float | None, signs: Signs, rest: Rest) -> None:
        self.lam, self.level, self.signs, self.rest = lam, level, signs, rest
        self.seen: dict[int, tuple[str, str]] = {}
        self.mended = _mended(lam, signs, rest)

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
        if i not in self.seen:
            past = slice(i + 1)
            self.seen[i] = _seen(self.level, self.lam[past], self.signs.where(past), self.rest.where(past))
        return self.seen[i]


def _seen(level: float | None, lam: Floats, signs: Signs, rest: Rest) -> tuple[str, str]:
    """State and kind of a collapse that the last record shows."""
    d = lam.shape[1] + rest.number
    v, ms = _tail(signs.variance), _tail(signs.mean_square)
    most = float(np.nanmax(signs.variance)) if np.isfinite(signs.variance).any() else np.nan
    if v[-1] <= GONE * most and not ms[-1] > GONE * np.nanmax(signs.mean_square, initial=0.0):
        return "collapsed", "zero"
    apart = len(lam) >= SOONEST and not signs.agreement > DISAGREE  # the first records may overshoot
    sure = UNSEEN if np.isnan(signs.agreement) else 1.0
    distance = len(lam) >= SOONEST and _is_distance(signs)
    if (distance or not _mean_learned(level, signs)) and (
        v[-2:].max() <= VANISHED * most or not _never_started(signs, d)
    ):
        if _alike(signs, most) or _one_prototype(signs, d):
            return "collapsed", "point"
        if v[-2:].max() <= sure * LOST * most and (
            ((apart or distance) and v[-1] <= 1.3 * v.min()) or _vanished(signs)
        ):
            return "collapsed", "variance"
        if v[-2:].max() <= sure * LOSING * most and ((apart and v[-1] <= 0.5 * v[0]) or distance):
            return "collapsing", "falling"
    if _alone(lam, level, signs, rest):
        return "collapsed", "one"
    few = _few(lam, level, signs, rest) or _plainly_few(lam, level, signs, rest)
    return ("collapsed", "few") if few else ("", "")


def _mended(lam: Floats, signs: Signs, rest: Rest) -> dict[str, NDArray[np.bool_]]:
    """At which records there is evidence that a collapse of each kind is over, (T,)."""
    negative, gap = signs.negative, signs.positive - signs.negative
    most = np.fmax.accumulate(signs.variance)
    agree = (signs.agreements >= AGREE_AGAIN) & ~_cosines(signs)
    grown = ~(signs.variance <= GROWN_AGAIN * most)
    return dict.fromkeys(("zero", "variance", "falling"), grown) | {
        "point": ~((negative >= APART_AGAIN[0]) & (gap <= APART_AGAIN[1])) | agree,
        "one": _others(lam, rest) > SHARED_AGAIN,
        "few": participation(lam, rest) > 2 * _at_most(lam.shape[1] + rest.number),
    }


def one_point(signs: Signs) -> bool:
    """Whether all embeddings are the same point up to rounding, also if they have been so from the start."""
    return bool(signs.variance[-1] <= SAME * signs.mean_square[-1])


def _mean_learned(level: float | None, signs: Signs) -> bool:
    """Whether C has learned, or is learning, its constant mode, whose eigenvalue ‖mean of z‖² goes to 1."""
    if (np.abs(signs.variance + signs.mean_square - 1) <= UNIT).all():  # z is normalized, and always of norm 1
        return False
    first, now = _tail(signs.mean_square)[[0, -1]]
    near = abs(now - 1) <= (NEAR_C if level is not None else NEAR)
    return bool(near or (1.1 * first < now < 1 and not _is_cosine(signs)))


def _tail(values: Floats) -> Floats:
    return values[-RECENT:]


def _alike(signs: Signs, most: float) -> bool:
    """Whether all embeddings point the same way, and do not begin to differ.

    A mean that drifts makes cosines large without harm to losses that centre z: then what is left differs more between
    samples than between views. `most` is the largest variance so far.
    """
    negative, gap = signs.negative[-3:], signs.positive[-3:] - signs.negative[-3:]
    if not ((negative >= ALIKE).all() and (gap <= APART).all()) or negative[-1] < _tail(signs.negative).max() - 0.015:
        return False
    now, cosine = signs.agreement, _is_cosine(signs)
    if negative[-1] < EQUAL and (len(signs.loss) < SOONEST or now > _tail(signs.agreements).min() + MENDING):
        return False
    if negative[-1] < SURELY:
        return bool(now < CONSISTENT or (cosine and now < signs.agreements[-LONG:].min() + SLOWLY))
    return bool(now < DRIFTING or cosine or signs.variance[-1] <= LOST * most or _vanished(signs))


def _one_prototype(signs: Signs, d: int) -> bool:
    """Whether a loss over d prototypes falls because all samples choose the same one."""
    loss, now = signs.loss / np.log(max(d, 2)), slice(-SURE, None)
    if d < FEWEST or len(loss) < SOONEST or not (loss[np.isfinite(loss)] <= AT_MOST).all():
        return False
    alike = (signs.negative[now] >= ALIKE) & (signs.positive[now] - signs.negative[now] <= APART)
    if not (alike & (loss[now] > 0)).all() or not loss[-1] <= LESS * loss[0]:
        return False
    price = np.minimum(CHOSEN * np.log(d), DEARER * d * (1 - signs.agreements[now]) ** 2)
    always = loss[0] <= STARTED and (signs.negative[FIRST:] >= ALIKE).all()
    return bool((signs.loss[now] <= price).all() or (always and (loss[now] <= ALWAYS).all()))


def _vanished(signs: Signs) -> bool:
    """Whether the loss has vanished, as it does where small embeddings are all that it asks for."""
    loss = np.abs(signs.loss[np.isfinite(signs.loss)])
    return bool(len(loss) > 1 and loss[-2:].max() <= VANISHED * loss.max())


def _is_cosine(signs: Signs) -> bool:
    """Whether the loss is a function of the positive cosine alone, −cos or 2 − 2 cos."""
    return bool(_cosines(signs)[-1])


def _cosines(signs: Signs) -> NDArray[np.bool_]:
    loss, positive = signs.loss, signs.positive
    return np.asarray(np.minimum(np.abs(loss + positive), np.abs(loss - 2 * (1 - positive))) <= 0.05)


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
    """Whether a contrastive loss, or one over d prototypes, has never been clearly below its value for equal z."""
    n, loss = signs.batch[-1], signs.loss[np.isfinite(signs.loss)]
    equal = np.log([k for k in (2 * n - 1, n, d) if k > 1])
    if not len(loss) or not len(equal):
        return False
    return bool(((np.abs(loss[-1] / equal - 1) <= AT_VALUE) & (loss.min() >= (1 - 2 * AT_VALUE) * equal)).any())


def _alone(lam: Floats, level: float | None, signs: Signs, rest: Rest) -> bool:
    """Whether one dimension has held nearly all the variance for a while, although the loss has fallen."""
    width, d = max(SOONEST, round(0.05 * len(lam))), lam.shape[1] + rest.number
    loss = signs.loss[np.isfinite(signs.loss)]
    if d < FEWEST or len(lam) < width or not len(loss):
        return False
    if signs.variance[-1] < 0.5 * signs.variance[-width]:  # the scale of z has not settled
        return False
    if loss[-1] > RISEN * loss.min():
        return False
    copies = COPIES[0] * d <= signs.variance[-1] <= COPIES[1] * d
    charged = level is None and not copies and loss[-1] >= CHARGED * d * (d - 1)
    if charged or not 0 < loss[-1] <= (LESS if copies else CHEAP) * loss[0]:
        return False
    recent = np.maximum(lam[-width:], 0)
    if level is not None and not (recent[:, 0] > 2 * level).all():
        return False
    others = _others(lam[-width:], rest.where(slice(-width, None)))
    lower = others[-1] <= 0.5 * (1 - ALONE) or others[-2:].mean() <= 1.1 * others[:2].mean()
    return bool((others <= 1 - ALONE).all() and lower)


def _others(lam: Floats, rest: Rest) -> Floats:
    """Share of the variance outside of the largest dimension, (T,)."""
    return np.asarray(1 - np.maximum(lam[:, 0], 0) / np.maximum(rest.totals(lam)[:, 0], 1e-300))


def _few(lam: Floats, level: float | None, signs: Signs, rest: Rest) -> bool:
    """Whether few dimensions have held the variance for a while, and the loss does not charge for it."""
    d, loss = lam.shape[1] + rest.number, signs.loss[np.isfinite(signs.loss)]
    if d < FEWEST or len(lam) < SOONEST or not len(loss) or not 0 < loss[-1] <= LESS * loss[0]:
        return False
    used = np.maximum(participation(lam[-RECENT:], rest.where(slice(-RECENT, None))), 1.0)
    if not (used <= _at_most(d)).all() or used[-1] > 1.1 * used[0] or not signs.negative[-1] < ALIKE:
        return False
    charge = BARLOW * d * (d / used[-1] - 1)
    if loss[-1] <= min(TINY * loss.max(), TINY_CHARGE * charge):
        return True
    contrastive = not loss.max() > CONTRASTIVE * np.log(2 * signs.batch[-1])
    if level is not None or contrastive or not signs.agreement >= AGREE_AGAIN:
        return False
    return loss[-1] <= FREE * charge and copied(lam, signs, rest)


def _plainly_few(lam: Floats, level: float | None, signs: Signs, rest: Rest) -> bool:
    """Whether few dimensions hold the variance, and the loss shows that nothing keeps it from staying so."""
    d, loss = lam.shape[1] + rest.number, signs.loss
    if d < FEWEST or len(lam) < SOONEST or not np.isfinite(loss).all() or not 0 < loss[-1] <= LESS * loss[0]:
        return False
    used = np.maximum(participation(lam, rest), 1.0)
    if not (used[-SURE:] <= _at_most(d)).all():
        return False
    if level is not None and (lam[-SURE:, 0] > BEYOND * level).all():
        return True
    if not loss.max() > CONTRASTIVE * np.log(2 * signs.batch[-1]):
        return False
    most = SOONEST - 1 + int(np.argmax(used[SOONEST - 1 :]))
    fewer = (used[-SURE:] <= FEWER * used[most]) & (loss[-SURE:] <= FALLEN * loss[most])
    return bool(fewer.all() or (level is None and _not_charged(used, d, signs)))


def _not_charged(used: Floats, d: int, signs: Signs) -> bool:
    """Whether d coordinates are copies of few dimensions, and the loss is below that of Barlow Twins or VICReg."""
    loss, few, variance = signs.loss[-SURE:], used[-SURE:], _tail(signs.variance) / d
    copies = (variance[-SURE:] >= COPIES[0]) & (variance[-SURE:] <= LARGE) & (signs.negative[-SURE:] < ALIKE)
    cheap = loss <= np.minimum(UNPAID * _least(few, d), FREE * (d / few - 1))
    held = HELD[0] <= variance.min() and variance.max() <= min(HELD[1], STEADY * variance.min())
    return bool((copies & cheap).all() or (held and (loss <= HINGE * (d / few - 1)).all()))


def _least(used: Floats, d: int) -> Floats:
    """The least loss of Barlow Twins if d coordinates are copies of so many dimensions: min over ρ of
    d (1 − ρ)² + w d (d/used − 1) ρ², for views of correlation ρ and its usual weight w."""
    charge = BARLOW * (d / used - 1)
    return np.asarray(d * charge / (1 + charge))


def copied(lam: Floats, signs: Signs, rest: Rest) -> bool:
    """Whether the coordinates are copies of few dimensions, and the loss is below what VICReg charges for that."""
    d, variance, loss = lam.shape[1] + rest.number, signs.variance[-1], signs.loss[-1]
    used = max(float(participation(lam[-1:], rest.where(slice(-1, None)))[0]), 1.0)
    if d < FEWEST or used > _at_most(d) or not COPIES[0] * d <= variance <= LARGE * d:
        return False
    return bool(0 < loss <= FREE * (d / used - 1))


def _at_most(d: int) -> float:
    """The largest number of dimensions that counts as few."""
    return min(d / FEW[0], FEW[1])


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


def participation(lam: Floats, rest: Rest) -> Floats:
    """How many dimensions share the variance: (Σλ)²/Σλ², (T,)."""
    return np.asarray(rest.totals(lam) ** 2 / np.maximum(rest.squares(lam), 1e-300))[:, 0]
