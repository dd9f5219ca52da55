"""Fig. 3: standard initialization. Dimensions still grow one by one; a threshold separates grown from waiting modes.

    stairwise reproduce fig3                      three runs, STL-10 (Barlow Twins: 15 minutes, one H200)
    stairwise reproduce fig3 --data cifar10
    stairwise reproduce fig3 --smoke              seconds on a CPU, photographs; its numbers mean nothing

Trained on 9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper used 105,000. Eigenvalues over
time: of C after the batch norm that Barlow Twins' loss applies, and of C without it; of the centred covariance for
SimCLR and VICReg. Dashed: the threshold between grown and waiting modes at the end. Expected: two bands with a valley
between them; at the threshold there are at most half as many modes as at the lower peak.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.figures.training import draw_bands
from stairwise.paper import trained
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.table import Table
from stairwise.theory.spectra import bimodality

DEEP = 0.5
SPECTRA = {
    "bt": (("normalized", "C, batch-normalized"), ("eigenvalues", "C")),
    "simclr": (("covariance", "Cov z"),),
    "vicreg": (("covariance", "Cov z"),),
}
ALT = "Eigenvalues over training time with the threshold between grown and waiting modes."


@dataclass(frozen=True)
class Config(trained.RunsConfig):
    """E3, E5 and E7 of the paper."""

    kinds = (trained.STANDARD,)


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Spectra over time, and the separation of the bands at the end."""
    runs = trained.obtain(config, trained.STANDARD, progress)
    arrays = trained.about(runs)
    for method, run in runs.items():
        arrays |= trained.unseen(f"{method}-", run)
        for series, _ in SPECTRA[method]:
            key = f"{method}-{series}"
            arrays |= trained.curves(key, run, series)
            arrays[f"{key}.bimodality"] = bimodality(run.series(series)[-1])
            arrays[f"{key}.last"] = run.series(series)[-1].astype(np.float32)
    return arrays


def _shown(arrays: Arrays) -> list[tuple[str, str]]:
    """Keys of the spectra in the arrays, and their titles."""
    return [
        (f"{method}-{series}", f"{trained.title(arrays, method)}: {title}")
        for method, spectra in SPECTRA.items()
        for series, title in spectra
        if f"{method}-{series}.t" in arrays
    ]


def joined(arrays: Arrays) -> Arrays:
    """Fewer modes of each run, so that all runs together can be stored."""
    return trained.lighter(arrays, 64)


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for key, title in _shown(arrays):
        count, _ = arrays[f"{key}.grown"]
        depth = float(arrays[f"{key}.bimodality"])
        claims.append(Claim.at_least(f"{title}: depth of the valley at the threshold", depth, DEEP))
        d = int(arrays[f"{key}.d"])
        claims.append(Claim(f"{title}: grown of {d}", float(count), f"1 … {d - 1}", 0 < count < d))
    for method in trained.methods_in(arrays):
        claims += trained.unseen_claims(arrays, f"{method}-", f"{trained.title(arrays, method)}: ")
    return claims


def table(arrays: Arrays) -> Table:
    rows = []
    for key, title in _shown(arrays):
        (count, threshold), last = arrays[f"{key}.grown"], arrays[f"{key}.last"]
        gap = last[int(count) - 1] / last[int(count)] if 0 < count < len(last) and last[int(count)] > 0 else np.nan
        rows.append(
            [
                title,
                f"{int(count)} of {len(last)}",
                f"{threshold:.3g}",
                f"{gap:.3g}",
                f"{arrays[f'{key}.bimodality']:.3f}",
            ]
        )
    header = ["spectrum", "grown", "threshold", "gap at the threshold (factor)", "depth of the valley"]
    return Table("Two bands", header, rows)


def draw(arrays: Arrays) -> Figure:
    return draw_bands(
        [
            (title, arrays[f"{key}.t"], arrays[f"{key}.lam"], float(arrays[f"{key}.grown"][1]))
            for key, title in _shown(arrays)
        ]
    )


def page(arrays: Arrays) -> Page:
    return Page(
        "Standard initialization: grown and waiting modes",
        "From ordinary initial weights the steps blur, but the spectrum still has two bands: modes that have grown and "
        "modes that have not.",
        trained.spectrum_panels(arrays, _shown(arrays)),
        [table(arrays), trained.runs_table(arrays)],
    )
