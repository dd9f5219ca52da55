"""What a run folder says: its spectra over time, the forecast, the advice, and the advice given earlier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of
from stairwise.report.timeline import Look, look_back
from stairwise.runs.folder import METRICS, RECIPE, read_picture
from stairwise.runs.reader import Run, consistent
from stairwise.runs.record import Record
from stairwise.staircase import words
from stairwise.staircase.advice import Advice, Judge
from stairwise.staircase.clock import Clock
from stairwise.staircase.forecast import Forecast
from stairwise.staircase.notes import noted
from stairwise.staircase.signs import Signs
from stairwise.training.schedule import Schedule

Floats = NDArray[np.float64]
NOISY = ("barlow_twins", "vicreg")  # losses whose sampling noise we know
FOLLOWED = ("eigenvalues", "covariance")
LONGEST = 10**8  # steps of a schedule that can be drawn


@dataclass(frozen=True, eq=False)
class Reading:
    """A run as its page shows it.

    Attributes:
        name: of the folder.
        spectrum: the one that is followed, "eigenvalues" (of C) or "covariance".
        records: those with a finite spectrum, in order of time; may be empty if the run has diverged.
        t, step, spectra: of these records, (T,), (T,), (T, d), or (T, k) if they hold the leading eigenvalues only.
        clock: converts times into steps; None if there are fewer than two records.
        ahead: the forecast; None if there are too few records.
        looks: what the page said earlier, and what it says now.
        facts: how the run was made.
        settings: its recipe; empty if unknown.
        views: embeddings in their two leading modes, (2, pairs, 2); None if not recorded.
    """

    name: str
    spectrum: str
    records: list[Record]
    t: Floats
    step: Floats
    spectra: Floats
    clock: Clock | None
    ahead: Forecast | None
    looks: list[Look]
    facts: dict[str, str]
    settings: dict[str, object]
    views: Floats | None = None

    @property
    def advice(self) -> Advice:
        """What the page says now."""
        return self.looks[-1].advice

    @property
    def expected(self) -> Forecast | None:
        """The forecast, if there are steps to come; None if there are none, or if the run is lost."""
        over = self.advice.complete or self.advice.state in ("finished", "collapsed", "diverged")
        return self.ahead if self.ahead and len(self.ahead.modes) and not over else None

    def steps(self, t: Floats) -> Floats:
        """Step numbers at times t; infinite after the end of the run."""
        return self.clock.steps(t) if self.clock else np.interp(t, self.t, self.step)

    @property
    def learned(self) -> str:
        """Number of learned dimensions, as in every table."""
        return self.advice.count if self.advice.dimensions else "–"

    @property
    def leading(self) -> str:
        """Which eigenvalues are recorded, if not all: "the leading 128 of 8192"."""
        return leading(self.records[-1], self.spectrum) if self.records else ""


def read_run(folder: Path, spectrum: str = "") -> Reading:
    """Read a run folder, written by `stairwise train` or by a monitor.

    Arguments:
        spectrum: "eigenvalues" (of C) or "covariance"; empty: the one in which the run's loss takes its steps.
    """
    if spectrum:
        one_of(spectrum, "--spectrum", FOLLOWED)
    if folder.is_file():
        raise InputError("run", "must be a folder", folder, f"give the folder that contains {METRICS}")
    run = Run(folder)
    records, bad = run.log
    if not records:
        raise InputError("run", f"must be a folder with a {METRICS} that contains records", folder)
    facts, settings, planned, followed = _made(run) if (folder / RECIPE).is_file() else ({}, {}, None, "covariance")
    spectrum = spectrum or followed
    measured = consistent(records, spectrum)
    lost = _lost(records, measured, spectrum)
    if not measured and not lost:
        raise InputError("run", f"must have records with a finite {spectrum}", folder, "check what was recorded")
    facts = {"records": _count(records, measured, spectrum, bad)} | _recorded(measured, spectrum) | facts
    past = _Past.of(measured, spectrum, planned)
    ahead = past.forecast()
    looks = past.looks(ahead)
    if lost:
        looks += _diverged(looks, lost)
    elif looks:
        looks[-1] = replace(looks[-1], advice=_with_noise(looks[-1].advice, measured[-1], settings))
    return Reading(
        folder.resolve().name,
        spectrum,
        measured,
        past.t,
        past.step,
        past.spectra,
        past.clock(len(measured)),
        ahead,
        looks,
        facts,
        settings,
        read_picture(folder),
    )


@dataclass(frozen=True, eq=False)
class _Past:
    """The records of a run as arrays, from which advice can be given for the first n of them."""

    t: Floats
    step: Floats
    seconds: Floats | None
    spectra: Floats
    signs: Signs
    level: float | None
    planned: Floats | None
    dimensions: int
    totals: Floats
    end: int | None

    @classmethod
    def of(cls, records: Sequence[Record], spectrum: str, planned: Floats | None) -> "_Past":
        t, step, seconds = (column(records, key) for key in ("t", "step", "seconds"))
        spectra = np.array([record.spectrum(spectrum) for record in records]) if records else np.zeros((0, 0))
        level = 1.0 if spectrum == "eigenvalues" else None  # the plateau of a covariance is unknown
        known = seconds if np.isfinite(seconds).all() else None
        d, totals = records[0].size(spectrum) if records else 0, np.array([r.total(spectrum) for r in records])
        end = records[-1].planned_updates if records else None
        return cls(t, step, known, spectra, Signs.of(records), level, planned, d, totals, end)

    def clock(self, n: int) -> Clock | None:
        seconds = None if self.seconds is None else self.seconds[:n]
        return Clock(self.t[:n], self.step[:n], seconds, self.planned, self.end) if n > 1 else None

    @cached_property
    def judge(self) -> Judge | None:
        if not len(self.t):
            return None
        return Judge(self.t, self.spectra, self.level, self.signs, self.dimensions, self.totals)

    def forecast(self) -> Forecast | None:
        return self.judge.forecast(lost=True) if self.judge else None

    def looks(self, ahead: Forecast | None) -> list[Look]:
        if self.judge is None:
            return []
        return look_back(self.judge, self.step, self.judge.says(clock=self.clock(len(self.t)), ahead=ahead))


def leading(record: Record, spectrum: str) -> str:
    """Which eigenvalues of a spectrum a record holds, if not all.

    >>> leading(Record(step=0, t=0.0, hidden=np.ones(2), hidden_dimensions=8), "hidden")
    'the leading 2 of 8'
    """
    values, d = record.spectrum(spectrum), record.size(spectrum)
    return f"the leading {len(values)} of {d}" if values is not None and len(values) < d else ""


def _recorded(measured: Sequence[Record], spectrum: str) -> dict[str, str]:
    """A fact about records that hold the leading eigenvalues only."""
    which = leading(measured[-1], spectrum) if measured else ""
    return {"eigenvalues": f"{which} are shown, with the sum of all"} if which else {}


def _with_noise(advice: Advice, record: Record, settings: Mapping[str, Any]) -> Advice:
    """The advice with a sentence on how much of the loss is sampling noise, if that is known and not little."""
    known = settings.get("loss") in NOISY and not settings.get("fixed_views")  # fixed views: every batch is the same
    known = known and record.wanted is None
    if not known or record.correlations is None or advice.state in ("collapsing", "collapsed", "diverged"):
        return advice
    from stairwise.staircase.noise import noise_sentence  # loads scipy, which takes time

    sentence = noise_sentence(record, settings["loss"], settings.get("loss_options"), record.loss)
    return replace(advice, evidence=(*advice.evidence, sentence)) if sentence else advice


def _made(run: Run) -> tuple[dict[str, str], dict[str, object], Floats, str]:
    """How the run was made, its recipe, t after every step of its schedule, and the spectrum of its loss."""
    try:
        settings = {name: value for name, value in run.recipe.items() if name != "label"}
        facts = {"recipe": ", ".join(f"{k} = {v}" for k, v in settings.items()), "α": f"{run.facts['alpha']:.4g}"}
        facts |= {key: str(run.facts.get(key)) for key in ("device", "commit", "versions", "made")}
        if run.facts.get("commit") is None and "code" in run.facts:
            facts["commit"] = f"not in a git checkout; digest of the code {run.facts['code']}"
        return facts, settings, _planned(run), run.followed
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(str(run.folder / RECIPE), "must be written by `stairwise train`", repr(error)) from error


def _planned(run: Run) -> Floats:
    """t = Σ lr after every step of the schedule, (steps,)."""
    recipe, steps = run.recipe, run.count("steps", LONGEST)
    per_epoch = run.count("training_images") // run.count("batch")
    warmup = round(recipe.get("warmup_epochs", 0.0) * per_epoch)
    schedule = Schedule(recipe.get("schedule", "cosine"), steps, warmup, recipe.get("final_lr", 0.001))
    return schedule.times(recipe["lr"])


def _count(records: Sequence[Record], measured: Sequence[Record], spectrum: str, bad: int) -> str:
    # records of probes have no spectrum, and that is no damage
    times = [record.t for record in records if _should_have(record, spectrum)]
    left_out = len(times) - len(measured)
    still = min(left_out, len(times) - len(set(times)))
    parts = [f"{len(measured)} record{'s' * (len(measured) != 1)}"]
    few = sum(record.wanted is not None for record in measured)
    parts += [f"{few} of them of too few pairs"] if few else []
    parts += [f"{still} left out because t stood still (learning rate 0)"] if still else []
    parts += [f"{left_out - still} without a valid {spectrum} left out"] if left_out > still else []
    return ", ".join([*parts, f"{bad} damaged lines left out"] if bad else parts)


def _lost(records: Sequence[Record], measured: Sequence[Record], spectrum: str) -> list[Record]:
    """Records after the last finite spectrum that should have one; one alone may be a damaged line."""
    last = measured[-1].step if measured else -np.inf
    lost = [record for record in records if record.step > last and _should_have(record, spectrum)]
    return lost if len(lost) > 1 or any("failed" in record.extra for record in lost) else []


def _should_have(record: Record, spectrum: str) -> bool:
    """Whether a spectrum was measured, or failed: a monitor writes no spectrum if all batches were not finite."""
    return record.value(spectrum) is not None or "failed" in record.extra


def _diverged(looks: Sequence[Look], lost: Sequence[Record]) -> list[Look]:
    """The looks at the first and at the last of the records that are lost."""
    evidence = [words.said("not finite", when=f"step {lost[0].step:,}" if looks else "the first record")]
    if lost[-1].first_skipped:
        evidence.append(noted("first lost", number=lost[-1].first_skipped))
    learned, d, n = (looks[-1].advice.learned, looks[-1].advice.dimensions, looks[-1].records) if looks else (0, 0, 0)
    advice = Advice("diverged", learned, d, tuple(evidence), words.REMEDIES["diverged"])
    return [Look(n + i, float(lost[i - 1].step), float(lost[i - 1].t), advice) for i in sorted({1, len(lost)})]


def column(records: Sequence[Record], key: str) -> Floats:
    """A number of every record, (T,); NaN where it was not measured."""
    return np.array([record.value(key) for record in records], dtype=float)
