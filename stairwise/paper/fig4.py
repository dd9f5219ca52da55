"""Fig. 4: histograms of the eigenvalues at four times during training, standard initialization.

    stairwise reproduce fig4                      uses the runs of fig3
    stairwise reproduce fig4 --data cifar10
    stairwise reproduce fig4 --smoke              seconds on a CPU, photographs; its numbers mean nothing

Trained on 9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper used 105,000.
Four times, evenly spaced in t = Σ lr. Dashed: the threshold between grown and waiting modes at each time. Expected: two
bands, and the upper one gains modes over time.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.figures.training import draw_histograms
from stairwise.paper.fig3 import DEEP, SPECTRA
from stairwise.paper.harness import Arrays, Claim
from stairwise.paper.trained import STANDARD, RunsConfig, about, methods_in, obtain, runs_table, title
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.table import Table
from stairwise.theory.spectra import bimodality, grown

TIMES = 4
ALT = "Histograms of log eigenvalues at four times of training, with thresholds."


@dataclass(frozen=True)
class Config(RunsConfig):
    """E3, E5 and E7 of the paper; the times are our choice."""

    kinds = (STANDARD,)


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    runs = obtain(config, STANDARD, progress)
    arrays = about(runs)
    for method, run in runs.items():
        spectra = run.series(SPECTRA[method][0][0])
        rows = np.searchsorted(run.times, run.times[-1] * np.arange(1, TIMES + 1) / TIMES)
        arrays |= {f"{method}.t": run.times[rows], f"{method}.lam": spectra[rows].astype(np.float32)}
    return arrays


def _by_time(arrays: Arrays) -> list[tuple[str, float, int, float, float]]:
    """Method, time, number grown, threshold and bimodality at every time."""
    return [
        (m, float(t), *grown(lam), bimodality(lam))
        for m in methods_in(arrays)
        for t, lam in zip(arrays[f"{m}.t"], arrays[f"{m}.lam"].astype(float), strict=True)
    ]


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for m in methods_in(arrays):
        counts = [count for name, _, count, _, _ in _by_time(arrays) if name == m]
        depth = min(x[4] for x in _by_time(arrays) if x[0] == m)
        claims += [
            Claim.at_least(f"{title(arrays, m)}: grown at the last time, less at the first", counts[-1] - counts[0], 1),
            Claim.at_least(f"{title(arrays, m)}: least depth of the valley", depth, DEEP),
        ]
    return claims


def table(arrays: Arrays) -> Table:
    rows = [
        [title(arrays, m), f"{t:,.4g}", str(n), f"{cut:.3g}", f"{two:.3f}"] for m, t, n, cut, two in _by_time(arrays)
    ]
    return Table("Grown modes", ["method", "t", "grown", "threshold", "depth of the valley"], rows)


def draw(arrays: Arrays) -> Figure:
    return draw_histograms(
        [
            (
                title(arrays, m),
                arrays[f"{m}.t"],
                arrays[f"{m}.lam"].astype(float),
                [x[3] for x in _by_time(arrays) if x[0] == m],
            )
            for m in methods_in(arrays)
        ]
    )


def page(arrays: Arrays) -> Page:
    return Page(
        "Histograms of eigenvalues",
        "Grown modes and waiting modes form two bands on a logarithmic axis; over time modes move from the lower band "
        "to the upper one.",
        [],
        [table(arrays), runs_table(arrays)],
    )
