"""The page of a run: its staircase, its steps, what comes next; live while it trains, or in one HTML file."""

from bisect import bisect_left
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.monitor.advice import advise
from stairwise.monitor.clock import Clock, duration
from stairwise.monitor.forecast import Forecast, forecast_steps
from stairwise.monitor.steps import FEWEST
from stairwise.report.page import Line, Page, Panel, Table
from stairwise.theory.spectra import alpha_req, effective_rank, grown, participation_ratio

__all__ = ["run_page"]

Floats = NDArray[np.float64]
AXIS = "training time t"
SHOWN = 24  # curves
BINS = 30
NEXT = 3  # steps to come whose intervals are shaded


def run_page(
    name: str,
    records: list[dict[str, Any]],
    spectrum: str,
    facts: dict[str, str],
    planned: Floats | None = None,
    views: Floats | None = None,
) -> Page:
    """Everything that can be read off the records of a run.

    Arguments:
        records: as `stairwise train` or `SpectrumMonitor.attach` write them.
        spectrum: "eigenvalues" (of C) or "covariance": which is followed.
        planned: t after every step of the run's schedule, where that is known.
        views: embeddings of both views in their two leading modes, (2, pairs, 2), where they were kept.
    """
    measured = _sound(records, spectrum)
    if len(measured) < 2:
        raise InputError("run", "must have at least two records", len(measured), "let it train for a while")
    left_out = sum(spectrum in r for r in records) - len(measured)  # records of probes alone have none
    said = f"{len(measured)} records" + (f", {left_out} without a sound {spectrum} left out" if left_out else "")
    facts = facts | {"records": ", ".join(filter(None, (said, facts.get("records", ""))))}
    t, step, seconds = (_column(measured, key) for key in ("t", "step", "seconds"))
    spectra = np.array([r[spectrum] for r in measured], dtype=float)
    clock = Clock(t, step, seconds if np.isfinite(seconds).all() else None, planned)
    level = 1.0 if spectrum == "eigenvalues" else None  # the scale of a covariance is any
    ahead = forecast_steps(t, spectra, level=level) if len(t) >= FEWEST else None
    advice = advise(t, spectra, clock, level, _spread(measured[-1]), ahead) if ahead else []
    lead = " ".join(advice) or "Too few records yet to say more."
    marks = list(ahead.done.times) if ahead else []
    near = _spans(ahead, t) if ahead else []
    panels = []
    loss = _column(measured, "loss")
    if np.isfinite(loss).any():
        panels.append(Panel("Loss", AXIS, "loss", _loss(t, loss, spectra, ahead), marks, log=True, spans=near))
    of = "C" if spectrum == "eigenvalues" else "the covariance of z"
    panels.append(Panel(f"Eigenvalues of {of}", AXIS, "λ", _curves(t, spectra, ahead), marks, log=True, spans=near))
    deep = _sound(measured, "hidden")
    if len(deep) > 1:
        hidden = np.array([r["hidden"][:SHOWN] for r in deep], dtype=float)
        curves = _curves(_column(deep, "t"), hidden, None)
        panels.append(Panel("Eigenvalues of the representations", AXIS, "λ", curves, marks, log=True))
    panels.append(Panel("Dimensions in use", AXIS, "dimensions", _ranks(t, spectra), marks))
    panels += _histogram(spectra[-1])
    if views is not None:
        points = [Line(f"view {'ab'[j]}", v[:, 0], v[:, 1], (j, 3), kind="points") for j, v in enumerate(views)]
        panels.append(Panel("Embeddings in their two leading modes", "leading mode", "second mode", points))
    tables = [_now(measured[-1], spectrum)]
    tables += [_steps(ahead, clock), _coming(ahead, clock)] if ahead else []
    return Page(f"Staircase of {name}", lead, panels, [table for table in tables if table.rows], [], facts)


def _sound(records: list[dict[str, Any]], spectrum: str) -> list[dict[str, Any]]:
    """Records with a finite t, step and spectrum of the usual length, in the longest row of increasing times."""
    found = [r for r in records if _finite(r.get("t")) and _finite(r.get("step")) and _numbers(r.get(spectrum))]
    lengths = Counter(len(r[spectrum]) for r in found)
    usual = lengths.most_common(1)[0][0] if lengths else 0
    return _increasing([r for r in found if len(r[spectrum]) == usual])


