"""What a trained network did: loss and eigenvalues over time, one row a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, PREDICTED, mode_colors, panels

__all__ = ["Course", "draw_bands", "draw_courses", "draw_histograms", "draw_layers", "draw_probes"]

THIN = {**MEASURED, "linewidth": 1.1}  # dozens of curves a panel
RISEN, WAITING = 0.02, "#c9ced6"  # modes that never reach this share of the largest eigenvalue are grey


@dataclass(frozen=True, eq=False)
class Course:
    """One run as it is drawn.

    Attributes:
        name: of the run.
        times: t = Σ lr, (T,).
        loss: (T,).
        spectra: eigenvalues, (T, d).
        of: what they are eigenvalues of.
    """

    name: str
    times: NDArray
    loss: NDArray
    spectra: NDArray
    of: str


def draw_courses(courses: Sequence[Course], shown: int = 32) -> Figure:
    """Three panels a run: loss, eigenvalues, eigenvalues on a logarithmic axis."""
    figure, axes = panels(3, rows=len(courses), height=2.0)
    for course, row in zip(courses, np.array(axes).reshape(-1, 3), strict=True):
        _draw_loss(row[0], course)
        for ax, log in ((row[1], False), (row[2], True)):
            _draw_spectra(ax, course, shown, log)
    return figure


def draw_bands(spectra: Sequence[tuple[str, NDArray, NDArray, float]]) -> Figure:
    """Title, times, eigenvalues (T, d) and threshold of each: a panel on a logarithmic axis, the threshold dashed."""
    columns = min(len(spectra), 2)
    figure, axes = panels(columns, rows=-(-len(spectra) // columns), height=2.4)
    for ax, (title, t, lam, threshold) in zip(axes, spectra, strict=False):
        course = Course(title, t, t, lam, "")
        _draw_spectra(ax, course, lam.shape[1], log=True)
        ax.set(title=title, ylabel="eigenvalues")
        if threshold > 0:
            ax.axhline(threshold, **PREDICTED)
    for ax in axes[len(spectra) :]:
        ax.set_visible(False)
    return figure


def draw_histograms(rows: Sequence[tuple[str, NDArray, NDArray, Sequence[float]]]) -> Figure:
    """Name, times (T,), spectra (T, d) and thresholds (T,) of each row: histograms of log λ, thresholds dashed."""
    columns = len(rows[0][1])
    figure, axes = panels(columns, rows=len(rows), height=1.7)
    for r, (name, times, spectra, thresholds) in enumerate(rows):
        positive = np.maximum(spectra, 1e-6 * spectra.max())
        bins = np.geomspace(positive.min() * 0.8, positive.max() * 1.25, 33)
        for c, (t, lam, threshold) in enumerate(zip(times, positive, thresholds, strict=True)):
            ax = axes[r * columns + c]
            ax.hist(lam, bins=list(bins), color="#1b4a7a")
            ax.set(xscale="log", title=f"{name}, t = {t:.3g}" if c == 0 else f"t = {t:.3g}", xlabel="eigenvalue")
            if c == 0:
                ax.set_ylabel("modes")
            if threshold > 0:
                ax.axvline(threshold, **PREDICTED)
    return figure


def draw_layers(columns: Sequence[tuple[str, NDArray, NDArray, NDArray, str]]) -> Figure:
    """Name, times, eigenvalues of embeddings, of representations, and what the former are of: a column each."""
    figure, axes = panels(len(columns), rows=2, height=2.2)
    for c, (name, t, z, h, of) in enumerate(columns):
        for ax, lam, what in ((axes[c], z, of), (axes[len(columns) + c], h, "Cov h")):
            _draw_spectra(ax, Course(name, t, t, lam, what), lam.shape[1], log=True)
        axes[c].set_title(name)
    return figure


def draw_probes(methods: Sequence[tuple[str, dict[str, tuple[NDArray, NDArray]]]]) -> Figure:
    """Name and, for each kind of initialization, progress and accuracy: a panel each."""
    figure, axes = panels(len(methods), height=2.3)
    looks = {"standard": {"color": "#1b4a7a"}, "small": {"color": "#c08a2d"}}
    for ax, (name, found) in zip(axes, methods, strict=True):
        for kind, (x, y) in found.items():
            ax.plot(x, 100 * y, **{**MEASURED, "linewidth": 1.6, **looks[kind]}, marker="o", markersize=3, label=kind)
        ax.set(xlabel="share of the training", ylabel="probe accuracy in %", title=name)
    axes[0].legend(title="initialization", loc="lower right")
    return figure


def _draw_loss(ax: Axes, course: Course) -> None:
    ax.plot(course.times, course.loss, **{**THIN, "color": "#7d9cc0"})
    ax.set(xlabel="time $t$ = Σ lr", ylabel="loss", xlim=(0, course.times[-1]), title=course.name)


def _draw_spectra(ax: Axes, course: Course, shown: int, log: bool) -> None:
    curves = course.spectra[:, :shown]
    risen = int((curves.max(axis=0) > RISEN * curves.max()).sum())
    colors = [*mode_colors(risen), *[WAITING] * (curves.shape[1] - risen)]
    for j in reversed(range(curves.shape[1])):
        ax.plot(course.times, np.where(curves[:, j] > 0, curves[:, j], np.nan), **{**THIN, "color": colors[j]})
    ax.set(xlabel="time $t$ = Σ lr", ylabel=f"eigenvalues of {course.of}", xlim=(0, course.times[-1]))
    if log:
        top = np.nanmax(curves)
        ax.set(yscale="log")
        ax.minorticks_off()
        ax.set(ylim=(max(1e-7 * top, np.min(curves[curves > 0], initial=top) / 2), 2 * top))
    else:
        ax.set(ylim=(0, None))
