"""The tangent kernel of a run: its spectrum, and how well its predictions align with the trained span."""

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import MEASURED, key, panels

THEORY, PCA, CHANCE = "#1b4a7a", "#c08a2d", "#9aa3b2"


def draw_tangent(spectrum: NDArray, by_dimension: NDArray, by_pairs: NDArray, points: int) -> Figure:
    """Three panels: spectrum of K̃, alignment over the number of modes, alignment over the number of pairs."""
    figure, axes = panels(3, height=2.6)
    line = {**MEASURED, "linewidth": 1.6}
    positive = spectrum[spectrum > 0]
    axes[0].loglog(np.arange(1, len(positive) + 1), positive, **{**line, "color": THEORY})
    # smaller eigenvalues are rounding error
    axes[0].set(
        xlabel="mode", ylabel="eigenvalue of K̃", title="tangent kernel", ylim=(1e-8 * positive[0], 3 * positive[0])
    )
    modes = np.arange(1, by_dimension.shape[1] + 1)
    for values, name, color in zip(by_dimension, ("theory", "kernel PCA"), (THEORY, PCA), strict=True):
        axes[1].plot(modes, values, **{**line, "color": color}, label=name)
    axes[1].plot(modes, modes / points, color=CHANCE, linestyle="--", linewidth=1, label="chance")
    axes[1].set(xlabel="leading modes", ylabel="alignment", ylim=(0, 1), title="share of the trained span")
    axes[1].legend(frameon=False)
    for values, name, color in zip(by_pairs[1:], ("theory", "kernel PCA"), (THEORY, PCA), strict=True):
        axes[2].semilogx(by_pairs[0], values, marker="o", markersize=4, **{**line, "color": color}, label=name)
    axes[2].set(xlabel="pairs n", ylabel="alignment", ylim=(0, 1), title="with fewer pairs")
    axes[2].set_xticks(by_pairs[0], [f"{n:.0f}" for n in by_pairs[0]])
    axes[2].minorticks_off()
    return figure


def draw_alignments(
    rows: Sequence[tuple[str, NDArray, NDArray, float]],
    lengths: Mapping[str, tuple[NDArray, NDArray, dict[str, float]]] | None = None,
) -> Figure:
    """One column per row (name, alignment by dimension (2, d), by pairs (3, sizes), chance): theory and kernel PCA.

    `lengths`: by name, factors s (S,), alignments (draws, S, 2 or more) of theory and kernel PCA with hidden weights
    times s, and alignments that do not depend on s; drawn below.
    """
    figure, axes = panels(len(rows), rows=3 if lengths else 2, height=2.1)
    line = {**MEASURED, "linewidth": 1.6}
    for c, (name, by_dimension, by_pairs, chance) in enumerate(rows):
        above, below = axes[c], axes[len(rows) + c]
        modes = np.arange(1, by_dimension.shape[1] + 1)
        for i, (label, color) in enumerate((("theory", THEORY), ("kernel PCA", PCA))):
            above.plot(modes, by_dimension[i], **{**line, "color": color}, label=label)
            below.semilogx(by_pairs[0], by_pairs[i + 1], **{**line, "color": color}, marker="o", markersize=4)
        above.plot(modes, chance * modes / modes[-1], color=CHANCE, linestyle="--", linewidth=1, label="chance")
        below.plot(by_pairs[0], chance * by_pairs[0][-1] / by_pairs[0], color=CHANCE, linestyle="--", linewidth=1)
        above.set(xlabel="leading modes", ylabel="alignment", ylim=(0, 1), title=name)
        below.set(xlabel="pairs n", ylabel="alignment", ylim=(0, 1))
        below.set_xticks(by_pairs[0], [f"{n:.0f}" for n in by_pairs[0]])
        below.minorticks_off()
        if lengths:
            last = axes[2 * len(rows) + c]
            last.set(xlabel="hidden weights times s", ylabel="alignment", ylim=(0, 1))
            if name in lengths:
                draw_lengths(last, *lengths[name])
                last.legend(frameon=False, loc="upper left")
    axes[0].legend(frameon=False, loc="upper left")
    return figure


def draw_lengths(ax: Axes, scales: NDArray, shares: NDArray, fixed: dict[str, float]) -> None:
    """Alignment over the factor s of weights that batch norm hides, with the spread over draws of pairs."""
    for i, color in enumerate((THEORY, PCA)):
        mean, spread = shares[..., i].mean(axis=0), shares[..., i].std(axis=0)
        ax.errorbar(scales, mean, spread, color=color, marker="o", markersize=4, linewidth=1.6)
    for (name, value), style in zip(fixed.items(), (":", "-."), strict=False):
        ax.axhline(value, color=THEORY, linestyle=style, linewidth=1, label=f"theory, {name}")
    ax.set_xscale("log", base=2)
    ax.set_xticks(scales, [f"{s:g}" for s in scales])
    ax.minorticks_off()


