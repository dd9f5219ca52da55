"""Loss landscapes of one mode, and its trajectories on them (Figs. 8 and 9 of the paper)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, PREDICTED, key, mode_colors, panels


def _landscape(ax: Axes, x: NDArray, loss: NDArray, title: str, rests: Sequence[float], coordinate: str) -> None:
    ax.plot(x, loss, **{**MEASURED, "color": "#4a6fa5", "linewidth": 1.8})
    ax.plot(rests, np.interp(rests, x, loss), "o", color="#d1495b", markersize=4, zorder=3)
    ax.set(xlabel=coordinate, ylabel=r"loss of the mode $\mathcal{L}_j$", xlim=(x[0], x[-1]), ylim=(-0.08, 2.2))
    ax.set_title(title)


def draw_landscapes(
    x: NDArray, losses: Sequence[NDArray], titles: Sequence[str], rests: Sequence[Sequence[float]]
) -> Figure:
    """One panel per landscape, with its minima marked."""
    figure, axes = panels(2, rows=2, height=2.0)
    for letter, ax, loss, title, rest in zip("ABCD", axes, losses, titles, rests, strict=True):
        _landscape(ax, x, loss, f"{letter}   {title}", rest, r"$\bar s_j$")
    return figure


def draw_symmetry_breaking(
    x: NDArray,
    losses: tuple[NDArray, NDArray],
    times: NDArray,
    paths: tuple[NDArray, NDArray],
    simulated: tuple[NDArray, NDArray],
    gamma: NDArray,
) -> Figure:
    """A, B: self-supervised and supervised landscapes. C, D: paths (T, modes) for each γ, exact and integrated."""
    figure, axes = panels(2, rows=2, height=2.0)
    _landscape(axes[0], x, losses[0], "A   self-supervised: two minima, unstable origin", [-1, 1], r"$\bar s_j$")
    _landscape(axes[1], x, losses[1], "B   supervised: one minimum", [1], r"$\bar c_j$")
    names = ("C   waits, then steps", "D   starts at once")
    for ax, name, exact, flow, coordinate in zip(
        axes[2:], names, paths, simulated, (r"$\bar s_j$", r"$\bar c_j$"), strict=True
    ):
        for j, color in enumerate(mode_colors(len(gamma))):
            ax.plot(times, flow[:, j], **{**MEASURED, "color": color})
        ax.plot(times, exact, **PREDICTED)
        ax.set(xlabel="time $t$", ylabel=coordinate, xlim=(0, times[-1]), ylim=(-0.03, 1.1))
        ax.set_title(name)
    axes[3].legend([rf"$\gamma$ = {g:.2g}" for g in gamma], loc="lower right")
    key(figure, [("integrated", MEASURED), ("exact", PREDICTED)])
    return figure
