"""What is said about a run while it trains: the advice on its records so far, for loggers and for `watch.advice`."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import RunWarning
from stairwise.monitor.decompose import one_core
from stairwise.monitor.loggers import Logger
from stairwise.runs.log import read_log
from stairwise.runs.reader import consistent
from stairwise.runs.record import Record
from stairwise.staircase.advice import Advice, Judge
from stairwise.staircase.clock import Clock
from stairwise.staircase.notes import noted
from stairwise.staircase.signs import Signs

Floats = NDArray[np.float64]

MOST = 200  # records that are judged; of longer runs every second, every third, …, always with the newest
REST = 50  # after a judgement pause for this multiple of its processor time: it takes at most 2 % of one core
FORESEEN = ("not started", "learning", "waiting")  # states in which the next dimension is worth announcing


class Commentary:
    """Judges records in the background thread, and keeps what is said about each until it is sent to the loggers.

    Arguments:
        loggers: nothing is judged while this list is empty.
        spectrum: the one that is followed, as in `Run.followed`.
        planned: t = Σ lr after every step of the schedule, (steps,); None: unknown.
    """

    def __init__(self, loggers: list[Logger], spectrum: str = "covariance", planned: Floats | None = None) -> None:
        self.loggers, self.spectrum, self.planned = loggers, spectrum, planned
        self.records: list[Record] = []  # those with a spectrum, or that should have one
        self.said: dict[int, dict[str, float | str]] = {}
        self.rest_until, self.failure, self.warned = 0.0, "", False

    def hear(self, record: Record) -> None:
        """Judge a record, unless the last judgement was a moment ago; runs in the background and never raises."""
        if not self._counts(record):
            return
        self.records.append(replace(record, leading=None))
        resting = time.monotonic() < self.rest_until and "failed" not in record.extra  # divergence is said at once
        if not self.loggers or resting:
            return
        began = time.thread_time()  # waiting for the training loop costs nothing
        try:
            with one_core():
                self.said[record.step] = self._words()
        except Exception as error:  # must not stop the training
            self.failure = repr(error)
        self.rest_until = time.monotonic() + REST * (time.thread_time() - began)

    def about(self, record: Record) -> dict[str, float | str]:
        """What was said about a record; an error in the background becomes a warning here, once."""
        if self.failure and not self.warned:
            self.warned = True
            warnings.warn(f"the run could not be judged for its loggers: {self.failure}", RunWarning, stacklevel=5)
        return self.said.pop(record.step, {})

    def recall(self, log: Path) -> None:
        """Read the records of a run that is continued: the next ones are judged together with them."""
        self.records = [record for record in read_log(log)[0] if self._counts(record)]

    @property
    def advice(self) -> Advice:
        """The advice on all records so far."""
        return judged(list(self.records), self.spectrum, self.planned)[0]

    def _counts(self, record: Record) -> bool:
        """Whether a record has the spectrum, or should have it; records of probes have none."""
        return record.spectrum(self.spectrum) is not None or "failed" in record.extra

    def _words(self) -> dict[str, float | str]:
        advice, step = judged(self.records, self.spectrum, self.planned)
        said: dict[str, float | str] = {"learned": advice.learned, "state": advice.state, "says": str(advice)}
        return said if step is None else said | {"next_step": step}


def judged(
    records: Sequence[Record], spectrum: str = "covariance", planned: Floats | None = None
) -> tuple[Advice, int | None]:
    """The advice on the last of these records, and the optimizer step at which the next dimension is expected, if any.

    At most `MOST` records are judged, evenly spaced.
    """
    stride = max(1, -(-len(records) // MOST))
    few = list(records[::-1][::stride][::-1])
    measured = consistent(few, spectrum)
    lost = [r for r in few if r.spectrum(spectrum) is None and (not measured or r.t > measured[-1].t)]
    kept = measured + lost[:1]
    if not kept:
        return Advice("cannot tell yet", 0, 0, (noted("no spectrum"),)), None
    d = measured[0].size(spectrum) if measured else 0
    k = len(measured[0].value(spectrum)) if measured else 1
    t, lam = np.array([r.t for r in kept]), np.full((len(kept), k), np.nan)
    for row, record in zip(lam, measured, strict=False):
        row[:] = record.spectrum(spectrum)
    level = 1.0 if spectrum == "eigenvalues" else None  # the plateau of a covariance is unknown
    totals = [r.total(spectrum) for r in kept]
    judge, clock = Judge(t, lam, level, Signs.of(kept), d or None, totals), _clock(kept, planned)
    ahead = judge.forecast()
    advice = replace(judge.says(clock=clock, ahead=ahead), dimensions=d)
    if stride > 1:
        note = noted("one in", stride=stride)
        advice = replace(advice, evidence=(*advice.evidence, note))
    if ahead is None or not len(ahead.times) or clock is None or advice.complete or advice.state not in FORESEEN:
        return advice, None
    step = float(clock.steps(ahead.times.min()))
    return advice, round(step) if np.isfinite(step) else None


def _clock(records: Sequence[Record], planned: Floats | None) -> Clock | None:
    if len(records) < 2:
        return None
    t, step, seconds = (np.array([r.value(key) for r in records], dtype=np.float64) for key in ("t", "step", "seconds"))
    return Clock(t, step, seconds if np.isfinite(seconds).all() else None, planned, records[-1].planned_updates)
