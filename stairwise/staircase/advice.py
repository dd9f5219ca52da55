"""What a run is doing, in words: its state, the evidence for it, and what to do.

States are judged from the records alone, each record by itself and those before it. "Finished" is said only for a
reason: every dimension is in use, or nothing below is on its way and either nothing has grown for longer than in all
earlier waits together, or the views agree so well that little is left to learn.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, instance, number, real, vector
from stairwise.staircase import words
from stairwise.staircase.clock import Clock
from stairwise.staircase.collapse import Collapses, one_point, shrinks
from stairwise.staircase.forecast import Forecast, forecast_steps
from stairwise.staircase.growth import Growth, History, Rest
from stairwise.staircase.redundancy import copied
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
SURE = ("finished", "collapsing", "collapsed")  # states that too few pairs are no reason for
ENOUGH = 4  # records that are needed to tell anything
HUGE_LOSS, HUGE = 1e10, 1e30  # losses and eigenvalues above these are as good as infinite
STILL = 0.25  # a run has not started if no leading eigenvalue has changed by more than this, in log λ,
STEADY = 0.3  # nor the total variance by more than this
GROWING = 0.35  # a run whose total variance has grown by this much, in log, over five records, is not finished
SHRUNK = 0.1  # nor is one whose total variance has fallen to this share of its maximum
SETTLED = 3  # records without growth after which a run with all dimensions in use is finished
SEVERAL = 3  # a run with unused dimensions is finished only if it has learned at least this many,
LONG = 0.5  # if none has grown for this share of the records,
SHORT, AGREED = 0.1, 0.94  # or for this share, if the views agree so far that little is left to learn from them,
FAR = 4.0  # and if at their pace the next ones would need this multiple of the time so far
DIVERGED = words.REMEDIES["diverged"]
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
        at_least: whether more may be learned than `learned`: all eigenvalues that were recorded are in use, and they
            are the leading ones only.
    """

    state: str
    learned: int
    dimensions: int
    evidence: tuple[str, ...]
    remedy: str = ""
    at_least: bool = False

    @property
    def complete(self) -> bool:
        """Whether all dimensions are learned."""
        return 0 < self.dimensions <= self.learned

    @property
    def count(self) -> str:
        """The learned dimensions, as in every table and sentence: "3 of 64", "at least 128 of 8192"."""
        return f"{'at least ' if self.at_least else ''}{self.learned} of {self.dimensions}"

    def __str__(self) -> str:
        return " ".join([f"{self.state.capitalize()}.", *self.evidence, self.remedy]).strip()


