"""Figures of kernel modes: probe accuracy, extreme images, retrieval, embeddings."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import WIDTH, mode_colors, panels

LOOKS = ("-", "--", ":")


def draw_kernel_pca(
    accuracies: Mapping[str, NDArray], chance: float, times: NDArray, over_time: NDArray, extremes: NDArray
) -> Figure:
    """A: accuracy over d. B: over d and t. C: extreme images of the first modes, (2 × ends, modes, H, W, c)."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1.0, 1.1]))
    left, right = top.subplots(1, 2)
    for (name, accuracy), look, color in zip(accuracies.items(), LOOKS, mode_colors(3), strict=False):
        left.plot(np.arange(1, len(accuracy) + 1), accuracy, look, color=color, linewidth=1.6, label=name)
    left.axhline(chance, color="0.7", linewidth=0.8)
    left.text(len(next(iter(accuracies.values()))), chance, "chance", ha="right", va="bottom", fontsize=7, color="0.5")
    left.set(xlabel="embedding dimension $d$", ylabel="probe accuracy", ylim=(0, None))
    left.legend(loc="center right")
    left.set_title("A   how many dimensions")
    image = right.pcolormesh(
        times, np.arange(1, over_time.shape[1] + 1), over_time.T, cmap="cividis", shading="nearest"
    )
    right.set(xscale="log", xlabel="time $t$", ylabel="embedding dimension $d$")
    right.set_title("B   how long")
    top.colorbar(image, ax=right, label="probe accuracy")
    _extremes(bottom, extremes)
    return figure


def _extremes(figure: Figure, images: NDArray) -> None:
    ends, modes = images.shape[0] // 2, images.shape[1]
    grid = figure.subplots(modes, 2 * ends + 1, gridspec_kw={"width_ratios": [1] * ends + [0.5] + [1] * ends})
    for j in range(modes):
        for i, ax in enumerate(grid[j]):
            ax.axis("off")
            if i != ends:
                pixels = images[i if i < ends else i - 1, j]
                ax.imshow(pixels.squeeze(), cmap="gray", interpolation="nearest")
        grid[j][0].text(-0.25, 0.5, str(j + 1), transform=grid[j][0].transAxes, ha="right", va="center", fontsize=7)
    figure.suptitle(
        "C   images at the low and high ends of the first modes", x=0.01, ha="left", fontsize=8, weight="bold"
    )


def draw_retrieval(found: NDArray, top: Sequence[int], tested: int) -> Figure:
    """Retrieval rate `found` (d, len(top)) over the number of modes."""
    figure, (ax,) = panels(1, height=2.6)
    dims = np.arange(1, len(found) + 1)
    for i, (k, color) in enumerate(zip(top, mode_colors(len(top)), strict=True)):
        ax.plot(dims, found[:, i], color=color, linewidth=1.8)
        ax.text(
            dims[-1] * 1.01, found[-1, i], f"among {k}" if k > 1 else "first", fontsize=7, va="center", color="0.25"
        )
        ax.axhline(k / tested, color=color, linewidth=0.7, linestyle=":")
    ax.set(xlabel="modes used", ylabel="share found", xlim=(1, dims[-1] * 1.1), ylim=(0, 1))
    ax.set_title("Right halves found from left halves (dotted: chance)")
    return figure


def draw_convergence(counts: NDArray, errors: Mapping[str, NDArray], overlaps: Mapping[str, NDArray]) -> Figure:
    """Over the number of landmarks or features, (seeds, counts) each. A: error of γ. B: overlap with the exact span."""
    figure, axes = panels(2, height=2.7)
    looks = dict(zip(errors, zip(("-", "--", ":", "-."), mode_colors(len(errors)), strict=False), strict=False))
    for ax, values in zip(axes, (errors, overlaps), strict=True):
        for name, measured in values.items():
            look, color = looks[name]
            ax.plot(counts, np.median(measured, axis=0), look, color=color, linewidth=1.6, label=name)
            ax.fill_between(counts, measured.min(axis=0), measured.max(axis=0), color=color, alpha=0.15, linewidth=0)
        ax.set(xscale="log", xlabel="landmarks or random features")
    axes[0].set(yscale="log", ylabel=r"largest relative error of $\gamma_j$")
    axes[0].set_title("A   eigenvalues")
    axes[1].set(ylabel="share of the span in common", ylim=(0, 1.02))
    axes[1].set_title("B   embeddings of new points")
    axes[1].legend(loc="lower right")
    return figure


def draw_embedding(gamma: NDArray, z: NDArray, times: NDArray, spectra: NDArray) -> Figure:
    """A: γ_j. B: points in the two leading modes. C: eigenvalues of C over time, median over initializations (T, d)."""
    figure, axes = panels(3, height=2.3)
    colors = mode_colors(len(gamma))
    axes[0].semilogy(np.arange(1, len(gamma) + 1), gamma, color="0.7", linewidth=0.8, zorder=0)
    axes[0].scatter(np.arange(1, len(gamma) + 1), gamma, c=colors, s=14)
    axes[0].set(xlabel="mode", ylabel=r"$\gamma_j$")
    axes[0].set_title("A   spectrum")
    _scatter(axes[1], z)
    for j, color in enumerate(colors):
        axes[2].plot(times, spectra[:, j], color=color, linewidth=1.6)
    axes[2].set(xlabel="time $t$", ylabel=r"median $\lambda_j$ of $C$", xlim=(0, times[-1]))
    axes[2].set_title("C   staircase")
    return figure


def _scatter(ax: Axes, z: NDArray) -> None:
    second = z[:, 1] if z.shape[1] > 1 else np.zeros(len(z))
    ax.scatter(z[:, 0], second, s=3, color="#4a6fa5", alpha=0.5, linewidth=0)
    ax.set(xlabel="mode 1", ylabel="mode 2")
    ax.set_title("B   embeddings")
