"""Summarize a run in plain sentences: is this plateau normal, has training collapsed, when will it finish?"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from stairwise.staircase.clock import Clock, duration
from stairwise.staircase.forecast import Forecast, forecast_steps
from stairwise.staircase.signs import Signs
from stairwise.staircase.steps import FEWEST, detect_steps, records
from stairwise.theory.spectra import effective_rank

FALLEN = 1e-2  # collapsing, if the largest eigenvalue falls to this share of its maximum after steps were taken
COLLAPSED = 1e-6  # collapsed, if it falls to this share in any case
NOTHING = 1e-8  # collapsed, if the variance is below this multiple of the squared mean (rounding error)
RARE = 0.1  # dimensional collapse, if fewer than this share of the dimensions are learned


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


@dataclass(frozen=True)
class Advice:
    """What a run is doing, why we say so, and what to do.

    Attributes:
        state: one of `STATES`.
        learned: number of dimensions learned; the one count that every table and sentence uses.
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
        words = " ".join((*self.evidence, self.remedy)).strip()
        return f"{self.state.capitalize()}: {words}" if words else f"{self.state.capitalize()}."


def advise(
    t: ArrayLike,
    lam: ArrayLike,
    clock: Clock | None = None,
    level: float | None = 1.0,
    signs: Signs | None = None,
    ahead: Forecast | None = None,
) -> Advice:
    """Describe a run in sentences from its spectra over time, the most important first.

    Arguments:
        t: times of the records, (T,).
        lam: eigenvalues of C or of the covariance, descending, (T, d).
        clock: converts times into steps and hours.
        level: as in `forecast_steps`.
        signs: what else was measured at the records, if known.
        ahead: the forecast, if already computed.

    Example:
        >>> t = np.linspace(0, 1.5, 100)
        >>> lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, [2.0, 1.0, 0.9])))
        >>> print(advise(t, lam))  # doctest: +SKIP
        1 of 3 dimensions learned.
        This plateau is normal: dimension 2 is growing and is expected at t = 1.72 (80 %: 1.7 to 1.75).
        All 3 dimensions are expected by t = 1.92.
    """
    times, spectra = records(t, lam)
    ahead = ahead or forecast_steps(times, spectra, level=level)
    done, d = len(ahead.done) + ahead.arriving, ahead.dimensions
    fallen = _fallen(times, spectra)
    if fallen:
        return Advice("collapsing", done, d, (fallen,))
    state = "learning" if len(ahead.modes) else "finished" if done >= d else "cannot tell yet"
    return Advice(state, done, d, (_learned(ahead, spectra[-1]), *_outlook(ahead, clock)))


def _fallen(t: np.ndarray, spectra: np.ndarray) -> str:
    """A warning if steps were taken and the largest eigenvalue has since fallen far below its maximum."""
    top = spectra[:, 0]
    share = top[-1] / top.max()
    last = int(np.flatnonzero(top >= top.max() / 2)[-1]) + 1
    if share > FALLEN or last < FEWEST:
        return ""
    steps = len(detect_steps(t[:last], spectra[:last]))
    if not steps:
        return ""
    return (
        f"Collapsing: {steps} dimensions had been learned by t = {t[last - 1]:.3g}, and the largest eigenvalue "
        f"has since fallen to {share:.1g} of its maximum. Lower the learning rate or check the loss, and go back to an "
        "earlier checkpoint."
    )


def _learned(ahead: Forecast, spectrum: np.ndarray) -> str:
    done, d = len(ahead.done) + ahead.arriving, ahead.dimensions
    if done == 0:
        rank = float(effective_rank(spectrum))
        return f"No step has been seen yet; the effective rank is {rank:.1f} of {d}."
    return f"{done} of {d} dimensions learned."


def _outlook(ahead: Forecast, clock: Clock | None) -> list[str]:
    done, d = len(ahead.done) + ahead.arriving, ahead.dimensions
    if len(ahead.modes) == 0:
        if done == 0:
            return []
        if done >= d:
            return ["All dimensions are in use: training longer adds none, a larger d might."]
        if done < RARE * d:
            return [
                f"Nothing else is growing: {d - done} dimensions are unused (dimensional collapse, if this persists). "
                "Train longer, raise the learning rate, or try sw.precondition."
            ]
        return [f"Nothing else is growing: stop here, or choose d near {done}."]
    first = int(np.argmin(ahead.times))
    low, time, high = (float(v[first]) for v in (ahead.low, ahead.times, ahead.high))
    sentences = [
        f"This plateau is normal: dimension {ahead.modes[first] + 1} is growing and is expected at t = {time:.3g} "
        f"({100 * ahead.coverage:.0f} %: {low:.3g} to {high:.3g}){_when(clock, time)}."
    ]
    end = ahead.when(1.0)
    if np.isfinite(end):
        sentences.append(f"All {d} dimensions are expected by t = {end:.3g}{_when(clock, end)}.")
    else:
        sentences.append(f"{len(ahead.modes)} are growing; {d - done - len(ahead.modes)} are not growing yet.")
    return sentences


def _when(clock: Clock | None, t: float) -> str:
    """The time t in steps and hours, as the end of a sentence."""
    if clock is None:
        return ""
    step, left = float(clock.steps(t)), float(clock.seconds_left(t))
    if not np.isfinite(step):
        return ", after the end of this run"
    return f", step {step:,.0f}" + (f", in {duration(left)}" if np.isfinite(left) else "")
