"""BYOL, of which the paper says in a footnote that no steps were seen at once: spectra of its three parts.

    stairwise reproduce byol                      two runs, STL-10, not yet trained
    stairwise reproduce byol --set only=small     one of them alone; --store FOLDER --join adds it
    stairwise reproduce byol --smoke              seconds on a CPU, photographs; its numbers mean nothing

Eigenvalues of the centred covariance of the online embedding, of the predictor's output and of the target's embedding,
on the same fixed views at every record, from standard and from small initialization. `detect_steps` counts the steps of
each, so that the question has an answer: does BYOL step? No number is expected.
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
from stairwise.runs.reader import Run
from stairwise.staircase.steps import FEWEST, detect_steps
from stairwise.table import Table
from stairwise.theory.spectra import grown
from stairwise.training.following import followed_summary

PARTS = {"z": "online", "predictor": "predictor", "target": "target"}
MODES = 32  # that are stored
ALT = "Loss and eigenvalues of BYOL's online network, predictor and target over training time."


@dataclass(frozen=True)
class Config(trained.RunsConfig):
    """E11 of the paper; only: standard or small initialization."""

    kinds = (trained.STANDARD, trained.SMALL)
    methods: str = "byol"
    only: str = ""

    def chosen(self) -> list[str]:
        if self.methods != "byol":
            raise InputError("methods", "must be byol", self.methods, "fig2cf shows the others")
        return ["byol"]


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    kinds = trained.chosen_kinds(config.only, config.chosen(), ["standard", "small"])
    runs = {
        kind: trained.obtain(config, trained.KINDS[kind], progress, (i / len(kinds), (i + 1) / len(kinds)))["byol"]
        for i, kind in enumerate(kinds)
    }
    arrays = trained.about(runs)
    for kind, run in runs.items():
        arrays |= _spectra(kind, run)
    return arrays


def _spectra(kind: str, run: Run) -> dict[str, Any]:
    found = followed_summary(run)
    if any(f"spectrum.{part}" not in found for part in PARTS):
        raise InputError(str(run.folder), "must have followed fixed views", None, "train it with --set follow=1024")
    arrays: dict[str, Any] = {f"{kind}.t": found["t"], f"{kind}.loss": run.series("loss")}
    for part in PARTS:
        lam = found[f"spectrum.{part}"].astype(float)
        steps = detect_steps(found["t"], lam) if len(lam) >= FEWEST else None
        arrays[f"{kind}.{part}"] = lam[:, :MODES].astype(np.float32)
        arrays[f"{kind}.{part}.steps"] = np.zeros(0) if steps is None else steps.times
        arrays[f"{kind}.{part}.grown"] = np.array(grown(lam[-1])[0])
    return arrays


def check(arrays: Arrays) -> list[Claim]:
    return [
        Claim.note(f"{kind} initialization, {words}: steps", len(arrays[f"{kind}.{part}.steps"]))
        for kind in trained.methods_in(arrays)
        for part, words in PARTS.items()
    ]


def table(arrays: Arrays) -> Table:
    rows = [
        [kind, words, str(len(times)), ", ".join(f"{t:.4g}" for t in times) or "–", str(arrays[f"{kind}.{part}.grown"])]
        for kind in trained.methods_in(arrays)
        for part, words in PARTS.items()
        for times in [arrays[f"{kind}.{part}.steps"]]
    ]
    return Table("Steps of BYOL", ["initialization", "part", "steps", "at t", "grown at the end"], rows)


def draw(arrays: Arrays) -> Figure:
    courses = [
        Course(f"{kind}, {words}", arrays[f"{kind}.t"], arrays[f"{kind}.loss"], arrays[f"{kind}.{part}"], "Cov")
        for kind in trained.methods_in(arrays)
        for part, words in PARTS.items()
    ]
    return draw_courses(courses, shown=MODES)


def page(arrays: Arrays) -> Page:
    return Page(
        "Does BYOL step?",
        "Eigenvalues of the covariance of the online network, the predictor and the target.",
        [],
        [table(arrays), trained.runs_table(arrays)],
    )
