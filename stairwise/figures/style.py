"""A common style for all figures: colour shows the mode, line style shows measured or predicted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

MEASURED: dict[str, Any] = {"linestyle": "-", "linewidth": 2.4, "solid_capstyle": "round"}
PREDICTED: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 0.9, "color": "black"}
WIDTH = 6.75  # inches: a conference page with two columns

RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.dpi": 220,
}


@contextmanager
def style() -> Iterator[None]:
    """Use this style for everything drawn and saved inside the block."""
    with matplotlib.rc_context(RC):
        yield


def mode_colors(d: int) -> list[tuple[float, float, float, float]]:
    """d colours from dark (first mode) to light, readable on white and for colour-blind readers."""
    scale = matplotlib.colormaps["cividis"]
    return [scale(0.9 * j / max(d - 1, 1)) for j in range(d)]


def panels(columns: int, rows: int = 1, height: float = 2.3) -> tuple[Figure, list[Axes]]:
    """A figure of page width with rows × columns panels."""
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    return figure, axes


def key(figure: Figure, entries: Sequence[tuple[str, dict[str, Any]]], columns: int | None = None) -> None:
    """A legend of line styles below the panels, where it covers nothing; in one row, or in columns."""
    lines = [Line2D([], [], **{"color": "0.55", **look}) for _, look in entries]
    names = [name for name, _ in entries]
    figure.legend(lines, names, loc="outside lower center", ncols=columns or len(names), handlelength=2.6)