def advise(
    t: ArrayLike,
    lam: ArrayLike,
    clock: Clock | None = None,
    level: float | None = 1.0,
    signs: Signs | None = None,
    ahead: Forecast | None = None,
    dimensions: int | None = None,
    total: ArrayLike | None = None,
) -> Advice:
    """Say what a run is doing at its last record.

    Arguments:
        t: times of the records, increasing, (T,).
        lam: eigenvalues of C or of the covariance, descending, (T, d); rows that are not finite mean divergence.
        clock: converts times into steps and hours.
        level: plateau of learned dimensions: 1 for C. None: unknown, as for covariances.
        signs: what else was measured; without it collapse is judged from the eigenvalues alone.
        ahead: the forecast, if already computed.
        dimensions, total: d, and the sum of all eigenvalues at every record, (T,), if lam holds the leading ones only
            (`Record.size`, `Run.totals`).

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
    for name, given, kind in (("clock", clock, Clock), ("signs", signs, Signs), ("ahead", ahead, Forecast)):
        if given is not None:
            instance(given, name, kind)
    judge = Judge(t, lam, level, signs, dimensions, total)
    return judge.says(clock=clock, ahead=ahead if ahead is not None else judge.forecast())


class Judge:
    """Judges any record of a run by the records up to it.

    Records of too few pairs (`Signs.wanted`) are left aside once there are enough others; until then they count, but
    are never a reason to call a run finished or collapsed.
    """

    def __init__(
        self,
        t: ArrayLike,
        lam: ArrayLike,
        level: float | None = 1.0,
        signs: Signs | None = None,
        dimensions: int | None = None,
        total: ArrayLike | None = None,
    ) -> None:
        every, times = _numbers(lam), vector(t, "t")
        if every.ndim != 2 or every.size == 0:
            raise InputError("lam", "must be a matrix, one row per record", f"shape {every.shape}")
        if len(times) != len(every):
            raise InputError("t", f"must have {len(every)} times, one per row of lam", len(times))
        if not (np.diff(times) > 0).all():
            raise InputError("t", "must increase", None, "sort the records and drop repeated ones")
        if level is not None:
            level = number(level, "level", least=1e-100, most=1e100)
        rest = Rest.of(every, total, dimensions)
        signs = signs if signs is not None else Signs.unknown(every, rest)
        if len(signs.loss) != len(every):
            raise InputError("signs", f"must have {len(every)} values each, one per row of lam", len(signs.loss))
        size = np.abs(np.nan_to_num(every, nan=np.inf)).max(axis=1)
        self.whole: NDArray[np.bool_] = np.asarray((size < HUGE) & ~(signs.loss >= HUGE_LOSS))
        self.times, self.losses, self.level = times, signs.loss, level
        self.d = every.shape[1] + rest.number
        self.few, self.pairs = signs.few & self.whole, (signs.samples, signs.wanted)
        enough = ~self.few
        self.trusted = None  # a judge of the records that have enough pairs
        if self.few.any() and enough.sum() >= ENOUGH:
            sums = None if total is None else np.asarray(total, dtype=np.float64)[enough]
            self.trusted = Judge(times[enough], every[enough], level, signs.where(enough), dimensions, sums)
        self.t, self.lam, self.signs = times[self.whole], every[self.whole], signs.where(self.whole)
        self.rest = rest.where(self.whole)

    @cached_property
    def history(self) -> History:
        """Growth at the finite records."""
        return History(self.lam, self.level, self.rest)

    @cached_property
    def collapses(self) -> Collapses:
        """Collapses at the finite records."""
        return Collapses(self.lam, self.level, self.signs, self.rest)

    @property
    def forecasts(self) -> bool:
        """Whether there are enough finite records for a forecast."""
        return len(self.t) >= FEWEST and bool(self.whole[-1])

    def forecast(self, lost: bool = False) -> Forecast | None:
        """The forecast from the records that are finite and trusted; None if there are too few, or if the last one is
        not finite, unless `lost`."""
        judge = self.trusted if self.trusted is not None else self
        if not (judge.forecasts or (lost and len(judge.t) >= FEWEST)):
            return None
        total = judge.lam.sum(axis=1) + judge.rest.sum
        return forecast_steps(judge.t, judge.lam, level=judge.level, dimensions=judge.d, total=total)

    def says(self, record: int | None = None, clock: Clock | None = None, ahead: Forecast | None = None) -> Advice:
        """What is to be said at a record, by default the last."""
        at = len(self.whole) - 1 if record is None else record
        if not 0 <= at < len(self.whole):
            raise InputError("record", f"must be from 0 to {len(self.whole) - 1}", at)
        trusted = int((~self.few[: at + 1]).sum())
        if self.trusted is not None and trusted >= ENOUGH:
            advice = self.trusted.says(trusted - 1, clock, ahead)
        else:
            advice = self._says(at, clock, ahead)
        if not self.few[at]:
            return advice
        sentence = words.few_pairs(*self.pairs, at, self.d)
        if trusted < ENOUGH and advice.state in SURE:
            return replace(advice, state="cannot tell yet", evidence=(sentence,), remedy="")
        return replace(advice, evidence=(*advice.evidence, sentence))

    def _says(self, at: int, clock: Clock | None, ahead: Forecast | None) -> Advice:
        i = int(self.whole[: at + 1].sum()) - 1
        if not self.whole[at]:
            loss = float(self.losses[at])
            evidence = words.lost(self.times, self.whole[: at + 1], loss if loss >= HUGE_LOSS else np.nan, clock)
            return self._advice("diverged", self.history.at(i).learned if i >= 0 else 0, (evidence,), DIVERGED)
        if i + 1 < ENOUGH:
            return self._advice("cannot tell yet", 0, (words.few(i + 1, ENOUGH),))
        now, signs, lam = self.history.at(i), self.signs.until(i + 1), self.lam[: i + 1]
        seen = words.Seen(now, lam, signs, self.rest.where(slice(i + 1)), self.level)
        state, kind = self._state(i, now, signs)
        if kind in words.COLLAPSES:
            reasons, remedy = self._collapse(i, kind)
            return self._advice(state, now.learned, (*reasons, *words.telling(signs, self.d)), remedy)
        idle = state == "not started"
        evidence, remedy = words.idle(seen) if idle else words.moving(kind or state, seen)
        learned = 0 if idle else now.learned
        if shrinks(signs):  # dimensions come and go with the length of z: nothing is said about the next
            more, remedy = words.shrinking(seen)
        else:
            more = self._change(i, learned)
            more += [] if state == "finished" else words.outlook(seen, state, clock, ahead)
        more += [*words.mean_mode(seen), *words.telling(signs, self.d)]
        return self._advice(state, learned, (evidence, *more), remedy)

    def _advice(self, state: str, learned: int, evidence: tuple[str, ...], remedy: str = "") -> Advice:
        return Advice(state, learned, self.d, evidence, remedy, self.lam.shape[1] <= learned < self.d)

    def _collapse(self, i: int, kind: str) -> tuple[list[str], str]:
        """Evidence and remedy of a collapse, with the numbers of the record at which it was seen last."""
        j = i if kind == "same" else self.collapses.at(i)[2]
        past = slice(j + 1)
        then = words.Seen(self.history.at(j), self.lam[past], self.signs.where(past), self.rest.where(past), self.level)
        evidence, remedy = words.collapsed(kind, then)
        return [evidence, *([words.said("kept", t=self.t[j])] if j < i else [])], remedy

    def _change(self, i: int, learned: int) -> list[str]:
        """How many dimensions were learned a tenth of the run ago, if it was another number."""
        ago = i - max(1, round(LOOK * i))
        before = self.history.at(ago).learned
        if not learned or before in (0, learned):
            return []
        if before < learned and self.history.at(i).quiet >= i - ago:  # the count fluctuates, but none has grown
            return []
        return [words.change(self.t[ago], before, before >= self.lam.shape[1] and self.rest.number > 0)]

    def _state(self, i: int, now: Growth, signs: Signs) -> tuple[str, str]:
        """The state, and where the words depend on more than the state, their kind."""
        d, records = self.d, i + 1
        if one_point(signs):
            return "collapsed", "same"
        if self.level is None and now.moved < STILL and _steady(signs.variance) and not shrinks(signs):
            return "not started", ""
        state, kind, _ = self.collapses.at(i)
        if state:
            return state, kind
        if self.level is not None and now.learned == 0:
            return "not started", ""
        if len(now.rising) or now.unseen > 0:
            return "learning", ""
        if records < FEWEST or _grows(signs.variance):
            return ("learning", "too early") if now.learned >= d else ("waiting", "")
        if _shrunk(signs.variance) or shrinks(signs) or copied(self.lam[: i + 1], signs, self.rest.where(slice(i + 1))):
            return "waiting", ""
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
    return np.asarray(real(lam, "lam"), dtype=np.float64)


def _grows(variance: Floats) -> bool:
    """Whether the total variance still grows, so that dimensions that grow alike are not called settled."""
    first, last = variance[-5:][0], variance[-1]
    return bool(first > 0 and last > 0 and np.log(last / first) > GROWING)


def _shrunk(variance: Floats) -> bool:
    return bool(variance[-1] <= SHRUNK * np.nanmax(variance, initial=0.0))


def _steady(variance: Floats) -> bool:
    first, last = np.median(variance[:3]), np.median(variance[-3:])
    return not (first > 0 and last > 0) or bool(abs(np.log(last / first)) < STEADY)
