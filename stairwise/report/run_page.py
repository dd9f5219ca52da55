"""The page of a run: its staircase, the steps taken and the steps expected; live, or as one HTML file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, one_of
from stairwise.report.page import Line, Page, Panel
from stairwise.runs.folder import METRICS, RECIPE, read_picture
from stairwise.runs.reader import Run, consistent
from stairwise.runs.record import Record
from stairwise.staircase.advice import advise
from stairwise.staircase.clock import Clock, duration
from stairwise.staircase.forecast import Forecast, forecast_steps
from stairwise.staircase.signs import Signs
from stairwise.staircase.steps import FEWEST
from stairwise.table import Table
from stairwise.theory.spectra import alpha_req, effective_rank, grown, participation_ratio
from stairwise.training.schedule import Schedule

Floats = NDArray[np.float64]
AXIS = "training time t"
SHOWN = 24  # greatest number of curves
BINS = 30  # of the histogram
NEXT = 3  # number of expected steps whose intervals are shaded
FOLLOWED = ("eigenvalues", "covariance")


def run_page(folder: Path, spectrum: str = "") -> Page:
    """Make the page of a run folder, written by `stairwise train` or by a monitor.

    `spectrum`: "eigenvalues" (of C) or "covariance"; empty: the one in which the run's loss takes its steps.
    """
    if spectrum:
        one_of(spectrum, "--spectrum", FOLLOWED)
    if folder.is_file():
        raise InputError("run", "must be a folder", folder, f"give the folder that contains {METRICS}")
    run = Run(folder)
    records, bad = run.log
    if not records:
        raise InputError("run", f"must be a folder with a {METRICS} that contains records", folder)
    facts = {"records": f"{bad} damaged lines left out"} if bad else {}
    planned = None
    if (folder / RECIPE).is_file():
        try:
            spectrum = spectrum or run.followed
            settings = ", ".join(f"{k} = {v}" for k, v in run.recipe.items() if k != "label")
            facts |= {"recipe": settings, "α": f"{run.facts['alpha']:.4g}"}
            facts |= {key: str(run.facts.get(key)) for key in ("device", "commit", "versions", "made")}
            planned = _planned(run)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(str(folder / RECIPE), "must be written by `stairwise train`", repr(error)) from error
    name = folder.resolve().name
    return _staircase_page(name, records, spectrum or "covariance", facts, planned, read_picture(folder))


def _planned(run: Run) -> Floats:
    """t = Σ lr after every step of the schedule, (steps,)."""
    recipe, steps = run.recipe, int(run.facts["steps"])
    per_epoch = int(run.facts["training_images"]) // int(run.facts["batch"])
    warmup = round(recipe.get("warmup_epochs", 0.0) * per_epoch)
    schedule = Schedule(recipe.get("schedule", "cosine"), steps, warmup, recipe.get("final_lr", 0.001))
    return np.asarray(recipe["lr"] * np.cumsum([schedule.factor(i) for i in range(steps)]))


def _staircase_page(
    name: str,
    records: Sequence[Record],
    spectrum: str,
    facts: dict[str, str],
    planned: Floats | None = None,
    views: Floats | None = None,
) -> Page:
    """Make the page from records.

    Arguments:
        spectrum: the one to follow, "eigenvalues" (of C) or "covariance".
        planned: t after every step of the run's schedule, if known.
        views: embeddings of both views in their two leading modes, (2, pairs, 2), if recorded.
    """
    measured = consistent(records, spectrum)
    if len(measured) < 2:
        raise InputError("run", "must have at least two records", len(measured), "wait until it has more")
    # records of probes have no spectrum, and that is no damage
    left_out = sum(record.value(spectrum) is not None for record in records) - len(measured)
    count = f"{len(measured)} records" + (f", {left_out} without a valid {spectrum} left out" if left_out else "")
    facts = facts | {"records": ", ".join(filter(None, (count, facts.get("records", ""))))}
    t, step, seconds = (_column(measured, key) for key in ("t", "step", "seconds"))
    spectra = np.array([record.spectrum(spectrum) for record in measured])
    clock = Clock(t, step, seconds if np.isfinite(seconds).all() else None, planned)
    level = 1.0 if spectrum == "eigenvalues" else None  # the plateau of a covariance is unknown
    ahead = forecast_steps(t, spectra, level=level) if len(t) >= FEWEST else None
    lead = str(advise(t, spectra, clock, level, Signs.of(measured), ahead)) if ahead else "There are too few records for a forecast yet."
    tables = [_now(measured[-1], spectrum)]
    tables += [_steps(ahead, clock), _coming(ahead, clock)] if ahead else []
    panels = _panels(measured, spectrum, t, spectra, ahead) + _scatter(views)
    return Page(f"Staircase of {name}", lead, panels, [table for table in tables if table.rows], [], facts)


def _panels(measured: list[Record], spectrum: str, t: Floats, spectra: Floats, ahead: Forecast | None) -> list[Panel]:
    marks = list(ahead.done.times) if ahead else []
    near = _spans(ahead, t) if ahead else []
    panels = []
    loss = _column(measured, "loss")
    if np.isfinite(loss).any():
        panels.append(Panel("Loss", AXIS, "loss", _loss(t, loss, spectra, ahead), marks, log=True, spans=near))
    of = "C" if spectrum == "eigenvalues" else "the covariance of z"
    panels.append(Panel(f"Eigenvalues of {of}", AXIS, "λ", _curves(t, spectra, ahead), marks, log=True, spans=near))
    deep = consistent(measured, "hidden")
    if len(deep) > 1:
        hidden = np.array([record.hidden[:SHOWN] for record in deep if record.hidden is not None])
        curves = _curves(_column(deep, "t"), hidden, None)
        panels.append(Panel("Eigenvalues of the representations", AXIS, "λ", curves, marks, log=True))
    panels.append(Panel("Dimensions in use", AXIS, "dimensions", _ranks(t, spectra), marks))
    return panels + _histogram(spectra[-1])


def _scatter(views: Floats | None) -> list[Panel]:
    if views is None:
        return []
    points = [Line(f"view {'ab'[j]}", v[:, 0], v[:, 1], (j, 3), kind="points") for j, v in enumerate(views)]
    return [Panel("Embeddings in their two leading modes", "leading mode", "second mode", points)]


def _column(records: Sequence[Record], key: str) -> Floats:
    return np.array([record.value(key) for record in records], dtype=float)  # None becomes NaN


def _spread(record: Record) -> float | None:
    """Trace of the covariance divided by the squared mean."""
    covariance = record.spectrum("covariance")
    if covariance is None or not record.mean_square or record.mean_square < 0:
        return None
    return float(covariance.sum() / record.mean_square)


def _spans(ahead: Forecast, t: Floats) -> list[tuple[float, float]]:
    """Intervals of the next few steps, overlapping ones joined; none further ahead than the run has lasted."""
    spans: list[tuple[float, float]] = []
    for k in np.argsort(ahead.times, kind="stable")[:NEXT]:
        low, high = float(ahead.low[k]), float(ahead.high[k])
        if high > 2 * t[-1] - t[0]:
            continue
        if spans and low <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
        else:
            spans.append((low, high))
    return spans


def _later(t: Floats, ahead: Forecast) -> Floats:
    end = float(np.clip(ahead.times.max(), ahead.now, ahead.now + 0.5 * (ahead.now - t[0])))
    return np.linspace(ahead.now, end, 60)


def _loss(t: Floats, loss: Floats, spectra: Floats, ahead: Forecast | None) -> list[Line]:
    """The loss, and its forecast if it has been a linear function of the dimensions not yet learned."""
    lines = [Line("loss", t, loss, (1, 3))]
    if ahead is None or len(ahead.modes) == 0 or not np.isfinite(loss).all():
        return lines
    left = ((1 - np.clip(spectra / ahead.level, 0, 1)) ** 2).sum(axis=1)
    if left.std() > 0 and loss.std() > 0 and np.corrcoef(left, loss)[0, 1] > 0.95:
        later = _later(t, ahead)
        slope = np.polyfit(left, loss, 1)[0]
        now = np.median(loss[-5:])
        lines.append(Line("expected", later, now + slope * (ahead.loss(later) - ahead.loss(later[:1])), dashed=True))
    return lines


def _curves(t: Floats, spectra: Floats, ahead: Forecast | None) -> list[Line]:
    d = min(SHOWN, spectra.shape[1])
    lines = [Line(f"λ{j + 1}", t, spectra[:, j], (j, d), legend=False) for j in range(d)]
    if ahead is not None and len(ahead.modes):
        later = _later(t, ahead)
        expected = ahead.eigenvalues(later)
        for k, j in enumerate(ahead.modes):
            if j < d:
                lines.append(Line(f"λ{j + 1} expected", later, expected[:, k], dashed=True, legend=False))
    return lines


def _ranks(t: Floats, spectra: Floats) -> list[Line]:
    return [
        Line("effective rank (RankMe)", t, effective_rank(spectra), (0, 3)),
        Line("participation ratio", t, participation_ratio(spectra), (1, 3)),
        Line("grown", t, np.array([grown(row)[0] for row in spectra], dtype=float), (2, 3)),
    ]


def _histogram(spectrum: Floats) -> list[Panel]:
    """Histogram of the current eigenvalues, with the threshold for grown ones."""
    positive = spectrum[spectrum > 0]
    if len(positive) < 2:
        return []
    count, edges = np.histogram(np.log10(positive), bins=BINS)
    threshold = grown(spectrum)[1]
    marks = [float(np.log10(threshold))] if threshold > 0 else []
    bars = Line("eigenvalues", (edges[1:] + edges[:-1]) / 2, count.astype(float), (1, 3), legend=False, kind="bars")
    return [Panel("Eigenvalues now, grown to the right of the dotted line", "log₁₀ λ", "number", [bars], marks)]


def _now(record: Record, spectrum: str) -> Table:
    spectra = {"z": record.spectrum(spectrum), "h": record.spectrum("hidden")}
    columns = {name: values for name, values in spectra.items() if values is not None}
    rows = []
    for label, measure in (
        ("eigenvalues grown", lambda v: f"{grown(v)[0]} of {len(v)}"),
        ("effective rank (RankMe)", lambda v: f"{float(effective_rank(v)):.1f}"),
        ("participation ratio", lambda v: f"{float(participation_ratio(v)):.1f}"),
        ("decay α of λ ∝ j^−α (α-ReQ)", lambda v: f"{alpha_req(v):.2f}"),
    ):
        rows.append([label, *(measure(v) if (v > 0).sum() >= 2 else "–" for v in columns.values())])
    return Table(f"At step {record.step:,}", ["measure", *columns], rows)


def _steps(ahead: Forecast, clock: Clock) -> Table:
    done = ahead.done
    rows = [
        [str(j + 1), f"{time:.4g}", f"{clock.steps(time):,.0f}", f"{rise:.3g}", f"{level:.3g}", str(event + 1)]
        for j, time, rise, level, event in zip(
            done.modes, done.times, done.rise_times, done.levels, done.events, strict=True
        )
    ]
    return Table("Steps taken", ["mode", "t", "step", "rise time 1/8γ", "plateau", "event"], rows)


def _coming(ahead: Forecast, clock: Clock) -> Table:
    rows = []
    for k in np.argsort(ahead.times, kind="stable"):
        step, left = float(clock.steps(ahead.times[k])), float(clock.seconds_left(ahead.times[k]))
        rows.append(
            [
                str(ahead.modes[k] + 1),
                f"{ahead.times[k]:.4g}",
                f"{ahead.low[k]:.4g} to {ahead.high[k]:.4g}",
                f"{step:,.0f}" if np.isfinite(step) else "after the end",
                duration(left) if np.isfinite(left) else "–",
            ]
        )
    interval = f"{100 * ahead.coverage:.0f} % interval"
    return Table("Steps to come", ["mode", "expected t", interval, "step", "in"], rows)
