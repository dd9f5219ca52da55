"""Fig. 1C,D: the staircase of a ResNet-50, Barlow Twins from small initialization.

    stairwise reproduce fig1cd                    one run on one GPU, STL-10
    stairwise reproduce fig1cd --data cifar10     a minute on one H200, ResNet-18
    stairwise reproduce fig1cd --smoke            seconds on a CPU, photographs; numbers without meaning

Expected: the loss falls from d in steps, the eigenvalues of C rise one after the other, at least ten of them within the
run. Steps are found by `detect_steps`, in C and in the centred covariance; the paper sees the latter sharper at times.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError
from stairwise.experiments.experiment import Arrays, Claim, Progress, claims_table
from stairwise.experiments.runs import SMALL, RunsConfig, about, curves, obtain, runs_table, spectrum_panels, steps_of
from stairwise.figures.training import Course, draw_courses
from stairwise.report.page import Page, Picture

SMOKE = {"smoke": True}


@dataclass(frozen=True)
class Config(RunsConfig):
    """E4 of the paper."""

    kinds = (SMALL,)
    methods: str = "bt"


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Loss, eigenvalues of C and of the covariance."""
    if config.chosen() != ["bt"]:
        raise InputError("methods", "must be bt", config.methods, "fig2cf shows the others")
    run = obtain(config, SMALL, progress)["bt"]
    return {**about({"bt": run}), **curves("C", run, "eigenvalues"), **curves("covariance", run, "covariance")}


def sharper(arrays: Arrays, first: str, second: str) -> tuple[float, int]:
    """Median over modes with a step in both of rise time in the first over that in the second, and their number."""
    ours, theirs = steps_of(arrays, first), steps_of(arrays, second)
    rise = dict(zip(theirs.modes.tolist(), theirs.rise_times, strict=True))
    ratios = [r / rise[j] for j, r in zip(ours.modes.tolist(), ours.rise_times, strict=True) if j in rise]
    return float(np.median(ratios)) if ratios else float("nan"), len(ratios)


def check(arrays: Arrays) -> list[Claim]:
    """Steps, from a loss of d."""
    steps, lam = steps_of(arrays, "C"), arrays["C.lam"]
    ratio, both = sharper(arrays, "C", "covariance")
    start = float(arrays["C.loss"][0] / arrays["C.d"])
    return [
        Claim("steps in the eigenvalues of C", len(steps), "≥ 10", len(steps) >= 10),
        Claim(
            "steps in those of the covariance",
            len(steps_of(arrays, "covariance")),
            "≥ 10",
            len(steps_of(arrays, "covariance")) >= 10,
        ),
        Claim.close("loss at the first record, over d", start, 1.0, 0.05),
        Claim.at_most("largest eigenvalue of C at the first record", float(lam[0, 0]), 0.1),
        Claim(
            f"rise time in C over that in the covariance, median of {both}", ratio, "reported", bool(np.isfinite(ratio))
        ),
    ]


def draw(arrays: Arrays) -> Figure:
    """Loss and eigenvalues of C."""
    return draw_courses(
        [Course("Barlow Twins", arrays["C.t"], arrays["C.loss"], arrays["C.lam"], "C")], shown=arrays["C.lam"].shape[1]
    )


def page(arrays: Arrays, claims: list[Claim], picture: Path, facts: dict[str, str]) -> Page:
    """Interactive version."""
    return Page(
        "A network's staircase: Barlow Twins from small initialization",
        "Dimensions of the embedding are learned one after the other, each at a time of its own.",
        spectrum_panels(arrays, [("C", "Eigenvalues of C"), ("covariance", "Eigenvalues of the centred covariance")]),
        [runs_table(arrays), claims_table(claims)],
        [Picture(picture, "Loss, and eigenvalues of C on linear and logarithmic axes, over training time.")],
        facts,
    )
