"""What a trained network did: loss and eigenvalues over time, one row a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, mode_colors, panels

__all__ = ["Course", "draw_courses"]

THIN = {**MEASURED, "linewidth": 1.1}  # dozens of curves a panel


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


def _draw_loss(ax: Axes, course: Course) -> None:
    ax.plot(course.times, course.loss, **{**THIN, "color": "#7d9cc0"})
    ax.set(xlabel="time $t$ = Σ lr", ylabel="loss", xlim=(0, course.times[-1]), title=course.name)


def _draw_spectra(ax: Axes, course: Course, shown: int, log: bool) -> None:
    curves = course.spectra[:, :shown]
    colors = mode_colors(curves.shape[1])
    for j in reversed(range(curves.shape[1])):
        ax.plot(course.times, np.where(curves[:, j] > 0, curves[:, j], np.nan), **{**THIN, "color": colors[j]})
    ax.set(xlabel="time $t$ = Σ lr", ylabel=f"eigenvalues of {course.of}", xlim=(0, course.times[-1]))
    if log:
        top = np.nanmax(curves)
        ax.set(yscale="log", ylim=(max(1e-7 * top, np.min(curves[curves > 0], initial=top) / 2), 2 * top))
    else:
        ax.set(ylim=(0, None))