def draw_matrix(names: Sequence[str], values: NDArray, chance: float) -> Figure:
    """Matrix of pairwise alignments, as numbers on colours."""
    figure, (ax,) = panels(1, height=2.8)
    figure.set_size_inches(4.2, 2.8)
    picture = ax.imshow(values, vmin=0, vmax=1, cmap="cividis")
    for (i, j), value in np.ndenumerate(values):
        ax.text(j, i, f"{value:.3f}", ha="center", va="center", color="black" if value > 0.5 else "white")
    ax.set_xticks(range(len(names)), [fill(name, 13) for name in names])
    ax.set_yticks(range(len(names)), [fill(name, 13) for name in names])
    ax.set_title(f"alignment of spans; chance {chance:.3f}")
    figure.colorbar(picture, ax=ax, shrink=0.8)
    return figure


def draw_drift(steps: NDArray, with_first: NDArray, with_last: NDArray, theory: NDArray, chance: float) -> Figure:
    """Over training: alignment of the kernel with the first and last, and of its predictions with the final span."""
    figure, axes = panels(2, height=2.6)
    line = {**MEASURED, "linewidth": 1.6, "marker": "o", "markersize": 4}
    for values, name, color in ((with_first, "with the first", PCA), (with_last, "with the last", THEORY)):
        axes[0].plot(steps, values, **{**line, "color": color}, label=name)
    axes[0].set(xlabel="step", ylabel="alignment of kernels", ylim=(None, 1.02), title="the tangent kernel moves")
    axes[0].legend(frameon=False)
    axes[1].plot(steps, theory, **{**line, "color": THEORY}, label="theory")
    axes[1].axhline(chance, color=CHANCE, linestyle="--", linewidth=1, label="chance")
    axes[1].set(
        xlabel="step of the kernel", ylabel="alignment", ylim=(0, 1), title="share of the final span it predicts"
    )
    axes[1].legend(frameon=False)
    return figure


def draw_coming(rows: Sequence[tuple[str, NDArray, Mapping[str, NDArray], NDArray]]) -> Figure:
    """One panel per run (name, updates (T,), shares (draws, T) by kernel, chance (T,)): means, and spreads as bars."""
    figure, axes = panels(len(rows), height=3.2)
    names = list(dict.fromkeys(kernel for _, _, lines, _ in rows for kernel in lines))
    colors = dict(zip(names, [f"C{i}" for i in range(len(names))], strict=True))
    for ax, (name, steps, lines, chance) in zip(axes, rows, strict=True):
        for kernel, shares in lines.items():
            mean, spread = shares.mean(axis=0), shares.std(axis=0)
            ax.errorbar(steps, mean, spread, color=colors[kernel], marker="o", markersize=3, linewidth=1.2)
        ax.plot(steps, chance, color=CHANCE, linestyle="--", linewidth=1)
        ax.set(xlabel="updates", ylim=(0, 1), title=fill(name, 20))
        if not len(steps):
            ax.text(0.5, 0.5, "no moment before new modes", transform=ax.transAxes, ha="center", color=CHANCE)
            ax.set_xticks([])
    axes[0].set_ylabel("share of the next modes")
    entries = [(kernel, {"color": color}) for kernel, color in colors.items()]
    key(figure, [*entries, ("chance", {"color": CHANCE, "linestyle": "--"})], columns=4)
    return figure


def draw_widths(widths: NDArray, theory: NDArray, pca: NDArray, error: NDArray, drift: NDArray) -> Figure:
    """Over the width of a network: alignment, largest error of a step time, and drift of the kernel."""
    figure, axes = panels(3, height=2.6)
    line = {**MEASURED, "linewidth": 1.6, "marker": "o", "markersize": 4}
    for values, name, color in ((theory, "theory", THEORY), (pca, "kernel PCA", PCA)):
        axes[0].semilogx(widths, values, **{**line, "color": color}, label=name)
    axes[0].set(xlabel="width", ylabel="alignment", ylim=(None, 1.02), title="trained and predicted span")
    axes[0].legend(frameon=False)
    axes[1].loglog(widths, error, **{**line, "color": THEORY})
    axes[1].set(xlabel="width", ylabel="largest relative error", title="step times")
    axes[2].loglog(widths, drift, **{**line, "color": THEORY})
    axes[2].set(xlabel="width", ylabel="‖K − K₀‖ / ‖K₀‖", title="drift of the kernel")
    for ax in axes:
        ax.set_xticks(widths, [f"{w:.0f}" for w in widths])
        ax.minorticks_off()
    return figure
