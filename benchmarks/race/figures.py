"""Figures of the race: measures over views and seconds, one panel per loss."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.race.entrants import METHODS, RACED
from benchmarks.race.store import Result
from benchmarks.race.summary import Group, groups, seconds_per_step
from stairwise.figures.style import key, panels, style

NAMES = {"simclr": "SimCLR", "vicreg": "VICReg", "barlow_twins": "Barlow Twins", "frossl": "FroSSL", "plain": "λ = 1"}
NAMES |= {"fourth_power": "fourth power"}
METHOD_NAMES = {"sgd": "SGD", "lars": "LARS", "adamw": "AdamW", "muon": "Muon", "precondition": "preconditioned SGD"}
METHOD_NAMES |= {f"{method}, 4 views": f"{METHOD_NAMES[method]}, 4 views" for method in ("lars", "muon")}
METHOD_NAMES["muon, decay"] = "Muon with decay"
COLORS = {"sgd": "0.6", "lars": "0.35", "adamw": "tab:orange", "muon": "tab:blue", "precondition": "tab:green"}
COLORS |= {"lars, 4 views": "tab:brown", "muon, 4 views": "tab:cyan", "muon, decay": "tab:purple"}
MEASURES = {"logistic": "accuracy, logistic", "knn": "accuracy, kNN", "grown": "modes in use", "rank": "effective rank"}
FIGURES = {
    "speed.png": (("logistic", "views"), ("logistic", "seconds")),
    "speed_modes.png": (("knn", "views"), ("grown", "views"), ("rank", "views")),
}


def draw(
    results: dict[str, Result], data: str, rows: Sequence[tuple[str, str]] = FIGURES["speed.png"]
) -> Figure | None:
    """Rows of panels, one panel per loss: a measure over views or seconds. Lines are one seed along its run, points the
    means of final runs; None without runs."""
    shown = drawn(results, data)
    if not shown:
        return None
    with style():
        figure, axes = panels(len(RACED), len(rows), height=2.0)
        for axis, ((measure, over), loss) in zip(axes, product(rows, RACED), strict=True):
            for group in (g for g in shown if g.loss == loss):
                _draw_group(axis, group, measure, _scale(results, group, over))
            axis.set(xscale="log", xlabel=over, ylabel=MEASURES[measure] if loss == RACED[0] else "")
        for axis, loss in zip(axes, RACED, strict=False):
            axis.set_title(NAMES[loss])
        methods = [m for m in METHODS if any(g.method == m for g in shown)]
        key(figure, [(METHOD_NAMES.get(m, m), {"color": COLORS.get(m, "tab:purple")}) for m in methods])
    return figure


def draw_spectra(results: dict[str, Result], data: str) -> Figure | None:
    """Eigenvalues at the end relative to the largest, one panel per loss: medians over seeds and their range, for
    settings of several seeds; None without these."""
    shown = [g for g in drawn(results, data) if len(_spectra(g)) > 1]
    if not shown:
        return None
    lengths = sorted({g.steps for g in shown}, reverse=True)
    with style():
        figure, axes = panels(len(RACED), 1, height=2.4)
        for axis, loss in zip(axes, RACED, strict=True):
            for group in (g for g in shown if g.loss == loss):
                values, color = _spectra(group), COLORS.get(group.method, "tab:purple")
                number = np.arange(1, values.shape[1] + 1)
                axis.fill_between(number, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
                axis.plot(number, np.median(values, axis=0), color=color, **_dashes(group.steps, lengths))
            axis.set(yscale="log", xlabel="mode", title=NAMES[loss])
        low = min(axis.get_ylim()[0] for axis in axes)
        for axis in axes:
            axis.set_ylim(low, 2.0)
        axes[0].set_ylabel("variance / largest")
        about = sorted({(g.method, g.steps) for g in shown})
        lines = [(f"{METHOD_NAMES[m]}, {n} updates", {"color": COLORS[m], **_dashes(n, lengths)}) for m, n in about]
        key(figure, lines)
    return figure


def _spectra(group: Group) -> NDArray[np.float64]:
    """The leading eigenvalues of the covariance on test images, relative to the largest, (seeds, modes)."""
    found = [run["spectrum"] for run in group.runs if run.get("spectrum") and not run["diverged"]]
    values = np.array([spectrum[: min(map(len, found))] for spectrum in found], dtype=float)
    return values / values[:, :1] if len(found) else np.zeros((0, 0))


def _dashes(steps: int, lengths: Sequence[int]) -> dict[str, Any]:
    """The longest runs are solid, shorter ones dashed, then dotted."""
    return {"linewidth": 1.2, "linestyle": ("-", "--", ":")[min(lengths.index(steps), 2)]}


def drawn(results: dict[str, Result], data: str) -> list[Group]:
    """Final runs that the figures show."""
    return [g for g in groups(results.values()) if g.data == data and g.loss in RACED and g.mean() > 0]


def _scale(results: dict[str, Result], group: Group, over: str) -> float | None:
    """Views per update, or seconds, if they were measured."""
    if over == "views":
        return 2.0 * group.runs[0]["batch"]
    return seconds_per_step(results, group.data, group.loss, group.method)


def _draw_group(axis: Any, group: Group, measure: str, scale: float | None) -> None:
    color, ends, first = COLORS.get(group.method, "tab:purple"), group.ends(measure), group.runs[0]
    if scale is None or not len(ends):
        return
    spread, end = ends.std(ddof=1) if len(ends) > 1 else 0.0, [scale * group.steps]
    axis.errorbar(end, [ends.mean()], [spread], fmt="o", color=color, markersize=3, capsize=2, linewidth=1)
    if not first["diverged"]:
        axis.plot([scale * step for step in first["step"]], first[measure], color=color, linewidth=0.8, alpha=0.6)
