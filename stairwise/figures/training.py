"""Loss and eigenvalues of trained networks over time, one row per run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stairwise.figures.staircase import draw_loss, draw_spectrum
from stairwise.figures.style import MEASURED, PREDICTED, WIDTH, mode_colors, panels

THIN = {**MEASURED, "linewidth": 1.1}  # for dozens of curves per panel
RISEN, WAITING = 0.02, "#c9ced6"  # modes that stay below this fraction of the largest are grey


@dataclass(frozen=True, eq=False)
class Course:
    """The data of one run to draw.

    Attributes:
        name: name of the run.
        times: t = Σ lr, (T,).
        loss: (T,).
        spectra: eigenvalues, (T, d).
        of: name of the matrix that has these eigenvalues.
    """

    name: str
    times: NDArray
    loss: NDArray
    spectra: NDArray
    of: str


def draw_courses(courses: Sequence[Course], shown: int = 32) -> Figure:
    """Three panels per run: loss, eigenvalues, eigenvalues on a logarithmic axis."""
    figure, axes = panels(3, rows=len(courses), height=2.0)
    for course, row in zip(courses, np.array(axes).reshape(-1, 3), strict=True):
        _draw_loss(row[0], course)
        for ax, log in ((row[1], False), (row[2], True)):
            _draw_spectra(ax, course, shown, log)
    return figure


def draw_parts(runs: Mapping[str, Sequence[Course]], shown: int = 32) -> Figure:
    """One row per run: its loss, and eigenvalues of each of its parts on a logarithmic axis."""
    columns = 1 + max(len(parts) for parts in runs.values())
    figure, axes = panels(columns, rows=len(runs), height=2.0)
    for (name, parts), row in zip(runs.items(), np.array(axes).reshape(-1, columns), strict=True):
        _draw_loss(row[0], parts[0])
        row[0].set_title(fill(name, 18))
        for ax, course in zip(row[1:], parts, strict=True):
            _draw_spectra(ax, course, shown, log=True)
            ax.set_title(course.name)
    return figure


def draw_banner(times: NDArray, measured: NDArray, predicted: NDArray, course: Course) -> Figure:
    """Loss and eigenvalues of C: of a linear model (A, B; predictions dashed) and of a network (C, D)."""
    figure, axes = panels(2, rows=2, height=1.9)
    draw_loss(axes[0], times, ((1 - measured) ** 2).sum(1), ((1 - predicted) ** 2).sum(1))
    draw_spectrum(axes[1], times, measured, predicted)
    _draw_loss(axes[2], course)
    _draw_spectra(axes[3], course, course.spectra.shape[1], log=False)
    titles = ("linear model: loss", "linear model: eigenvalues", f"{course.name}: loss", f"{course.name}: eigenvalues")
    for ax, letter, title in zip(axes, "ABCD", titles, strict=True):
        ax.set_title(f"{letter}   {title}")
    lines = [Line2D([], [], **{"color": "#7d9cc0", **look}) for look in (MEASURED, PREDICTED)]
    axes[0].legend(lines, ["measured", "predicted"], handlelength=2.6)
    return figure


def draw_bands(spectra: Sequence[tuple[str, NDArray, NDArray, float]]) -> Figure:
    """One logarithmic panel per (title, times, eigenvalues (T, d), threshold at the end); the threshold is dashed, and
    modes that end below it are grey."""
    columns = min(len(spectra), 2)
    figure, axes = panels(columns, rows=-(-len(spectra) // columns), height=2.4)
    for ax, (title, t, lam, threshold) in zip(axes, spectra, strict=False):
        risen = int((lam[-1] > threshold).sum()) if threshold > 0 else None
        _draw_spectra(ax, Course(title, t, t, lam, ""), lam.shape[1], log=True, risen=risen)
        ends = lam[-1][lam[-1] > 0]
        ax.set(title=title, ylabel="eigenvalues", ylim=(np.quantile(ends, 0.05) / 2, None))
        if threshold > 0:
            ax.axhline(threshold, **PREDICTED)
    for ax in axes[len(spectra) :]:
        ax.set_visible(False)
    return figure


def draw_histograms(rows: Sequence[tuple[str, NDArray, NDArray, Sequence[float]]]) -> Figure:
    """Histograms of log λ, one row per (name, times (T,), spectra (T, d), thresholds (T,)); thresholds are dashed."""
    columns = len(rows[0][1])
    figure, axes = panels(columns, rows=len(rows), height=1.7)
    for r, (name, times, spectra, thresholds) in enumerate(rows):
        least = 1e-11 * spectra.max()  # C may have eigenvalues below zero
        bins = np.geomspace(spectra[spectra > least].min() * 0.8, spectra.max() * 1.25, 33)
        row = axes[r * columns : (r + 1) * columns]
        for ax, t, lam, threshold in zip(row, times, spectra, thresholds, strict=True):
            moment = f"t = {t:.3g}" if t < 1e3 else f"t = {t:,.0f}"
            hidden = int((lam <= least).sum())  # too small for the logarithmic axis, or not positive
            ax.hist(lam[lam > least], bins=list(bins), color="#1b4a7a")
            ax.set(xscale="log", title=moment if ax is not row[0] else f"{name}\n{moment}")
            ax.set_xlabel(f"eigenvalue\n({hidden} not shown)" if hidden else "eigenvalue")
            if threshold > 0:
                ax.axvline(threshold, **PREDICTED)
        top = max(ax.get_ylim()[1] for ax in row)
        for ax in row:
            ax.set_ylim(0, top)
        row[0].set_ylabel("modes")
    return figure


@dataclass(frozen=True, eq=False)
class Layers:
    """Embeddings and representations of one run to draw.

    Attributes:
        name: name of the run.
        times: t = Σ lr, (T,).
        z, h: eigenvalues of the embeddings and of the representations, (T, k).
        of: name of the matrix that has the eigenvalues z.
        steps: times of the steps of z, (K,).
        around: shares of z and of h along new modes at the records around each step, (K, records); None: not known.
    """

    name: str
    times: NDArray
    z: NDArray
    h: NDArray
    of: str
    steps: NDArray
    around: tuple[NDArray, NDArray] | None = None


def draw_layers(runs: Sequence[Layers]) -> Figure:
    """One row per run: eigenvalues of z, of h and, where they are known, shares along new modes around the steps, which
    are dotted."""
    columns = 3 if any(run.around for run in runs) else 2
    figure, axes = panels(columns, rows=len(runs), height=2.0)
    for i, run in enumerate(runs):
        row = axes[columns * i : columns * (i + 1)]
        for ax, lam, what in zip(row, (run.z, run.h), (run.of, "Cov h"), strict=False):
            _draw_spectra(ax, Course(run.name, run.times, run.times, lam, what), lam.shape[1], log=True)
            for step in run.steps:
                ax.axvline(step, color="0.4", linestyle=":", linewidth=0.6, zorder=0)
        row[0].set_title(run.name)
        if run.around:
            _draw_around(row[2], *run.around)
        elif columns == 3:
            row[2].set_visible(False)
    return figure


def _draw_around(ax: Axes, z: NDArray, h: NDArray) -> None:
    """Shares around the steps: one thin line per step for h, and the medians of both."""
    reach = h.shape[1] // 2
    x = np.arange(-reach, reach + 1)
    ax.plot(x, h.T, color=WAITING, linewidth=0.7)
    for shares, name, color in ((z, "embeddings z", "#1b4a7a"), (h, "representations h", "#c08a2d")):
        seen = np.isfinite(shares).any(axis=0)
        ax.plot(x[seen], np.nanmedian(shares[:, seen], axis=0), **{**MEASURED, "color": color}, label=name)
    ax.set(xlabel="records from the step", ylabel="share, mean after step = 1", xlim=(-reach, reach), ylim=(0, 2))
    ax.legend(loc="upper left")


def draw_apart(
    runs: Mapping[str, tuple[NDArray, NDArray]],
    losses: Mapping[str, Sequence[tuple[NDArray, NDArray]]],
    numbers: Mapping[str, Mapping[str, Sequence[float]]],
) -> Figure:
    """Top: relative variances (T, k) over time of one run per method. Middle: losses of all its runs. Below: one panel
    per number, one dot per run."""
    figure = Figure(figsize=(WIDTH, 5.9), layout="constrained")
    parts: Any = figure.subfigures(3, 1, height_ratios=[1.1, 0.9, 1.0])
    top, middle, bottom = (
        part.subplots(1, n, squeeze=False)[0]
        for part, n in zip(parts, (len(runs), len(losses), len(numbers)), strict=True)
    )
    for ax, (name, (t, x)) in zip(top, runs.items(), strict=True):
        for j, color in reversed(list(enumerate(mode_colors(x.shape[1])))):
            ax.plot(t, x[:, j], **{**THIN, "color": color})
        ax.axhline(0.5, **PREDICTED)  # where a mode has risen
        ax.set(xscale="log", yscale="log", title=fill(name, 11), xlabel="time $t$ = Σ lr")
        ax.minorticks_off()
    top[0].set_ylabel("λ / typical variance")
    for ax, curves in zip(middle, losses.values(), strict=True):
        for t, loss in curves:
            ax.plot(t, loss, **THIN)
        ax.set(xscale="log", xlabel="time $t$ = Σ lr", xlim=(curves[0][0][-1] / 300, None))
        ax.minorticks_off()
    middle[0].set_ylabel("loss")
    for ax, (name, values) in zip(bottom, numbers.items(), strict=True):
        for i, seeds in enumerate(values.values()):
            ax.plot(np.full(len(seeds), i), seeds, "o", color="#1b4a7a", alpha=0.7, clip_on=False)
        ax.set(title=name, xlim=(-0.5, len(values) - 0.5), ylim=(0, None))
        ax.set_xticks(range(len(values)), [fill(title, 9) for title in values], fontsize="small")
    return figure


def draw_probes(methods: Sequence[tuple[str, dict[str, list[NDArray]]]]) -> Figure:
    """Two panels per method: name and, by kind of initialization, [progress, grown modes, accuracy]."""
    figure, axes = panels(2, rows=len(methods), height=2.6)
    colors = ("#1b4a7a", "#c08a2d", "#8c3b52", "#4f8a5b", "#7a6aa8", "#5aa0c8")
    for (name, curves), left, right in zip(methods, axes[::2], axes[1::2], strict=True):
        for i, (kind, (x, modes, y)) in enumerate(curves.items()):
            look = {**MEASURED, "linewidth": 1.6, "color": colors[i % len(colors)], "marker": "o", "markersize": 3}
            left.plot(x, 100 * y, **look, label=kind)
            right.plot(modes, 100 * y, **look)
        left.set(xlabel="share of the training", ylabel="probe accuracy in %", title=name)
        right.set(xlabel="grown modes", ylabel="probe accuracy in %", xlim=(0, None))
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend(title="initialization", loc="lower right")
    return figure


def _draw_loss(ax: Axes, course: Course) -> None:
    ax.plot(course.times, course.loss, **{**THIN, "color": "#7d9cc0"})
    ax.set(xlabel="time $t$ = Σ lr", ylabel="loss", xlim=(0, course.times[-1]), title=course.name)


def _draw_spectra(ax: Axes, course: Course, shown: int, log: bool, risen: int | None = None) -> None:
    """`risen`: modes that are not grey; None: those that have been above a fiftieth of the largest."""
    curves = course.spectra[:, :shown]
    if risen is None:
        risen = int(((curves.max(axis=0) > RISEN * curves.max()) | (curves[-1] > RISEN * curves[-1].max())).sum())
    colors = [*mode_colors(risen), *[WAITING] * (curves.shape[1] - risen)]
    for j in reversed(range(curves.shape[1])):
        ax.plot(course.times, np.where(curves[:, j] > 0, curves[:, j], np.nan), **{**THIN, "color": colors[j]})
    ax.set(xlabel="time $t$ = Σ lr", ylabel=f"eigenvalues of {course.of}", xlim=(0, course.times[-1]))
    if log:
        top = np.nanmax(curves)
        ax.set(yscale="log")
        ax.minorticks_off()
        ax.set(ylim=(max(1e-7 * top, np.min(curves[curves > 0], initial=top) / 2), 2 * top))
    else:  # single spikes would press the rest to the ground; the logarithmic panel shows them
        largest = curves.max(axis=1)
        ax.set(ylim=(0, 1.05 * min(largest.max(), 1.3 * np.quantile(largest, 0.95))))
