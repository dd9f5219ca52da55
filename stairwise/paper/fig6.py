"""Fig. 6: all entries of A(t) from a small upper triangular start, integrated and in the closed forms of App. C.

    stairwise reproduce fig6        1 s on a CPU

d = 3, m = 5, γ_j = 2^-j, α = 1e-9. We integrate the exact equation (Eq. 45) and compare it with Eqs. 47 and 48 (the
paper's text says the opposite). Expected: the diagonal agrees to 1e-6, and the columns beyond d to 1 %. Entries off the
diagonal stay small, but those of columns ≤ d agree only until their own column is learned, because the closed form is
to leading order. Entries below the diagonal, which are zero in it, end at a_kj = −a_jk √(γ_k/γ_j), which keeps learned
rows uncorrelated.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError, number, seed
from stairwise.dynamics.flow import appendix_flow
from stairwise.figures.appendix import draw_traces
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.theory.alignment import appendix_entries, qr_nonnegative

ALT = "Sizes of all entries of A(t) over time on a log scale, integrated and in closed form."


@dataclass(frozen=True)
class Config:
    """The paper's numbers."""

    d: int = 3
    m: int = 5
    alpha: float = 1e-9
    seed: int = 0


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    progress(0.0, 1, "integrating A(t)")
    if not 2 <= config.d <= config.m:
        raise InputError("d", f"must lie between 2 and m = {config.m}", config.d)
    number(config.alpha, "alpha", above=0)
    gamma = 2.0 ** -np.arange(1, config.m + 1)
    start = np.random.default_rng(seed(config.seed)).standard_normal((config.d, config.m))
    _, A0 = qr_nonnegative(config.alpha * start)
    t = np.linspace(0, 1.3 * -np.log(config.alpha) / gamma[config.d - 1], 600)
    return {
        "times": t,
        "true": appendix_flow(A0, gamma, t, rtol=1e-11),
        "theory": appendix_entries(A0, gamma, t),
        "alpha": config.alpha,
    }


def check(arrays: Arrays) -> list[Claim]:
    true, theory = np.abs(arrays["true"]), np.abs(arrays["theory"])
    _, d, _ = true.shape
    square = true[:, :, :d]
    off = ~np.eye(d, dtype=bool)
    above, below = np.triu(square, 1), np.tril(square, -1)
    diagonal = np.abs(np.einsum("tjj->tj", square) / np.einsum("tjj->tj", theory[:, :, :d]) - 1).max()
    beyond = np.abs(true[:, :, d:] / theory[:, :, d:] - 1).max()
    later = [((j, k), true[-1, j, k] / theory[-1, j, k]) for j in range(d) for k in range(j + 1, d)]
    return [
        Claim.at_most("relative error of the diagonal", diagonal, 1e-6),
        Claim.at_most("relative error of the columns beyond d", beyond, 1e-2),
        Claim.at_most("largest entry off the diagonal", square[:, off].max(), 1e-2),
        *(Claim.note(f"a_{j + 1}{k + 1} at the end, integrated over closed form", ratio) for (j, k), ratio in later),
        Claim.close("largest entry below the diagonal over largest above", below.max() / above.max(), 0.5**0.5, 1e-3),
    ]


def draw(arrays: Arrays) -> Figure:
    return draw_traces(arrays["times"], arrays["true"], arrays["theory"], floor=float(arrays["alpha"]) / 30)


def page(arrays: Arrays) -> Page:
    return Page(
        "How the entries of the weights grow",
        "In the basis where the weights start upper triangular, the diagonal entries grow to order one in turn, and "
        "the growth of each row keeps its other entries small.",
    )
