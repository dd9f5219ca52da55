"""What a run is doing, in words: its state, the evidence for it, and what to do.

States are judged from the records alone, each record by itself and those before it. "Finished" is said only for a
reason: every dimension is in use, or nothing below is on its way and either nothing has grown for longer than in all
earlier waits together, or the views agree so well that little is left to learn.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, number, vector
from stairwise.staircase import words
from stairwise.staircase.clock import Clock
from stairwise.staircase.collapse import collapse, one_point
from stairwise.staircase.forecast import Forecast, forecast_steps
from stairwise.staircase.growth import Growth, History
from stairwise.staircase.signs import Signs
from stairwise.staircase.steps import FEWEST

Floats = NDArray[np.float64]

STATES = (
    "not started",
    "learning",
    "waiting",
    "finished",
    "cannot tell yet",
    "collapsing",
    "collapsed",
    "diverged",
)
ENOUGH = 4  # records that are needed to tell anything
HUGE_LOSS, HUGE = 1e10, 1e30  # losses and eigenvalues above these are as good as infinite
STILL = 0.25  # a run has not started if no leading eigenvalue has changed by more than this, in log λ,
STEADY = 0.3  # nor the total variance by more than this
GROWING = 0.35  # a run whose total variance has grown by this much, in log, over five records, is not finished
SETTLED = 3  # records without growth after which a run with all dimensions in use is finished
SEVERAL = 3  # a run with unused dimensions is finished only if it has learned at least this many,
LONG = 0.5  # if none has grown for this share of the records,
SHORT, AGREED = 0.1, 0.94  # or for this share, if the views agree so far that little is left to learn from them,
FAR = 4.0  # and if at their pace the next ones would need this multiple of the time so far
LOOK = 0.1  # what has changed is told since this share of the run ago


@dataclass(frozen=True)
class Advice:
    """What a run is doing, why we say so, and what to do.

    Attributes:
        state: one of `STATES`.
        learned: number of dimensions learned; every table and sentence uses this count.
        dimensions: d.
        evidence: sentences, the most important first.
        remedy: what to do; empty if nothing.
    """

    state: str
    learned: int
    dimensions: int
    evidence: tuple[str, ...]
    remedy: str = ""

    def __str__(self) -> str:
        return " ".join([f"{self.state.capitalize()}.", *self.evidence, self.remedy]).strip()


def advise(
    t: ArrayLike,
    lam: ArrayLike,
    clock: Clock | None = None,
    level: float | None = 1.0,
    signs: Signs | None = None,
    ahead: Forecast | None = None,
) -> Advice:
    """Say what a run is doing at its last record.

    Arguments:
        t: times of the records, increasing, (T,).
        lam: eigenvalues of C or of the covariance, descending, (T, d); rows that are not finite mean divergence.
        clock: converts times into steps and hours.
        level: plateau of learned dimensions: 1 for C. None: unknown, as for covariances.
        signs: what else was measured; without it collapse is judged from the eigenvalues alone.
        ahead: the forecast, if already computed.

    Example:
        >>> t = np.linspace(0, 1.5, 100)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [2.0, 1.0, 0.9])))
        >>> says = advise(t, lam)
        >>> says.state, says.learned
        ('learning', 1)
        >>> print(*says.evidence, sep="\\n")
        1 of 3 dimensions is in use; dimension 2 is rising, 8.8-fold in the latest records.
        Dimension 2 comes next, expected at t = 1.7 (80 %: 1.65 to 1.79).
        All dimensions are expected by t = 1.87.
    """
    judge = Judge(t, lam, level, signs)
    if ahead is None and judge.forecasts:
        ahead = forecast_steps(judge.t, judge.lam, level=level)
    return judge.says(clock=clock, ahead=ahead)


class Judge:
    """Judges any record of a run by the records up to it."""

    def __init__(self, t: ArrayLike, lam: ArrayLike, level: float | None = 1.0, signs: Signs | None = None) -> None:
        every, times = _numbers(lam), vector(t, "t")
        if every.ndim != 2 or every.size == 0:
            raise InputError("lam", "must be a matrix, one row per record", f"shape {every.shape}")
        if len(times) != len(every):
            raise InputError("t", f"must have {len(every)} times, one per row of lam", len(times))
        if not (np.diff(times) > 0).all():
            raise InputError("t", "must increase", None, "sort the records and drop repeated ones")
        if level is not None:
            level = number(level, "level", above=0.0)
        signs = signs if signs is not None else Signs.unknown(every)
        if len(signs.loss) != len(every):
            raise InputError("signs", f"must have {len(every)} values each, one per row of lam", len(signs.loss))
        size = np.abs(np.nan_to_num(every, nan=np.inf)).max(axis=1)
        self.whole: NDArray[np.bool_] = np.asarray((size < HUGE) & ~(signs.loss >= HUGE_LOSS))
        self.times, self.losses, self.level = times, signs.loss, level
        self.t, self.lam, self.signs = times[self.whole], every[self.whole], signs.where(self.whole)
        self.history = History(self.lam, level)

    @property
    def forecasts(self) -> bool:
        """Whether there are enough finite records for a forecast."""
        return len(self.t) >= FEWEST and bool(self.whole[-1])

    def says(self, record: int | None = None, clock: Clock | None = None, ahead: Forecast | None = None) -> Advice:
        """What is to be said at a record, by default the last."""
        at = len(self.whole) - 1 if record is None else record
        if not 0 <= at < len(self.whole):
            raise InputError("record", f"must be from 0 to {len(self.whole) - 1}", at)
        i, d = int(self.whole[: at + 1].sum()) - 1, self.lam.shape[1]
        if not self.whole[at]:
            loss = float(self.losses[at])
            evidence = words.lost(self.times, self.whole[: at + 1], loss if loss >= HUGE_LOSS else np.nan, clock)
            learned = self.history.at(i).learned if i >= 0 else 0
            return Advice("diverged", learned, d, (evidence,), words.REMEDIES["diverged"])
        if i + 1 < ENOUGH:
            return Advice("cannot tell yet", 0, d, (words.few(i + 1, ENOUGH),))
        now, signs, lam = self.history.at(i), self.signs.until(i + 1), self.lam[: i + 1]
        state, kind = self._state(i, now, signs)
        if kind in words.COLLAPSES:
            evidence, remedy = words.collapsed(kind, lam, signs)
            return Advice(state, now.learned, d, (evidence, *words.telling(signs, d)), remedy)
        idle = state == "not started"
        evidence, remedy = words.idle(now, lam, self.level) if idle else words.moving(kind or state, now, lam, signs)
        more = [] if state == "finished" else words.outlook(now, state, clock, ahead)
        learned = 0 if idle else now.learned
        return Advice(state, learned, d, (evidence, *self._change(i, learned), *more, *words.telling(signs, d)), remedy)

    def _change(self, i: int, learned: int) -> list[str]:
        """How many dimensions were learned a tenth of the run ago, if it was another number."""
        ago = i - max(1, round(LOOK * i))
        before = self.history.at(ago).learned
        if not learned or before in (0, learned):
            return []
        return [words.said("change", t=self.t[ago], before=before, were="was" if before == 1 else "were")]

    def _state(self, i: int, now: Growth, signs: Signs) -> tuple[str, str]:
        """The state, and where the words depend on more than the state, their kind."""
        d, records = self.lam.shape[1], i + 1
        if one_point(signs):
            return "collapsed", "same"
        if self.level is None and now.moved < STILL and _steady(signs.variance):
            return "not started", ""
        state, kind = collapse(self.lam[: i + 1], self.level, signs)
        if state:
            return state, kind
        if self.level is not None and now.learned == 0:
            return "not started", ""
        if len(now.rising):
            return "learning", ""
        if records < FEWEST or _grows(signs.variance):
            return ("learning", "too early") if now.learned >= d else ("waiting", "")
        if now.learned >= d:
            return ("finished" if now.quiet >= SETTLED else "learning"), ""
        if now.arrival < FAR * records:
            return "waiting", ""
        if now.learned >= SEVERAL and now.quiet >= max(5, LONG * records):
            return "finished", ""
        if now.learned >= 2 and signs.agreement >= AGREED and now.quiet >= max(3, SHORT * records):
            return "finished", "agreed"
        return "waiting", ""


def _numbers(lam: ArrayLike) -> Floats:
    """A float64 array that need not be finite."""
    try:
        return np.asarray(lam, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("lam", "must be real numbers", type(lam).__name__, "give a matrix, records × modes") from None


def _grows(variance: Floats) -> bool:
    """Whether the total variance still grows, so that dimensions that grow alike are not called settled."""
    first, last = variance[-5:][0], variance[-1]
    return bool(first > 0 and last > 0 and np.log(last / first) > GROWING)


def _steady(variance: Floats) -> bool:
    first, last = np.median(variance[:3]), np.median(variance[-3:])
    return not (first > 0 and last > 0) or bool(abs(np.log(last / first)) < STEADY)
