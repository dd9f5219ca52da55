"""Fig. 8: self-supervised learning breaks a symmetry; supervised learning does not.

    stairwise reproduce fig8        1 s on a CPU

A, B: the landscapes of one mode. C, D: paths from a small start for several γ, exact (dashed) and integrated. Expected:
exact and integrated paths agree; a self-supervised mode leaves a ball of radius ε at log(ε/s̄(0))/4γ and relaxes with
e-fold 1/8γ (the paper prints 1/4γ); a supervised mode moves at once, with e-fold 1/2γ.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError, number
from stairwise.dynamics.flow import landscape_flow
from stairwise.figures.appendix import draw_symmetry_breaking
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.theory.landscapes import BarlowTwins, Supervised

ALT = "Landscapes of a self-supervised and a supervised mode, and paths on them."


@dataclass(frozen=True)
class Config:
    """Our choice: the paper gives no numbers for these panels."""

    start: float = 1e-3
    slowest: float = 0.25


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    progress(0.0, 1, "integrating")
    if number(config.start, "start", above=0) > 0.01:
        raise InputError("start", "must be small, at most 0.01", config.start)
    number(config.slowest, "slowest", above=0)
    gamma = config.slowest * np.array([4.0, 2.0, 1.333, 1.0])
    x, t = np.linspace(-1.6, 1.6, 401), np.linspace(0, 10 / config.slowest / 4, 1001)
    ssl, supervised = BarlowTwins(), Supervised()
    return {
        "x": x,
        "gamma": gamma,
        "times": t,
        "start": config.start,
        "ssl_loss": ssl.loss(x),
        "supervised_loss": supervised.loss(x),
        "ssl_exact": ssl.solve(t[:, None], config.start, gamma),
        "ssl_flow": landscape_flow(ssl, config.start, gamma, t),
        "supervised_exact": supervised.solve(t[:, None], config.start, gamma),
        "supervised_flow": landscape_flow(supervised, config.start, gamma, t),
    }


def check(arrays: Arrays) -> list[Claim]:
    t, gamma, start = arrays["times"], arrays["gamma"], float(arrays["start"])
    path, fastest = arrays["ssl_flow"][:, 0], gamma[0]
    epsilon = 0.05
    escape = np.interp(epsilon, path, t)
    end = (1 - path > 1e-6) & (1 - path < 1e-2)
    fold = -1 / np.polyfit(t[end], np.log(1 - path[end]), 1)[0]
    left = 1 - arrays["supervised_flow"][:, 0]
    early = left > 1e-3
    fold_supervised = -1 / np.polyfit(t[early], np.log(left[early]), 1)[0]
    error = max(np.abs(arrays[f"{kind}_flow"] - arrays[f"{kind}_exact"]).max() for kind in ("ssl", "supervised"))
    predicted = np.log(epsilon / start) / (4 * fastest)
    return [
        Claim.at_most("largest difference between exact and integrated paths", error, 1e-6),
        Claim.close(f"time to leave a ball of radius 0.05, γ = {fastest:g}", escape, predicted, 0.01 * predicted),
        Claim.close(f"e-fold of the relaxation, γ = {fastest:g}", fold, 1 / (8 * fastest), 0.01 / (8 * fastest)),
        Claim.close(
            f"e-fold of a supervised mode, γ = {fastest:g}", fold_supervised, 1 / (2 * fastest), 0.01 / (2 * fastest)
        ),
    ]


def draw(arrays: Arrays) -> Figure:
    return draw_symmetry_breaking(
        arrays["x"],
        (arrays["ssl_loss"], arrays["supervised_loss"]),
        arrays["times"],
        (arrays["ssl_exact"], arrays["supervised_exact"]),
        (arrays["ssl_flow"], arrays["supervised_flow"]),
        arrays["gamma"],
    )


def page(arrays: Arrays) -> Page:
    t, gamma = arrays["times"], arrays["gamma"]

    def paths(name: str) -> list[Line]:
        return [Line(f"γ = {g:g}", t, arrays[name][:, j], (j, len(gamma))) for j, g in enumerate(gamma)]

    return Page(
        "Why self-supervised learning steps",
        "The landscape of one mode is symmetric: the origin is an unstable equilibrium, so a small mode waits "
        "and then falls into one of two minima. The supervised landscape has no such point: learning starts at once.",
        [
            Panel("Self-supervised", "time t", "s̄", paths("ssl_exact"), log=True),
            Panel("Supervised", "time t", "c̄", paths("supervised_exact")),
        ],
    )
