"""Beyond the paper: landmarks (Nyström) and random features against the exact kernel solution, as their number grows.

    stairwise reproduce landmarks     1 min on a CPU, scikit-learn's photographs
    stairwise reproduce landmarks --data cifar10 --set n=2000

RBF kernel, two crops of each image, d modes. The exact solution comes from K̃; the others see each pair once. Error: the
largest relative error of γ_1 … γ_d. Overlap: the common share of the spans of the embeddings of the same images'
central crops, which were not fitted. Expected: random features improve with the root of their number, landmarks faster,
and with as many landmarks as points nothing is left to approximate.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.data.crops import central_crops, fitting, two_crops
from stairwise.data.images import load
from stairwise.figures.modes import draw_convergence
from stairwise.kernel.estimator import KernelSSL
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.theory.spectra import subspace_alignment

WAYS = {
    "landmarks at random": ("nystroem", "uniform"),
    "landmarks by k-means++": ("nystroem", "kmeans++"),
    "landmarks by pivoted Cholesky": ("nystroem", "pivoted"),
    "random features": ("features", "uniform"),
}
ALT = (
    "Error of eigenvalues and overlap of embeddings with the exact solution, over the number of landmarks or features."
)
SMOKE = {"n": 60, "most": 120, "d": 4, "seeds": 2}


@dataclass(frozen=True)
class Config:
    """Sizes are our choice."""

    data: str = "photos"
    n: int = 500
    d: int = 10
    most: int = 1000
    seeds: int = 3


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    images = load(config.data)
    n, crop = fitting(images, config.n, None)
    x_a, x_b = two_crops(images, n, crop)
    new = central_crops(images.take(np.arange(min(n, len(images.pixels)))), crop)
    exact = KernelSSL(config.d, method="exact").fit(x_a, X_b=x_b)
    z = exact.transform(new)
    counts = np.unique(np.geomspace(2 * config.d, config.most, 9).astype(int))
    errors = np.zeros((len(WAYS), config.seeds, len(counts)))
    overlaps = np.zeros_like(errors)
    for i, (method, how) in enumerate(WAYS.values()):
        for seed, j in np.ndindex(config.seeds, len(counts)):
            est = KernelSSL(
                config.d,
                kernel=exact.kernel_,
                method=method,
                landmarks=how,
                n_features=int(counts[j]),
                random_state=seed,
            )
            est.fit(x_a, X_b=x_b)
            errors[i, seed, j] = np.abs(est.eigenvalues_ / exact.eigenvalues_ - 1).max()
            overlaps[i, seed, j] = subspace_alignment(est.transform(new), z)
            progress(i + (seed * len(counts) + j) / (config.seeds * len(counts)), len(WAYS), list(WAYS)[i])
    return {"counts": counts, "errors": errors, "overlaps": overlaps, "points": 2 * n, "gamma": exact.eigenvalues_}


def check(arrays: Arrays) -> list[Claim]:
    counts, error = arrays["counts"], np.median(arrays["errors"], axis=1)
    slope = float(np.polyfit(np.log(counts), np.log(error[3]), 1)[0])
    some = int(np.searchsorted(counts, arrays["points"] / 4))  # landmarks are a quarter of the points
    overlap = np.median(arrays["overlaps"], axis=1)
    claims = [Claim.close("random features: slope of log error over log number", slope, -0.5, 0.25)]
    for i, name in enumerate(list(WAYS)[:3]):
        ratio = error[i, some] / error[3, some]
        claims += [
            Claim.at_most(f"{counts[some]} {name}: error over that of as many random features", ratio, 0.5),
            Claim.at_least(f"{counts[some]} {name}: overlap", float(overlap[i, some]), 0.95),
            Claim.at_most(f"all points as {name}: error", error[i, -1], 1e-6),
        ]
    return [*claims, Claim.note(f"{counts[some]} random features: overlap", float(overlap[3, some]))]


def draw(arrays: Arrays) -> Figure:
    errors, overlaps = (dict(zip(WAYS, arrays[name], strict=True)) for name in ("errors", "overlaps"))
    return draw_convergence(arrays["counts"], errors, overlaps)


def page(arrays: Arrays) -> Page:
    error = np.median(arrays["errors"], axis=1)
    lines = [Line(name, arrays["counts"], error[i], (i, len(WAYS))) for i, name in enumerate(WAYS)]
    return Page(
        "Landmarks and random features",
        "Kernels of many points are approximated in one pass. Landmarks need far fewer columns than random features.",
        [Panel("Largest relative error of γ", "landmarks or random features", "error", lines)],
    )