def _increasing(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest subsequence of increasing times (patience sorting): one wild time costs one record."""
    tails: list[float] = []
    ends: list[int] = []
    before: list[int] = []
    for i, record in enumerate(records):
        place = bisect_left(tails, record["t"])
        before.append(ends[place - 1] if place else -1)
        tails[place : place + 1] = [record["t"]]
        ends[place : place + 1] = [i]
    kept, i = [], ends[-1] if ends else -1
    while i >= 0:
        kept.append(records[i])
        i = before[i]
    return kept[::-1]


def _finite(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    )  # also for huge integers


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(_finite(v) for v in values)


def _column(records: list[dict[str, Any]], key: str) -> Floats:
    return np.array([r[key] if _finite(r.get(key)) else np.nan for r in records], dtype=float)


def _spread(record: dict[str, Any]) -> float | None:
    """Trace of the covariance over the square of the mean."""
    square, covariance = record.get("mean_square"), record.get("covariance")
    if not isinstance(square, float) or not isinstance(covariance, list) or not _numbers(covariance) or square <= 0:
        return None
    return float(sum(covariance) / square)


def _spans(ahead: Forecast, t: Floats) -> list[tuple[float, float]]:
    """When the next few steps are expected, overlapping intervals joined; none further off than the run has lasted."""
    found: list[tuple[float, float]] = []
    for k in np.argsort(ahead.times, kind="stable")[:NEXT]:
        low, high = float(ahead.low[k]), float(ahead.high[k])
        if high > 2 * t[-1] - t[0]:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def _later(t: Floats, ahead: Forecast) -> Floats:
    end = float(np.clip(ahead.times.max(), ahead.now, ahead.now + 0.5 * (ahead.now - t[0])))
    return np.linspace(ahead.now, end, 60)


def _loss(t: Floats, loss: Floats, spectra: Floats, ahead: Forecast | None) -> list[Line]:
    """The loss, and its staircase ahead where it has been a straight function of what is left to learn."""
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
        foreseen = ahead.eigenvalues(later)
        for k, j in enumerate(ahead.modes):
            if j < d:
                lines.append(Line(f"λ{j + 1} expected", later, foreseen[:, k], dashed=True, legend=False))
    return lines


def _ranks(t: Floats, spectra: Floats) -> list[Line]:
    return [
        Line("effective rank (RankMe)", t, effective_rank(spectra), (0, 3)),
        Line("participation ratio", t, participation_ratio(spectra), (1, 3)),
        Line("grown", t, np.array([grown(row)[0] for row in spectra], dtype=float), (2, 3)),
    ]


def _histogram(spectrum: Floats) -> list[Panel]:
    """Eigenvalues now, with the threshold between grown and not."""
    positive = spectrum[spectrum > 0]
    if len(positive) < 2:
        return []
    count, edges = np.histogram(np.log10(positive), bins=BINS)
    threshold = grown(spectrum)[1]
    marks = [float(np.log10(threshold))] if threshold > 0 else []
    bars = Line("eigenvalues", (edges[1:] + edges[:-1]) / 2, count.astype(float), (1, 3), legend=False, kind="bars")
    return [Panel("Eigenvalues now, grown to the right of the dotted line", "log₁₀ λ", "number", [bars], marks)]


def _now(record: dict[str, Any], spectrum: str) -> Table:
    names = {spectrum: "z"} | ({"hidden": "h"} if _numbers(record.get("hidden")) else {})
    rows = []
    for label, measure in (
        ("eigenvalues grown", lambda v: f"{grown(v)[0]} of {len(v)}"),
        ("effective rank (RankMe)", lambda v: f"{float(effective_rank(v)):.1f}"),
        ("participation ratio", lambda v: f"{float(participation_ratio(v)):.1f}"),
        ("decay α of λ ∝ j^−α (α-ReQ)", lambda v: f"{alpha_req(v):.2f}"),
    ):
        row = [label]
        for key in names:
            values = np.array(record[key], dtype=float)
            row.append(measure(values) if (values > 0).sum() >= 2 else "–")
        rows.append(row)
    return Table(f"At step {record['step']:,}", ["measure", *names.values()], rows)


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
