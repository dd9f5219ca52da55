"""The page of a run: its staircase, the steps taken and the steps expected; live, or as one HTML file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stairwise.report.page import Line, Page, Panel, Stretch
from stairwise.report.ranks import interval, rank_bounds, scores_table
from stairwise.report.reading import Reading, column, leading, read_run
from stairwise.report.timeline import changes
from stairwise.runs.reader import consistent
from stairwise.runs.record import Record
from stairwise.staircase.clock import Clock, duration
from stairwise.staircase.forecast import Forecast
from stairwise.staircase.notes import noted
from stairwise.table import Table
from stairwise.theory.spectra import alpha_req

Floats = NDArray[np.float64]
AXIS = "training time t"
SHOWN = 24  # greatest number of curves
BINS = 30  # of the histogram
NEXT = 3  # number of expected steps whose intervals are shaded
TIMELINE = "What this page said, and when"


def run_page(folder: Path, spectrum: str = "") -> Page:
    """Make the page of a run folder, written by `stairwise train` or by a monitor.

    Arguments:
        spectrum: "eigenvalues" (of C) or "covariance"; empty: the one in which the run's loss takes its steps.
    """
    run = read_run(folder, spectrum)
    tables = [*_now(run), scores_table(run.records)]
    if run.ahead and run.clock:
        tables.append(_taken(run.ahead, run.clock, note="" if run.expected else run.ahead.track_record))
    if run.expected and run.clock:
        tables.append(_coming(run.expected, run.clock))
    tables.append(timeline_table(run))
    panels = _panels(run) if run.records else []
    shown = [table for table in tables if table.rows]
    return Page(f"Staircase of {run.name}", str(run.advice), panels, shown, facts=run.facts, advice=run.advice)


def _panels(run: Reading) -> list[Panel]:
    marks = list(run.ahead.done.times) if run.ahead else []
    panels = []
    loss = column(run.records, "loss")
    if np.isfinite(loss).any():
        lines, near = _loss(run, loss), _spans(run)
        panels.append(Panel("Loss", AXIS, "loss", lines, marks, True, near, run.steps, below_zero="linear"))
    panels.append(spectrum_panel(run))
    deep = consistent(run.records, "hidden")
    if deep:
        hidden = np.array([record.hidden[:SHOWN] for record in deep if record.hidden is not None])
        curves = _curves(column(deep, "t"), column(deep, "step"), hidden)
        title = _title("the representations", leading(deep[-1], "hidden"))
        panels.append(Panel(title, AXIS, "λ", curves, marks, log=True, steps=run.steps))
    panels.append(Panel("Dimensions in use", AXIS, "dimensions", _ranks(run), marks, steps=run.steps))
    panels[0] = replace(panels[0], strip=stretches(run))
    return panels + _histogram(run) + _scatter(run.views)


def spectrum_panel(run: Reading) -> Panel:
    """The eigenvalues over time, with the steps taken and the steps expected."""
    marks = list(run.ahead.done.times) if run.ahead else []
    of = "C" if run.spectrum == "eigenvalues" else "the covariance of z"
    lines = _curves(run.t, run.step, run.spectra) + _expected(run) + _few(run)
    return Panel(_title(of, run.leading), AXIS, "λ", lines, marks, True, _spans(run), run.steps)


def _title(of: str, which: str) -> str:
    return f"Eigenvalues of {of}" + (f": {which}" if which else "")


def _few(run: Reading) -> list[Line]:
    """Marks on the largest eigenvalue at records of too few pairs."""
    few = np.array([record.wanted is not None for record in run.records])
    if not few.any():
        return []
    return [Line("too few pairs", run.t[few], run.spectra[few, 0], kind="points", steps=run.step[few])]


def stretches(run: Reading) -> list[Stretch]:
    """What the headline said from when to when."""
    said = changes(run.looks)
    ends = [*(look.t for look in said[1:]), run.looks[-1].t]
    return [
        Stretch(look.t, end, look.advice.state, " ".join(look.advice.evidence))
        for look, end in zip(said, ends, strict=True)
        if end > look.t
    ]


def timeline_table(run: Reading) -> Table:
    """The changes of the state."""
    rows = [
        [f"{look.step:,.0f}", f"{look.t:.4g}", look.advice.state, " ".join(look.advice.evidence)]
        for look in changes(run.looks)
    ]
    records = run.looks[-1].records
    note = noted("judged again", looks=len(run.looks), records=records) if records else ""
    return Table(TIMELINE, ["from step", "t", "state", "because"], rows, note)


def _scatter(views: Floats | None) -> list[Panel]:
    if views is None:
        return []
    points = [Line(f"view {'ab'[j]}", v[:, 0], v[:, 1], (j, 2), kind="points") for j, v in enumerate(views)]
    return [Panel("Embeddings in their two leading modes", "leading mode", "second mode", points)]


def _spans(run: Reading) -> list[tuple[float, float]]:
    """Intervals of the next few steps, overlapping ones joined; none further ahead than the run has lasted."""
    ahead, t = run.expected, run.t
    spans: list[tuple[float, float]] = []
    if ahead is None:
        return spans
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


def _loss(run: Reading, loss: Floats) -> list[Line]:
    """The loss, and its forecast if it has been a linear function of the dimensions not yet learned."""
    ahead, t = run.expected, run.t
    lines = [Line("loss", t, loss, (1, 3), steps=run.step)]
    if ahead is None or not np.isfinite(loss).all():
        return lines
    left = ((1 - np.clip(run.spectra / ahead.level, 0, 1)) ** 2).sum(axis=1)
    if left.std() > 0 and loss.std() > 0 and np.corrcoef(left, loss)[0, 1] > 0.95:
        later = _later(t, ahead)
        slope = np.polyfit(left, loss, 1)[0]
        expected = np.median(loss[-5:]) + slope * (ahead.loss(later) - ahead.loss(later[:1]))
        lines.append(Line("expected", later, expected, dashed=True, steps=run.steps(later)))
    return lines


def _curves(t: Floats, step: Floats, spectra: Floats) -> list[Line]:
    d = min(SHOWN, spectra.shape[1])
    return [Line(f"λ{j + 1}", t, spectra[:, j], (j, d), legend=False, steps=step) for j in range(d)]


def _expected(run: Reading) -> list[Line]:
    """Expected curves of the growing modes."""
    if run.expected is None:
        return []
    later = _later(run.t, run.expected)
    curves, steps = run.expected.eigenvalues(later), run.steps(later)
    return [
        Line(f"λ{j + 1} expected", later, curves[:, k], dashed=True, legend=False, steps=steps)
        for k, j in enumerate(run.expected.modes)
        if j < SHOWN
    ]


def _ranks(run: Reading) -> list[Line]:
    """Ranks over time, as bands between their bounds if the records hold the leading eigenvalues only."""
    lines = []
    for j, (name, (low, high)) in enumerate(rank_bounds(run.records, run.spectrum).items()):
        if run.leading:
            lines.append(Line(f"{name}, at least", run.t, low, (j, 3), steps=run.step))
            lines.append(Line(f"{name}, at most", run.t, high, (j, 3), steps=run.step, band=True))
        else:
            lines.append(Line(name, run.t, low, (j, 3), steps=run.step))
    some = any(look.advice.at_least for look in run.looks)
    return [*lines, learned_line(run, "learned, at least" if some else "learned", mode=(2, 3))]


def learned_line(run: Reading, name: str, mode: tuple[int, int] | None = None, number: int | None = None) -> Line:
    """The learned dimensions at the looks back."""
    t, step, learned = (
        np.array([value(look) for look in run.looks], dtype=float)
        for value in (lambda look: look.t, lambda look: look.step, lambda look: look.advice.learned)
    )
    return Line(name, t, learned, mode, kind="stairs", steps=step, run=number)


def _histogram(run: Reading) -> list[Panel]:
    """Histogram of the current eigenvalues, with a line to the left of the learned ones."""
    spectrum, learned = run.spectra[-1], run.advice.learned
    positive = spectrum[spectrum > 0]
    if len(positive) < 2:
        return []
    count, edges = np.histogram(np.log10(positive), bins=BINS)
    logs = np.sort(np.log10(positive))[::-1]
    marks = [float(logs[learned - 1] + logs[learned]) / 2] if 0 < learned < len(logs) else []
    bars = Line("eigenvalues", (edges[1:] + edges[:-1]) / 2, count.astype(float), (1, 3), legend=False, kind="bars")
    title = "Eigenvalues now" + f": {run.leading}" * bool(run.leading)
    title += ", learned to the right of the dotted line" * bool(marks)
    return [Panel(title, "log₁₀ λ", "number", [bars], marks)]


def _now(run: Reading) -> list[Table]:
    if not run.records:
        return []
    record = run.records[-1]
    names = {"z": run.spectrum, "h": "hidden"}
    shown = {column: name for column, name in names.items() if record.spectrum(name) is not None}
    rows = [["dimensions learned", run.learned, *("–" for _ in list(shown)[1:])]]
    ranks = [rank_bounds([record], name) for name in shown.values()]
    for label in ranks[0]:
        of = [f" of {record.size(name)}" if label == "effective rank" else "" for name in shown.values()]
        rows.append([label, *(interval(*rank[label]) + end for rank, end in zip(ranks, of, strict=True))])
    rows.append(["decay α of λ ∝ j^−α (α-ReQ)", *(_decay(record, name) for name in shown.values())])
    if record.wanted is not None:
        pairs = f"{record.samples or 0:,} of the {record.wanted:,} that {record.size(run.spectrum)} dimensions need"
        rows.append(["pairs", pairs, *("–" for _ in list(shown)[1:])])
    return [Table(f"At step {record.step:,}", ["measure", *shown], rows)]


def _decay(record: Record, name: str) -> str:
    values = record.spectrum(name)
    if values is None or (values > 0).sum() < 2:
        return "–"
    which = leading(record, name)
    return f"{alpha_req(values):.2f}" + (f", {which}" if which else "")


def _taken(ahead: Forecast, clock: Clock, note: str) -> Table:
    done = ahead.done
    rows = [
        [str(j + 1), f"{time:.4g}", f"{clock.steps(time):,.0f}", f"{rise:.3g}", f"{level:.3g}", str(event + 1)]
        for j, time, rise, level, event in zip(
            done.modes, done.times, done.rise_times, done.levels, done.events, strict=True
        )
    ]
    return Table("Steps taken", ["mode", "t", "step", "rise time 1/8γ", "plateau", "event"], rows, note)


def _coming(ahead: Forecast, clock: Clock) -> Table:
    near = ahead.nearness
    rows = []
    for k in np.argsort(ahead.times, kind="stable"):
        left = float(clock.seconds_left(ahead.times[k]))
        rows.append(
            [
                str(ahead.modes[k] + 1),
                near[k],
                f"{ahead.times[k]:.4g}",
                f"{ahead.low[k]:.4g} to {ahead.high[k]:.4g}",
                step_at(clock, ahead.times[k]),
                steps_between(clock, ahead.low[k], ahead.high[k]),
                duration(left) if np.isfinite(left) else "–",
            ]
        )
    interval = f"{100 * ahead.coverage:.0f} % interval"
    header = ["mode", "when", "expected t", interval, "step", f"{interval} in steps", "in"]
    return Table("Steps to come", header, rows, ahead.track_record)


def step_at(clock: Clock, t: float) -> str:
    """Step number at time t."""
    step = float(clock.steps(t))
    return f"{step:,.0f}" if np.isfinite(step) else "after the end"


def steps_between(clock: Clock, low: float, high: float) -> str:
    """Step numbers of an interval of time."""
    first, last = step_at(clock, low), step_at(clock, high)
    return first if first == last else f"{first} to {last}"
