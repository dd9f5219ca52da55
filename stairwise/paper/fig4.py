"""Fig. 4: histograms of the eigenvalues at times of training, standard initialization.

    stairwise reproduce fig4                      the runs of fig3, which it shares
    stairwise reproduce fig4 --data cifar10
    stairwise reproduce fig4 --smoke              seconds on a CPU, photographs; numbers without meaning

9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper had 105,000.
Four times, evenly spaced in t = Σ lr. Dashed: the threshold between grown and waiting modes at each. Expected: two
bands, and the upper one gains members as time goes on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.figures.training import draw_histograms
from stairwise.paper.fig3 import DEEP, SPECTRA
from stairwise.paper.harness import Arrays, Claim, claims_table
from stairwise.paper.trained import METHODS, STANDARD, RunsConfig, about, methods_in, obtain, runs_table
from stairwise.progress import Progress
from stairwise.report.page import Page, Picture
from stairwise.table import Table
from stairwise.theory.spectra import bimodality, grown

SMOKE = {"smoke": True}
TIMES = 4


@dataclass(frozen=True)
class Config(RunsConfig):
    """E3, E5 and E7 of the paper; the times are our choice."""

    kinds = (STANDARD,)


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Spectra at four times, whole."""
    runs = obtain(config, STANDARD, progress)
    arrays = about(runs)
    for method, run in runs.items():
        spectra = run.series(SPECTRA[method][0][0])
        rows = np.searchsorted(run.times, run.times[-1] * np.arange(1, TIMES + 1) / TIMES)
        arrays |= {f"{method}.t": run.times[rows], f"{method}.lam": spectra[rows].astype(np.float32)}
    return arrays


def _found(arrays: Arrays) -> list[tuple[str, float, int, float, float]]:
    """Method, time, number grown, threshold and bimodality at every time."""
    return [
        (m, float(t), *grown(lam), bimodality(lam))
        for m in methods_in(arrays)
        for t, lam in zip(arrays[f"{m}.t"], arrays[f"{m}.lam"].astype(float), strict=True)
    ]


def check(arrays: Arrays) -> list[Claim]:
    """The upper band fills."""
    claims = []
    for m in methods_in(arrays):
        counts = [count for name, _, count, _, _ in _found(arrays) if name == m]
        more = counts[-1] - counts[0]
        claims.append(Claim(f"{METHODS[m]}: grown at the last time, less at the first", more, "≥ 1", more >= 1))
        two = min(x[4] for x in _found(arrays) if x[0] == m)
        claims.append(Claim(f"{METHODS[m]}: least depth of the valley", two, "≥ 0.5", two >= DEEP))
    return claims


def table(arrays: Arrays) -> Table:
    """Time by time."""
    rows = [[METHODS[m], f"{t:,.4g}", str(n), f"{cut:.3g}", f"{two:.3f}"] for m, t, n, cut, two in _found(arrays)]
    return Table("Grown modes", ["method", "t", "grown", "threshold", "depth of the valley"], rows)


def draw(arrays: Arrays) -> Figure:
    """A row a method, a column a time."""
    return draw_histograms(
        [
            (
                METHODS[m],
                arrays[f"{m}.t"],
                arrays[f"{m}.lam"].astype(float),
                [x[3] for x in _found(arrays) if x[0] == m],
            )
            for m in methods_in(arrays)
        ]
    )


def page(arrays: Arrays, claims: list[Claim], picture: Path, facts: dict[str, str]) -> Page:
    """The picture and its numbers."""
    return Page(
        "Histograms of eigenvalues",
        "Grown modes and waiting modes form two bands on a logarithmic axis; with time modes pass from one to the "
        "other.",
        [],
        [table(arrays), runs_table(arrays), claims_table(claims)],
        [Picture(picture, "Histograms of log eigenvalues at four times of training, with thresholds.")],
        facts,
    )
