"""The page of a run: its staircase, its steps, what comes next, in one HTML file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.monitor.advice import advise
from stairwise.monitor.forecast import Forecast, forecast_steps
from stairwise.report.page import Line, Page, Panel, Table
from stairwise.theory.spectra import effective_rank, participation_ratio

__all__ = ["run_page"]

Floats = NDArray[np.float64]
AXIS = "time t = Σ learning rate"
SHOWN = 24  # curves


def run_page(name: str, records: list[dict[str, Any]], spectrum: str, facts: dict[str, str]) -> Page:
    """Everything that can be read off the records of a run.

    Arguments:
        records: as `stairwise train` or `SpectrumMonitor.attach` write them.
        spectrum: "eigenvalues" (of C) or "covariance": which is followed.
    """
    measured = [r for r in records if spectrum in r]
    if len(measured) < 2:
        raise InputError("run", "must have at least two records", len(measured), "let it train for a while")
    t, step = (np.array([r[key] for r in measured], dtype=float) for key in ("t", "step"))
    spectra = np.array([r[spectrum] for r in measured], dtype=float)
    ahead = forecast_steps(t, spectra) if len(t) >= 8 else None
    lead = " ".join(advise(t, spectra)) if ahead else "Too few records yet to say more."
    marks = list(ahead.done.times) if ahead else []
    panels = []
    if "loss" in measured[0]:
        loss = Line("loss", t, np.array([r["loss"] for r in measured], dtype=float), (1, 3))
        panels.append(Panel("Loss", AXIS, "loss", [loss], marks))
    of = "C" if spectrum == "eigenvalues" else "the covariance of z"
    panels.append(Panel(f"Eigenvalues of {of}", AXIS, "λ", _curves(t, spectra, ahead), marks, log=True))
    if "hidden" in measured[0]:
        hidden = np.array([r["hidden"] for r in measured], dtype=float)
        panels.append(Panel("Eigenvalues of the representations", AXIS, "λ", _curves(t, hidden, None), marks, log=True))
    ranks = [
        Line("effective rank (RankMe)", t, effective_rank(spectra), (0, 3)),
        Line("participation ratio", t, participation_ratio(spectra), (1, 3)),
    ]
    panels.append(Panel("Dimensions in use", AXIS, "dimensions", ranks, marks))
    tables = [_steps(ahead, t, step), _coming(ahead)] if ahead else []
    return Page(f"Staircase of {name}", lead, panels, [table for table in tables if table.rows], [], facts)


def _curves(t: Floats, spectra: Floats, ahead: Forecast | None) -> list[Line]:
    d = min(SHOWN, spectra.shape[1])
    lines = [Line(f"λ{j + 1}", t, np.maximum(spectra[:, j], 1e-12), (j, d), legend=False) for j in range(d)]
    if ahead is not None and len(ahead.modes):
        end = float(np.clip(ahead.times.max(), ahead.now, ahead.now + 0.5 * (ahead.now - t[0])))
        later = np.linspace(ahead.now, end, 60)
        foreseen = ahead.eigenvalues(later)
        for k, j in enumerate(ahead.modes):
            if j < d:
                lines.append(Line(f"λ{j + 1} expected", later, foreseen[:, k], dashed=True, legend=False))
    return lines


def _steps(ahead: Forecast, t: Floats, step: Floats) -> Table:
    done = ahead.done
    rows = [
        [str(j + 1), f"{time:.4g}", f"{np.interp(time, t, step):,.0f}", f"{rise:.3g}", f"{level:.3g}", str(event + 1)]
        for j, time, rise, level, event in zip(
            done.modes, done.times, done.rise_times, done.levels, done.events, strict=True
        )
    ]
    return Table("Steps taken", ["mode", "t", "step", "rise time 1/8γ", "plateau", "event"], rows)


def _coming(ahead: Forecast) -> Table:
    order = np.argsort(ahead.times)
    rows = [
        [str(ahead.modes[k] + 1), f"{ahead.times[k]:.4g}", f"{ahead.low[k]:.4g} to {ahead.high[k]:.4g}"] for k in order
    ]
    return Table("Steps to come", ["mode", "expected t", f"{100 * ahead.coverage:.0f} % interval"], rows)
