"""Every sentence that the advice can say, and the numbers that go into it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.clock import Clock, duration
from stairwise.staircase.forecast import Forecast
from stairwise.staircase.growth import Growth, Rest
from stairwise.staircase.redundancy import participation
from stairwise.staircase.signs import Signs, telling_value

Floats = NDArray[np.float64]
FALLEN = 0.1  # share of its first value by which a loss has fallen clearly
SHOWN = 4  # rising dimensions that are named
MEAN = 0.5  # the largest eigenvalue of C is called the mean's if ‖mean of z‖² is at least this share of it

SENTENCES = {
    "too few": "There {have} so far; {needed} are needed.",
    "few pairs": "The record has {samples:,.0f} pairs of the {wanted:,.0f} that {d} dimensions need, so its spectrum "
    "says little.",
    "not finite": "The embeddings have not been finite since {when}.",
    "huge loss": "The loss is {loss:.2g}, as good as infinite.",
    "zero": "The embeddings have become zero.",
    "same": "All embeddings are the same point, up to rounding.",
    "point": "All embeddings point the same way: the cosine of different samples is {negative:.2f}, that of two views "
    "of one sample {positive:.2f}.",
    "variance": "The total variance has fallen to {share:.1g} of its maximum.",
    "falling": "The total variance has fallen to {share:.1g} of its maximum and is still falling.",
    "one": "One of {d} dimensions holds {share:.0f} % of the variance, although the loss has fallen to {loss:.0f} % of "
    "its first value: dimensional collapse.",
    "few": "The variance of {d} coordinates is in {few:.1f} dimensions (participation ratio), and a loss of {loss:.2g} "
    "does not charge for that: dimensional collapse.",
    "kept": "This was last seen at t = {t:.3g}, and nothing shows that it is mended.",
    "still": "The shape of the spectrum has not moved since the first record: no leading eigenvalue's share changed by "
    "more than {moved:.0f} %.",
    "none yet": "None of {d} dimensions has been learned: the largest eigenvalue of C is {top:.2g}, and a learned one "
    "is near {level:.2g}.",
    "rising": "{learned} of {d} dimensions {are} in use; {which}, {gain} in the latest records.",
    "joined": "{learned} of {d} dimensions {are} in use; the last one has just joined.",
    "too early": "All dimensions are in use (d = {d}); it is too early to say that they have settled.",
    "quiet": "{learned} of {d} dimensions {are} in use, and none has grown for {wait}.",
    "all in use": "All dimensions are in use (d = {d}), and none has grown for {wait}.",
    "no more": "{learned} of {d} dimensions {are} in use; none has grown for {quiet} of {records} records, and at "
    "their pace the next ones would need more than four times as long as the run has lasted.",
    "agreed": "{learned} of {d} dimensions {are} in use; none has grown for {quiet} of {records} records, and the "
    "views of a sample agree to {agreement:.0f} %, so that little is left to learn.",
    "change": "{before} {were} in use at t = {t:.3g}.",
    "next": "Dimension {mode} comes next, expected at t = {time:.3g} ({coverage:.0f} %: {low:.3g} to "
    "{high:.3g}){when}.",
    "soon": "{more} expected soon.",
    "all by": "All dimensions are expected by t = {time:.3g}{when}.",
    "below": "Below them dimension {mode} is growing.",
    "nothing below": "Nothing can be seen growing below them, which is no reason to stop.",
    "unseen": "Only the {k} leading eigenvalues are recorded, and all of them are in use; the others are seen in "
    "their sum only.",
    "shrinking": "The loss falls only as z becomes shorter, which is no progress: the total variance is {share:.2g} of "
    "its maximum.",
    "mean mode": "The largest eigenvalue of C, {top:.2g}, comes mainly from the mean of z, since ‖mean of z‖² is "
    "{mean:.2g}: C is not centred.",
    "telling loss": "The loss is {loss:.4g}, which is {name}: {meaning}.",
}
REMEDIES = {
    "diverged": "Go back to a checkpoint before it and lower the learning rate; in half precision, check the loss "
    "scale.",
    "point": "Check what keeps different samples apart (negatives, variance term, stop-gradient or centring), and "
    "lower the learning rate.",
    "variance": "Check the term that keeps the variance up, lower the learning rate, and go back to an earlier "
    "checkpoint.",
    "one": "Check the term that decorrelates dimensions, and give it more weight.",
    "still": "Check that the optimizer has the network's parameters and that the learning rate is not far too small.",
    "falls": "The loss falls all the same, so the network learns: look again later.",
    "all in use": "Stop, or use a larger d.",
    "no more": "Stop here, or choose d near {learned}; a larger batch may carry more dimensions.",
}
COLLAPSES = {
    "zero": "variance",
    "same": "point",
    "point": "point",
    "variance": "variance",
    "falling": "variance",
    "one": "one",
    "few": "one",
}


class Seen(NamedTuple):
    """What the words about a record are made from: the records up to it, and what moves at it.

    Attributes:
        now: what moves.
        lam: the followed spectrum, (T, k).
        signs: what else was measured.
        rest: the eigenvalues below `lam`.
        level: the plateau; None if unknown.
    """

    now: Growth
    lam: Floats
    signs: Signs
    rest: Rest
    level: float | None

    @property
    def d(self) -> int:
        return self.lam.shape[1] + self.rest.number

    @property
    def at_least(self) -> bool:
        """Whether all recorded eigenvalues are in use, so that others may be, too."""
        return self.now.learned >= self.lam.shape[1] and self.rest.number > 0


def said(kind: str, /, **values: object) -> str:
    return SENTENCES[kind].format(**values)


def few(records: int, needed: int) -> str:
    return said("too few", have=f"{'is' if records == 1 else 'are'} {counted(records)}", needed=needed)


def lost(t: Floats, whole: NDArray[np.bool_], loss: float, clock: Clock | None) -> str:
    """Why a run counts as diverged at the last of these records; `loss` is NaN unless it is the reason."""
    if np.isfinite(loss):
        return said("huge loss", loss=loss)
    first = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
    when = "the first record" if first == 0 else f"t = {t[first]:.3g}{moment(clock, t[first])}"
    return said("not finite", when=when)


def few_pairs(samples: Floats, wanted: Floats, record: int, d: int) -> str:
    return said("few pairs", samples=samples[record] if len(samples) else 0, wanted=wanted[record], d=d)


def change(t: float, before: int, at_least: bool) -> str:
    """How many dimensions were in use at another time."""
    return said("change", t=t, before=_amount(before, at_least), were="was" if before == 1 else "were")


def _amount(learned: int, at_least: bool) -> str:
    return f"At least {learned}" if at_least else str(learned)


def collapsed(kind: str, seen: Seen) -> tuple[str, str]:
    """Evidence and remedy of a collapse."""
    signs = seen.signs
    if kind == "point":
        words = said("point", negative=signs.negative[-1], positive=signs.positive[-1])
    elif kind == "one":
        losses, total = signs.loss[np.isfinite(signs.loss)], float(seen.rest.totals(seen.lam)[-1, 0])
        share = 100 * max(seen.lam[-1, 0], 0.0) / max(total, 1e-300)
        words = said("one", d=seen.d, share=share, loss=100 * losses[-1] / losses[0])
    elif kind == "few":
        used = float(participation(seen.lam[-1:], seen.rest.where(slice(-1, None)))[0])
        words = said("few", d=seen.d, few=used, loss=signs.loss[-1])
    else:
        most = float(np.nanmax(signs.variance)) if np.isfinite(signs.variance).any() else np.nan
        words = said(kind, share=signs.variance[-1] / max(most, 1e-300))
    return words, REMEDIES[COLLAPSES[kind]]


def idle(seen: Seen) -> tuple[str, str]:
    """Evidence and remedy of a run that has not started."""
    moved, remedy = seen.now.moved, REMEDIES["falls" if _falls(seen.signs.loss) else "still"]
    if seen.level is None:
        return said("still", moved=100 * np.expm1(moved)), remedy
    remedy = remedy if moved < 0.05 else ""
    return said("none yet", d=seen.d, top=seen.lam[-1, 0] + 0.0, level=seen.level), remedy


def _falls(loss: Floats) -> bool:
    """Whether the loss has fallen clearly since the first record."""
    return len(loss) > 1 and bool(loss[0] - loss[-1] > FALLEN * abs(loss[0]))


def moving(state: str, seen: Seen) -> tuple[str, str]:
    """Evidence and remedy of a run that is learning, waiting or finished, or of one of the kinds in which it is so."""
    now, records, d = seen.now, len(seen.lam), seen.d
    numbers = {"learned": _amount(now.learned, seen.at_least), "d": d, "quiet": now.quiet, "wait": counted(now.quiet)}
    numbers |= {"are": "is" if now.learned == 1 else "are"}
    if state == "learning":
        if not len(now.rising) and not now.unseen:
            return said("joined", **numbers), ""
        gain = _factor(now.gains[now.rising].max(initial=0.0) or now.unseen)
        return said("rising", which=_rising(now), gain=gain, **numbers), ""
    if state == "too early":
        return said("too early", **numbers), ""
    if state == "agreed":
        words = said("agreed", records=records, agreement=100 * seen.signs.agreement, **numbers)
        return words, REMEDIES["no more"].format(**numbers)
    if state == "finished":
        kind = "all in use" if now.learned >= d else "no more"
        return said(kind, records=records, **numbers), REMEDIES[kind].format(**numbers)
    return said("quiet", **numbers), ""


def _rising(now: Growth) -> str:
    names = [str(j + 1) for j in now.rising]
    if not names:
        return "those that are not recorded are rising"
    if len(names) == 1:
        return f"dimension {names[0]} is rising"
    if len(names) > SHOWN:
        return f"{len(names)} are rising"
    return f"dimensions {', '.join(names[:-1])} and {names[-1]} are rising"


def _factor(gain: float) -> str:
    """A growth in log λ.

    >>> _factor(0.2), _factor(1.0), _factor(7.0), _factor(30.0)
    ('by 22 %', '2.7-fold', '1,100-fold', '1.1e+13-fold')
    """
    factor = float(f"{np.exp(min(gain, 600.0)):.2g}")  # noise around zero may seem to grow without bounds
    if factor < 2:
        return f"by {100 * np.expm1(gain):.0f} %"
    return f"{factor:,.2g}-fold" if factor < 100 or factor > 1e6 else f"{factor:,.0f}-fold"


def counted(records: int) -> str:
    return f"{records} record{'s' * (records != 1)}"


def outlook(seen: Seen, state: str, clock: Clock | None, ahead: Forecast | None) -> list[str]:
    """What comes next."""
    now = seen.now
    if seen.at_least:
        return [said("unseen", k=seen.lam.shape[1])]
    if now.learned >= seen.lam.shape[1]:  # none is left, whatever still rises towards its plateau
        return []
    if ahead is None or len(ahead.modes) == 0:
        if state != "waiting":
            return []
        return [said("below", mode=now.coming[0] + 1) if len(now.coming) else said("nothing below")]
    k = int(np.argmin(ahead.times))
    low, time, high = (float(v[k]) for v in (ahead.low, ahead.times, ahead.high))
    when = moment(clock, time)
    # eigenvalues are sorted: whichever grows, it becomes the first of those that are not in use
    out = [said("next", mode=now.learned + 1, time=time, coverage=100 * ahead.coverage, low=low, high=high, when=when)]
    end, soon = ahead.when(1.0), ahead.nearness.count("soon")
    if np.isfinite(end):
        out.append(said("all by", time=end, when=moment(clock, end)))
    elif soon:
        out.append(said("soon", more=f"{soon} more {'is' if soon == 1 else 'are'}"))
    return out


def shrinking(seen: Seen) -> tuple[list[str], str]:
    """Evidence and remedy of a run whose embeddings become shorter, but are not small yet."""
    share = seen.signs.variance[-1] / np.nanmax(seen.signs.variance)
    return [said("shrinking", share=share)], REMEDIES["variance"]


def mean_mode(seen: Seen) -> list[str]:
    """A sentence on the mean of z, if at least half of the largest eigenvalue of C is due to it."""
    mean, top = float(seen.signs.mean_square[-1]), float(seen.lam[-1, 0])
    if seen.level is None or not (top > 0 and mean >= MEAN * top):
        return []
    return [said("mean mode", mean=mean, top=top)]


def telling(signs: Signs, d: int) -> list[str]:
    """A sentence on a loss that sits at a value that says something."""
    found = telling_value(signs, d)
    return [said("telling loss", loss=signs.loss[-1], name=found[0], meaning=found[1])] if found else []


def moment(clock: Clock | None, t: float) -> str:
    """The time t in steps and hours, as the end of a sentence."""
    if clock is None:
        return ""
    step, left = float(clock.steps(t)), float(clock.seconds_left(t))
    if not np.isfinite(step):
        return ", after the end of this run"
    return f", step {step:,.0f}" + (f", in {duration(left)}" if np.isfinite(left) and left > 0 else "")
