"""The paper's appendix: entries of A(t) (Fig. 6), and one mode on its loss landscape (Figs. 8 and 9)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, PREDICTED, key, mode_colors, panels

# the paper's red, blue and green, light enough to show the theory on top
DIAGONAL, ABOVE, BELOW = "#d98880", "#7fb3d5", "#7dcea0"


def draw_traces(times: NDArray, true: NDArray, theory: NDArray, floor: float) -> Figure:
    """|s_j| in red, |a_jk| above the diagonal in blue, below it in green; theory dashed. Arrays (T, d, m)."""
    figure, (ax,) = panels(1, height=3.2)
    _, d, m = true.shape
    ends: list[tuple[float, str, str]] = []
    for j in range(d):
        for k in range(m):
            color = DIAGONAL if j == k else ABOVE if j < k else BELOW
            size = np.abs(true[:, j, k])
            ax.semilogy(times, np.where(size > floor, size, np.nan), **{**MEASURED, "color": color})
            if j <= k:
                ax.semilogy(times, np.abs(theory[:, j, k]), **PREDICTED)
            name = f"$s_{j + 1}$" if j == k else f"$a_{{{j + 1}{k + 1}}}$"
            ends.append((float(size[-1]), name, color))
    _label_ends(ax, times[-1], ends)
    ax.set(xlabel="time $t$ (of the appendix, 4 × lr × step)", ylabel="size of the entry", xlim=(0, times[-1] * 1.06))
    ax.set_ylim(floor, 10)
    looks = [("on the diagonal", DIAGONAL), ("above", ABOVE), ("below", BELOW)]
    entries = [(name, {"color": color}) for name, color in looks]
    key(figure, [*entries, ("closed form, leading order", PREDICTED)])
    return figure


def _label_ends(ax: Axes, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Label the right ends of the curves, and move labels apart that would overlap."""
    last = np.inf
    for value, name, color in sorted(ends, reverse=True):
        spot = min(np.log10(max(value, 1e-300)), last - 0.42)
        last = spot
        ax.annotate(name, (x * 1.008, 10**spot), fontsize=7, color=color, va="center", annotation_clip=False)


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
