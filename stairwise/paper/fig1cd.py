"""Fig. 1C,D: the staircase of a ResNet-50, Barlow Twins from small initialization.

    stairwise reproduce fig1cd                    one run, STL-10: eleven minutes on one H200
    stairwise reproduce fig1cd --set fast=true    and a second run at twice the learning rate
    stairwise reproduce fig1cd --set only=x4,x8   runs at four and eight times the rate; --store FOLDER --join adds them
    stairwise reproduce fig1cd --data cifar10     a minute on one H200, ResNet-18
    stairwise reproduce fig1cd --smoke            seconds on a CPU, photographs; its numbers mean nothing

Trained on 9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper used 105,000. Expected: the loss
falls from d in steps, and the eigenvalues of C rise one after another: nine of them, fewer than the ten we require,
thirteen at twice the rate, 15 at four times (17 to 19 were predicted) and 20 at eight times (23 to 29). `detect_steps`
finds the steps in C and in the centred covariance; in the paper the latter are sometimes sharper. Images not trained on
have as many grown modes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError
from stairwise.figures.training import Course, draw_courses
from stairwise.paper import trained
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page

PREDICTED = {"x4": (17, 19), "x8": (23, 29)}  # grown modes of C; written on 2026-11-17 (docs/results/predictions.md)
ALT = "Loss, and eigenvalues of C on linear and logarithmic axes, over training time."


@dataclass(frozen=True)
class Config(trained.RunsConfig):
    """E4 of the paper; fast: also at twice its learning rate, so that more modes grow; only: these kinds of runs."""

    kinds = (trained.SMALL, trained.FAST)
    methods: str = "bt"
    fast: bool = False
    only: str = ""


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    if config.chosen() != ["bt"]:
        raise InputError("methods", "must be bt", config.methods, "fig2cf shows the others")
    chosen = trained.chosen_kinds(
        config.only, ["bt"], ["small", *(["fast"] if config.fast else [])], trained.FROM_SMALL
    )
    kinds = {"" if kind == "small" else f"{kind} ": trained.KINDS[kind] for kind in chosen}
    runs = {
        name: trained.obtain(config, kind, progress, (i / len(kinds), (i + 1) / len(kinds)))["bt"]
        for i, (name, kind) in enumerate(kinds.items())
    }
    arrays = trained.about({f"{name}bt": run for name, run in runs.items()})
    for name, run in runs.items():
        arrays |= trained.curves(f"{name}C", run, "eigenvalues") | trained.curves(
            f"{name}covariance", run, "covariance"
        )
        arrays |= trained.unseen(name, run)
    return arrays


def _runs_in(arrays: Arrays) -> dict[str, str]:
    """Prefixes of the runs in the arrays, and of their claims."""
    every = {"": ""} | {f"{kind} ": f"{rate}: " for kind, rate in trained.RATES.items()}
    return {name: words for name, words in every.items() if f"{name}C.t" in arrays}


def _rate(name: str) -> str:
    return f", {trained.RATES[name.strip()]}" if name else ""


def sharper(arrays: Arrays, first: str, second: str) -> tuple[float, int]:
    """Median ratio of rise times, first over second, and the number of pairs of steps that it is taken over.

    Two steps are a pair if each is the other's nearest in time and neither rises faster than the records are spaced."""
    ours, theirs = trained.steps_of(arrays, first), trained.steps_of(arrays, second)
    if not (len(ours) and len(theirs)):
        return float("nan"), 0
    t = arrays[f"{first}.every"][:, 0].astype(float)
    apart = np.abs(ours.times[:, None] - theirs.times)
    ratios = []
    for i, j in enumerate(apart.argmin(axis=1)):
        between = np.interp(ours.times[i], (t[1:] + t[:-1]) / 2, np.diff(t))
        if apart[:, j].argmin() == i and min(ours.rise_times[i], theirs.rise_times[j]) >= between:
            ratios.append(ours.rise_times[i] / theirs.rise_times[j])
    return float(np.median(ratios)) if ratios else float("nan"), len(ratios)


def joined(arrays: Arrays) -> Arrays:
    """Fewer modes of each run, so that all runs together can be stored."""
    return trained.lighter(arrays, 30)


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for name, words in _runs_in(arrays).items():
        lam, loss, d = (arrays[f"{name}C.{x}"] for x in ("lam", "loss", "d"))
        ratio, both = sharper(arrays, f"{name}C", f"{name}covariance")
        for what, text in (("C", "the eigenvalues of C"), ("covariance", "those of the covariance")):
            claims.append(Claim.at_least(f"{words}steps in {text}", len(trained.steps_of(arrays, f"{name}{what}")), 10))
        claims += [
            Claim.close(f"{words}loss at the first record, over d", float(loss[0] / d), 1.0, 0.05),
            Claim.at_most(f"{words}largest eigenvalue of C at the first record", float(lam[0, 0]), 0.1),
        ]
        if name.strip() in PREDICTED and trained.foretold(arrays, f"{name}bt"):
            count = float(arrays[f"{name}C.grown"][0])
            claims.append(Claim.between(f"{words}grown modes of C, predicted", count, *PREDICTED[name.strip()]))
        if both:
            text = f"{words}rise time in C over that in the covariance, median of {both} that are resolved"
            claims.append(Claim.note(text, ratio))
        claims += trained.unseen_claims(arrays, name, words)
    return claims


def draw(arrays: Arrays) -> Figure:
    courses = []
    for name in _runs_in(arrays):
        t, loss, lam = (arrays[f"{name}C.{x}"] for x in ("t", "loss", "lam"))
        courses.append(Course("Barlow Twins" + _rate(name), t, loss, lam, "C"))
    return draw_courses(courses, shown=max(course.spectra.shape[1] for course in courses))


def page(arrays: Arrays) -> Page:
    spectra = {
        f"{name}{key}": what + _rate(name)
        for name in _runs_in(arrays)
        for key, what in (("C", "C"), ("covariance", "the centred covariance"))
    }
    return Page(
        "A network's staircase: Barlow Twins from small initialization",
        "The dimensions of the embedding are learned one after another.",
        trained.spectrum_panels(arrays, [(key, f"Eigenvalues of {what}") for key, what in spectra.items()]),
        [trained.steps_table(arrays, spectra), trained.runs_table(arrays)],
    )
