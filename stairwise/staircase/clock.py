"""Convert training time t into steps and seconds."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import LARGEST, InputError, number, times, vector

Floats = NDArray[np.float64]
RECENT = 0.25  # share of the records, at the end, from which the current speed is computed


@dataclass(frozen=True, eq=False)
class Clock:
    """Converts training time into steps and seconds.

    Attributes:
        t, step: of the records, increasing, (T,).
        seconds: of the records, (T,); None if not recorded.
        planned: t after each step of the schedule, (steps,); it is shifted to hold at the last record, because a run
            that was made longer had other learning rates before. None: assume that the current learning rate stays.
        end: the last step of the run; None, or a step that has been passed: unknown.

    >>> clock = Clock(np.array([0.0, 1.0, 2.0]), np.array([0.0, 10.0, 20.0]), np.array([0.0, 5.0, 10.0]))
    >>> float(clock.steps(3.0)), float(clock.seconds_left(3.0))
    (30.0, 5.0)
    >>> float(Clock(np.array([0.0, 1.0]), np.array([0.0, 10.0]), end=25).steps(3.0))  # after the last step
    inf
    """

    t: Floats
    step: Floats
    seconds: Floats | None = None
    planned: Floats | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        for name in ("t", "step", "seconds", "planned"):
            if getattr(self, name) is not None or name in ("t", "step"):
                object.__setattr__(self, name, vector(getattr(self, name), name, LARGEST))
        lengths = [len(one) for one in (self.t, self.step, self.seconds) if one is not None]
        if min(lengths) < 2 or len(set(lengths)) > 1:
            raise InputError("t, step and seconds", "must have equally many values, at least two", lengths)
        if self.planned is not None and not len(self.planned):
            raise InputError("planned", "must not be empty", "none", "leave it out")
        if self.end is not None:
            object.__setattr__(self, "end", number(self.end, "end"))
        if not ((np.diff(self.t) > 0).all() and (np.diff(self.step) >= 0).all()):
            raise InputError("t and step", "must increase", None, "sort the records and drop repeated ones")

    def steps(self, t: ArrayLike) -> Floats:
        """Steps at training times t; infinite after the end of the run."""
        moments = times(t, "t")
        known = np.interp(moments, self.t, self.step)
        if self.planned is not None:
            plan = self.planned
            plan = plan + self.t[-1] - plan[int(np.clip(self.step[-1], 1, len(plan))) - 1]
            later = np.interp(moments, plan, np.arange(1.0, len(plan) + 1), right=np.inf)
        else:
            with np.errstate(over="ignore", divide="ignore"):  # beyond 1e308 is never
                later = self.step[-1] + (moments - self.t[-1]) / self._rate()
        if self.end is not None and self.end > self.step[-1]:
            later = np.where(later > self.end, np.inf, later)
        return np.asarray(np.where(moments > self.t[-1], later, known))

    def seconds_left(self, t: ArrayLike) -> Floats:
        """Seconds from the last record until training times t, at the current speed; NaN if not recorded."""
        ahead = np.maximum(self.steps(t) - self.step[-1], 0.0)
        if self.seconds is None:
            return np.full(np.shape(ahead), np.nan)
        first = min(len(self.step) - 2, int((1 - RECENT) * len(self.step)))
        return np.asarray(ahead * _slope(self.seconds[first:], self.step[first:]))

    def _rate(self) -> float:
        """The present learning rate: that between the last two records or, if it goes up and down, a recent mean."""
        first = np.unique(self.step, return_index=True)[1]
        recent = first[min(len(first) - 2, int((1 - RECENT) * len(first))) :] if len(first) > 1 else slice(None)
        t, step = self.t[recent], self.step[recent]
        turns = np.diff(np.diff(t) / np.maximum(np.diff(step), 1e-300))
        cyclic = (turns > 0).any() and (turns < 0).any()
        return _slope(t, step) if cyclic else _slope(t[-2:], step[-2:])


def _slope(quantity: Floats, step: Floats) -> float:
    return float((quantity[-1] - quantity[0]) / max(step[-1] - step[0], 1e-300))


def duration(seconds: float) -> str:
    """Format a duration.

    >>> [duration(s) for s in (3.2, 200, 6000, 200_000)]
    ['3 s', '3 min', '1.7 h', '2.3 days']
    """
    for unit, size, upto in (("s", 1, 90), ("min", 60, 90 * 60), ("h", 3600, 48 * 3600)):
        if seconds < upto:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
