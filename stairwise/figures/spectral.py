"""Two rules, two staircases: gradient flow and spectral flow on the same data."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from stairwise.figures.staircase import draw_spectrum
from stairwise.figures.style import MEASURED, PREDICTED, key, mode_colors, panels


def draw_two_rules(
    gamma: NDArray, gradient: tuple[NDArray, NDArray, NDArray], spectral: tuple[NDArray, NDArray, NDArray]
) -> Figure:
    """A, B: eigenvalues of C under both rules. C: step times over γ, in logarithms.

    Arguments:
        gamma: eigenvalues of Γ, (d,).
        gradient, spectral: times (T,), simulated and predicted eigenvalues (T, d).
    """
    figure, (left, middle, right) = panels(3, height=2.5)
    draw_spectrum(left, *gradient)
    draw_spectrum(middle, *spectral)
    middle.set_ylabel("")
    left.set_title("A   gradient flow")
    middle.set_title("B   spectral flow (Muon)")
    _draw_steps(right, gamma, gradient, spectral)
    right.set_title("C   when each step comes")
    key(figure, [("simulated", MEASURED), ("predicted", PREDICTED)])
    return figure


def _draw_steps(
    ax: Axes, gamma: NDArray, gradient: tuple[NDArray, NDArray, NDArray], spectral: tuple[NDArray, NDArray, NDArray]
) -> None:
    for (times, measured, predicted), marker in ((gradient, "o"), (spectral, "s")):
        ax.plot(gamma, _steps(times, predicted), **PREDICTED)
        ax.scatter(gamma, _steps(times, measured), c=mode_colors(len(gamma)), s=18, marker=marker, zorder=3)
    second = min(1, len(gamma) - 1)
    look: dict[str, Any] = {"fontsize": 7, "color": "0.25"}
    at = [_steps(times, predicted)[second] for times, _, predicted in (gradient, spectral)]
    ax.text(gamma[second] / 1.3, at[0] / 1.3, r"gradient, about $\gamma^{-1}$", ha="right", va="top", **look)
    ax.text(gamma[0], at[1] * 1.2, r"spectral, $\gamma^{-1/2}$", ha="right", va="bottom", **look)
    ax.set(xscale="log", yscale="log", xlabel=r"eigenvalue $\gamma_j$ of $\Gamma$", ylabel="time of step $j$")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())


def _steps(times: NDArray, spectra: NDArray) -> NDArray:
    above = spectra >= 0.5
    return np.asarray(np.where(above.any(axis=0), times[above.argmax(axis=0)], np.nan))
