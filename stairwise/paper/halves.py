"""Beyond the paper: two modalities. Match left and right halves of digits (the CLIP case, K_XX′ = 0).

    stairwise reproduce halves        5 s on a CPU, scikit-learn's digits

KernelSSL with an RBF kernel for left halves and a Laplace kernel for right halves, without shared parameters, fitted on
n digits. For each held-out left half, right halves are ranked by cosine. Expected: far above chance, better with more
modes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import positive_int
from stairwise.data.images import load
from stairwise.figures.modes import draw_retrieval
from stairwise.kernel.estimator import KernelSSL
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel

TOP = (1, 5, 10)
ALT = "Share of right halves found from left halves, over the number of modes."


@dataclass(frozen=True)
class Config:
    """Sizes are our choice."""

    n: int = 1200
    d: int = 32
    seed: int = 0


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Share of held-out left halves whose right half is among the nearest 1, 5 or 10, for the first 1 … d modes."""
    images = load("digits").pixels[..., 0] / 255.0
    positive_int(
        config.n, "n", len(images) - 50, f"there are {len(images)} digits, and at least 50 are needed for the test"
    )
    order = np.random.default_rng(config.seed).permutation(len(images))
    left, right = images[order][:, :, :4].reshape(-1, 32), images[order][:, :, 4:].reshape(-1, 32)
    progress(0.1, 1, "modes of the two halves")
    est = KernelSSL(config.d, kernel=("rbf", "laplace")).fit(left[: config.n], X_b=right[: config.n])
    z_a, z_b = est.transform(left[config.n :], view="a"), est.transform(right[config.n :], view="b")
    progress(0.6, 1, "retrieval")
    found = np.stack([_retrieved(z_a[:, :d], z_b[:, :d]) for d in range(1, config.d + 1)])
    return {"gamma": est.eigenvalues_, "found": found, "tested": len(z_a)}


def _retrieved(z_a: np.ndarray, z_b: np.ndarray) -> np.ndarray:
    z_a, z_b = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z_a, z_b))
    similarity = z_a @ z_b.T
    own = np.diag(similarity)[:, None]
    ties = np.abs(similarity - own) <= 1e-12  # with one mode all cosines are ±1; half of the ties are ranked first
    rank = ((similarity > own) & ~ties).sum(axis=1) + (ties.sum(axis=1) - 1) / 2
    return np.array([(rank < k).mean() for k in TOP])


def check(arrays: Arrays) -> list[Claim]:
    found, tested = arrays["found"][-1], int(arrays["tested"])
    return [
        Claim(
            f"right half among the nearest {k} of {tested}",
            float(share),
            f"> {5 * k / tested:.3f} (5 × chance)",
            bool(share > 5 * k / tested),
            k / tested,
        )
        for k, share in zip(TOP, found, strict=True)
    ]


def draw(arrays: Arrays) -> Figure:
    return draw_retrieval(arrays["found"], TOP, int(arrays["tested"]))


def page(arrays: Arrays) -> Page:
    dims = np.arange(1, len(arrays["found"]) + 1)
    lines = [Line(f"among the nearest {k}", dims, arrays["found"][:, i], (i, len(TOP))) for i, k in enumerate(TOP)]
    return Page(
        "Two modalities: halves of digits",
        "Left and right halves are embedded by two different kernels without shared parameters; their common content "
        "is learned from pairs alone.",
        [Panel("Retrieval of the right half from the left", "modes used", "share found", lines)],
    )
