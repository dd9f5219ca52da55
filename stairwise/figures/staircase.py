"""The main figure: loss and eigenvalues of C over time, measured and predicted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, PREDICTED, key, mode_colors, panels

MARK: dict[str, Any] = {"color": "0.72", "linewidth": 0.7, "linestyle": (0, (1, 1.5))}


def draw_loss(
    ax: Axes, times: NDArray, measured: NDArray, predicted: NDArray | None = None, steps: NDArray | Sequence[float] = ()
) -> None:
    """Loss over time; predicted step times as vertical lines."""
    for tau in np.asarray(steps)[np.isfinite(steps)]:
        if tau <= times[-1]:
            ax.axvline(tau, **MARK, zorder=0)
    ax.plot(times, measured, **{**MEASURED, "color": "#7d9cc0"})
    if predicted is not None:
        ax.plot(times, predicted, **PREDICTED)
    ax.set(xlabel="time $t$ = lr × step", ylabel=r"loss $\|C-I\|^2$", xlim=(0, times[-1]), ylim=(0, None))


def draw_spectrum(ax: Axes, times: NDArray, measured: NDArray, predicted: NDArray | None = None) -> None:
    """Eigenvalues of C over time, coloured by mode and numbered at their rises."""
    d = measured.shape[1]
    for j, color in enumerate(mode_colors(d)):
        ax.plot(times, measured[:, j], **{**MEASURED, "color": color})
        if predicted is not None:
            ax.plot(times, predicted[:, j], **PREDICTED)
    _number_the_rises(ax, times, measured)
    ax.set(xlabel="time $t$ = lr × step", ylabel=r"eigenvalues $\lambda_j$ of $C$")
    ax.set(xlim=(0, times[-1]), ylim=(-0.03, 1.14), yticks=[0, 0.5, 1])


def _number_the_rises(ax: Axes, times: NDArray, measured: NDArray) -> None:
    """Write the number of each curve above the point where it crosses 1/2; close ones share a label."""
    rises = [(times[np.argmax(curve >= 0.5)], j + 1) for j, curve in enumerate(measured.T) if (curve >= 0.5).any()]
    groups: list[list[tuple[float, int]]] = []
    for at, j in rises:
        if groups and at - groups[-1][0][0] <= 0.035 * times[-1]:
            groups[-1].append((at, j))
        else:
            groups.append([(at, j)])
    for group in groups:
        middle, numbers = np.mean([at for at, _ in group]), [j for _, j in group]
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}{'–' if len(numbers) > 2 else ','}{numbers[-1]}"
        ax.text(max(middle, 0.015 * times[-1]), 1.05, name, fontsize=6, ha="center", va="bottom", color="0.3")


def draw_staircase(
    times: NDArray,
    measured: NDArray,
    predicted: NDArray,
    steps: NDArray | Sequence[float],
    measured_name: str = "gradient descent",
    predicted_name: str = "closed form",
) -> Figure:
    """Two panels, Fig. 1A,B of the paper.

    Arguments:
        times: (T,).
        measured: eigenvalues of C, (T, d).
        predicted: eigenvalues by a closed form, (T, d).
        steps: predicted step times, (d,).
    """
    figure, (left, right) = panels(2, height=2.5)
    draw_loss(left, times, ((1 - measured) ** 2).sum(1), ((1 - predicted) ** 2).sum(1), steps)
    draw_spectrum(right, times, measured, predicted)
    left.set_title("A   one step down per dimension learned")
    right.set_title("B   one eigenvalue up per step")
    key(figure, [(measured_name, MEASURED), (predicted_name, PREDICTED), ("predicted step times", MARK)])
    return figure


def draw_outlook(times: NDArray, spectra: NDArray, loss: NDArray, steps: NDArray) -> Figure:
    """Predicted loss and eigenvalues. Bands cover 90 % of initializations, bars 90 % of the step times.

    Arguments:
        times: (T,).
        spectra: median eigenvalues of C, (T, d).
        loss: quantiles .05, .5, .95, (3, T).
        steps: quantiles .05, .5, .95 of the step times, (3, d).
    """
    figure, (left, right) = panels(2, height=2.5)
    left.fill_between(times, loss[0], loss[2], color="#7d9cc0", alpha=0.35, linewidth=0)
    draw_loss(left, times, loss[1])
    draw_spectrum(right, times, spectra)
    for j, color in enumerate(mode_colors(spectra.shape[1])):
        right.plot(np.minimum(steps[[0, 2], j], times[-1]), [0.5, 0.5], color=color, linewidth=1.0)
    left.set_title("A   expected loss, 90 % of initializations")
    right.set_title("B   expected eigenvalues, median")
    return figure
