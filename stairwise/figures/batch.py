"""Modes that a batch can carry, predicted and measured."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from numpy.typing import NDArray

from stairwise.figures.style import PREDICTED, key, mode_colors, panels

MARKS = {"geometric": "o", "even": "s", "network 0, own ρ": "^", "network 1, own ρ": "v", "network 1, ρ elsewhere": ""}


def draw_carried(
    batches: Sequence[NDArray],
    losses: Sequence[tuple[str, str]],
    cases: Sequence[tuple[str, str, NDArray, NDArray]],
    d: Sequence[int],
) -> Figure:
    """One column per loss: linear models above, networks below; lines are predicted, marks are measured.

    batches, d: sizes of linear models and of networks. cases: (loss, case, predicted, measured), counts (batches, 2).
    """
    networks = any(name.startswith("network") for _, name, *_ in cases)
    figure, axes = panels(len(losses), rows=1 + networks, height=2.3)
    colors = mode_colors(3)[:2]
    for column, (loss, title) in enumerate(losses):
        for row in range(1 + networks):
            ax, sizes = axes[row * len(losses) + column], batches[row]
            mine = [case for case in cases if case[0] == loss and case[1].startswith("network") == bool(row)]
            for _, name, predicted, measured in mine:
                elsewhere = "elsewhere" in name
                look = {**PREDICTED, "linestyle": ":" if elsewhere else PREDICTED["linestyle"], "linewidth": 1.1}
                for i, color in enumerate(colors):
                    ax.plot(sizes, predicted[:, i], **{**look, "color": color})
                    if not elsewhere:
                        ax.plot(sizes, measured[:, i], MARKS[name], color=color, markersize=4.5, alpha=0.8)
            ax.set(xscale="log", xlabel="batch", ylabel="modes", ylim=(-0.02 * d[row], 1.05 * d[row]))
            ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
            ax.minorticks_off()
            ax.set_title(f"{title}, {'network' if row else 'linear'}")
    looks = [
        ("variance above 0.1", {"color": colors[0], "linewidth": 2}),
        ("λ above ½", {"color": colors[1], "linewidth": 2}),
        ("predicted", PREDICTED),
        *([("predicted from another run at batch 128", {**PREDICTED, "linestyle": ":"})] if networks else []),
        ("ρ falls geometrically", {"linestyle": "", "marker": MARKS["geometric"], "color": "0.4"}),
        ("ρ falls evenly", {"linestyle": "", "marker": MARKS["even"], "color": "0.4"}),
        *(
            (f"network, seed {i}", {"linestyle": "", "marker": m, "color": "0.4"})
            for i, m in enumerate("^v")
            if networks
        ),
    ]
    key(figure, looks, columns=4)
    return figure
