"""Fig. 1C,D: the staircase of a ResNet-50, Barlow Twins from small initialization.

    stairwise reproduce fig1cd                    one run on one GPU, STL-10
    stairwise reproduce fig1cd --data cifar10     a minute on one H200, ResNet-18
    stairwise reproduce fig1cd --smoke            seconds on a CPU, photographs; numbers without meaning

Expected: the loss falls from d in steps, the eigenvalues of C rise one after the other, at least ten of them within the
run. Steps are found by `detect_steps`, in C and in the centred covariance; the paper sees the latter sharper at times.
Spectra of images that it did not train on have as many grown modes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError
from stairwise.experiments.experiment import Arrays, Claim, Progress, claims_table
from stairwise.experiments.runs import (
    MODES,
    SMALL,
    RunsConfig,
    about,
    curves,
    obtain,
    runs_table,
    spectrum_panels,
    steps_of,
    steps_table,
)
from stairwise.figures.training import Course, draw_courses
from stairwise.report.page import Page, Picture
from stairwise.theory.spectra import grown

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
    arrays = {**about({"bt": run}), **curves("C", run, "eigenvalues"), **curves("covariance", run, "covariance")}
    t, held = run.probes("held_eigenvalues")
    if len(t):
        arrays |= {"held.t": t, "held.lam": held[:, :MODES].astype(np.float32), "held.images": run.recipe.held_out}
    return arrays


def sharper(arrays: Arrays, first: str, second: str) -> tuple[float, int]:
    """Median ratio of rise times, first over second, of steps that are each other's nearest in time; their number."""
    ours, theirs = steps_of(arrays, first), steps_of(arrays, second)
    if not (len(ours) and len(theirs)):
        return float("nan"), 0
    apart = np.abs(ours.times[:, None] - theirs.times)
    pairs = [(i, int(j)) for i, j in enumerate(apart.argmin(axis=1)) if apart[:, j].argmin() == i]
    return float(np.median([ours.rise_times[i] / theirs.rise_times[j] for i, j in pairs])), len(pairs)


def check(arrays: Arrays) -> list[Claim]:
    """Steps, from a loss of d."""
    steps, lam = steps_of(arrays, "C"), arrays["C.lam"]
    ratio, both = sharper(arrays, "C", "covariance")
    start = float(arrays["C.loss"][0] / arrays["C.d"])
    claims = [
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
    if "held.lam" in arrays:
        held = grown(arrays["held.lam"][-1].astype(float))[0]
        claims.append(Claim.close("grown modes on images not trained on", held, float(arrays["C.grown"][0]), 1))
    return claims


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
        [
            steps_table(arrays, {"C": "C", "covariance": "centred covariance"}),
            runs_table(arrays),
            claims_table(claims),
        ],
        [Picture(picture, "Loss, and eigenvalues of C on linear and logarithmic axes, over training time.")],
        facts,
    )
