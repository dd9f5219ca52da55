"""Entries of A(t), exact and to leading order (Fig. 6 of the paper)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, PREDICTED, key, panels

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
