"""Fig. 1, the banner: a linear model learns one dimension at a time, as predicted, and so does a ResNet.

    stairwise reproduce fig1                      `fig1ab` on photographs and `fig1cd` on STL-10: minutes on one GPU
    stairwise reproduce fig1 --set linear=cifar10
    stairwise reproduce fig1 --smoke              seconds on a CPU, photographs; the network's numbers mean nothing

Expected: the loss of both models falls in steps; at each step one eigenvalue of C rises from 0 to 1. The eigenvalues of
the linear model are predicted within 0.03.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.figures.training import Course, draw_banner
from stairwise.paper import fig1ab, fig1cd
from stairwise.paper.harness import Arrays, Claim
from stairwise.paper.trained import runs_table, steps_of
from stairwise.progress import Progress, part
from stairwise.report.page import Page

LINEAR = ("times", "descent", "law_descent")
NETWORK = ("about", "C.t", "C.lam", "C.loss", "C.steps")
ALT = "Loss and eigenvalues of C over time: linear model (A, B) and ResNet (C, D)."


@dataclass(frozen=True)
class Config(fig1cd.Config):
    """linear: images for the linear model."""

    linear: str = "photos"


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    network = fig1cd.compute(replace(config, fast=False, only=""), part(progress, 0, 0.9))
    linear = fig1ab.compute(fig1ab.Config(data=config.linear, pixels="unit"), part(progress, 0.9, 1))
    return {k: linear[k] for k in LINEAR} | {k: network[k] for k in NETWORK}


def check(arrays: Arrays) -> list[Claim]:
    error = np.abs(arrays["law_descent"] - arrays["descent"]).max()
    taken, d = (arrays["descent"][-1] > 0.5).sum(), arrays["descent"].shape[1]
    return [
        Claim.close("linear model: steps", taken, d, 0),
        Claim.at_most("linear model: largest error of λ, predicted against descent", error, 0.03),
        Claim.at_least("network: steps", len(steps_of(arrays, "C")), 2),
    ]


def draw(arrays: Arrays) -> Figure:
    course = Course("ResNet", arrays["C.t"], arrays["C.loss"], arrays["C.lam"], "C")
    return draw_banner(arrays["times"], arrays["descent"], arrays["law_descent"], course)


def page(arrays: Arrays) -> Page:
    return Page(
        "Self-supervised learning, one dimension at a time",
        "Loss and eigenvalues of C over time, for a linear model with its prediction and for a deep network.",
        [],
        [runs_table(arrays)],
    )
