"""Several runs on one page: a table, their losses and learned dimensions over each other, and each run's staircase."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stairwise.checks import InputError
from stairwise.report.page import Line, Page, Panel
from stairwise.report.reading import Reading, column, read_run
from stairwise.report.run_page import (
    AXIS,
    learned_line,
    run_page,
    spectrum_panel,
    step_at,
    stretches,
    timeline_table,
)
from stairwise.report.timeline import Look
from stairwise.staircase.advice import Advice
from stairwise.staircase.notes import noted
from stairwise.table import Table

SAME_PACE = 0.01  # runs whose t per step differ by more than this share start on the axis of steps


def runs_page(folders: Sequence[Path], spectrum: str = "", patient: bool = False) -> Page:
    """Make the page of one or more run folders.

    Arguments:
        spectrum: as in `run_page`.
        patient: show runs without records as not started, instead of an error.
    """
    if len(folders) == 1:
        return run_page(folders[0], spectrum)
    names = distinct_names(folders)
    runs = []
    for folder, name in zip(folders, names, strict=True):
        try:
            runs.append(replace(read_run(folder, spectrum), name=name))
        except InputError as error:
            if not patient:
                raise
            runs.append(_not_started(name, error))
    states = Counter(run.advice.state for run in runs)
    lead = noted("several", number=len(runs), states=", ".join(f"{n} {state}" for state, n in states.items()))
    facts = {"records": "; ".join(f"{run.name}: {run.facts['records']}" for run in runs)}
    facts |= {f"{run.name}: {key}": value for run in runs for key, value in run.facts.items() if key != "records"}
    tables = [*_differences(runs), *(_named(timeline_table(run), run) for run in runs)]
    panels = [*_overlays(runs), *(_own(run) for run in runs)]
    axis = "t" if _same_pace(runs) else "step"
    title = f"Staircases of {', '.join(names[:-1])} and {names[-1]}"
    return Page(title, lead, panels, tables, facts=facts, summary=[_summary(runs)], axis=axis)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart.

    >>> distinct_names([Path("/a/run"), Path("/b/run"), Path("/b/other")])
    ['a/run', 'b/run', 'other']
    """
    whole = [folder.resolve() for folder in folders]
    for folder, times in Counter(whole).items():
        if times > 1:
            raise InputError("run", "must be given once", folder)

    def name(path: Path) -> str:
        others = [other for other in whole if other != path]
        for depth in range(1, len(path.parts)):
            if all(other.parts[-depth:] != path.parts[-depth:] for other in others):
                return "/".join(path.parts[-depth:])
        return str(path)

    return [name(path) for path in whole]


def _not_started(name: str, error: InputError) -> Reading:
    none = np.zeros(0)
    looks = [Look(0, 0.0, 0.0, Advice("not started", 0, 0, (noted("nothing yet", reason=error),)))]
    return Reading(name, "", [], none, none, none[:, None], None, None, looks, {"records": "no records yet"}, {})


def _named(table: Table, run: Reading) -> Table:
    return replace(table, title=f"{table.title}: {run.name}")


def _own(run: Reading) -> Panel:
    if not run.records:
        return Panel("Nothing to draw", AXIS, "λ", [], about=(run.name, run.advice))
    return replace(spectrum_panel(run), about=(run.name, run.advice), strip=stretches(run))


def _overlays(runs: Sequence[Reading]) -> list[Panel]:
    losses = []
    for i, run in enumerate(runs):
        loss = column(run.records, "loss")
        if np.isfinite(loss).any():
            losses.append(Line(run.name, run.t, loss, steps=run.step, run=i))
    counts = [
        learned_line(run, f"{run.name} (d = {run.advice.dimensions})", number=i)
        for i, run in enumerate(runs)
        if run.records
    ]
    panels = [Panel("Loss", AXIS, "loss", losses, log=True, below_zero="linear")] if losses else []
    return panels + ([Panel("Learned dimensions", AXIS, "dimensions", counts)] if counts else [])


def _summary(runs: Sequence[Reading]) -> Table:
    rows = [
        [run.name, run.advice.state, run.learned, _last_loss(run), f"{run.looks[-1].step:,.0f}", *_next(run)]
        for run in runs
    ]
    coverage = next((run.ahead.coverage for run in runs if run.ahead), 0.8)
    header = ["run", "state", "learned", "loss", "step", "next step", f"{100 * coverage:.0f} % interval"]
    return Table("Runs", header, rows)


def _last_loss(run: Reading) -> str:
    loss = column(run.records, "loss")
    known = loss[np.isfinite(loss)]
    return f"{known[-1]:.4g}" if len(known) else "–"


def _next(run: Reading) -> tuple[str, str]:
    """Expected step number of the next step, and its interval."""
    ahead = run.expected
    if ahead is None or run.clock is None:
        return "–", "–"
    first = int(np.argmin(ahead.times))
    expected, low, high = (step_at(run.clock, v[first]) for v in (ahead.times, ahead.low, ahead.high))
    return expected, f"{low} to {high}"


def _differences(runs: Sequence[Reading]) -> list[Table]:
    """Settings of the recipes that are not the same in all runs."""
    known = [run for run in runs if run.settings]
    settings = dict.fromkeys(key for run in known for key in run.settings)
    rows = [[key, *(str(run.settings.get(key, "–")) for run in known)] for key in settings]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    return [Table("Settings that differ", ["setting", *(run.name for run in known)], differ)] if differ else []


def _same_pace(runs: Sequence[Reading]) -> bool:
    """Whether a step is the same time t in all runs: the same learning rates."""
    paces = np.array([np.ptp(run.t) / max(np.ptp(run.step), 1) for run in runs if len(run.t) > 1])
    return bool(len(paces) == 0 or np.ptp(paces) <= SAME_PACE * paces.max())
