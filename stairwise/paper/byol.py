"""BYOL, of which the paper says in a footnote that no steps were seen at once: spectra of its three parts.

    stairwise reproduce byol                      two runs of ResNet-50 on STL-10, ten minutes each on a GPU
    stairwise reproduce byol --set only=small     one of them alone; --store FOLDER --join adds it
    stairwise reproduce byol --smoke              seconds on a CPU, photographs; its numbers mean nothing

Eigenvalues of the centred covariance of the online embedding, of the predictor's output and of the target's embedding,
on the same fixed views at every record, from standard and from small initialization. `detect_steps` counts the steps of
each, so that the question has an answer: does BYOL step? Predicted from small initialization: at least three steps,
with a smaller gap between a rising mode and the next than the other losses have in this network.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError
from stairwise.figures.training import Course, draw_parts
from stairwise.paper import trained
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.runs.reader import Run
from stairwise.staircase.separation import relative_variance, separation
from stairwise.staircase.steps import FEWEST, detect_steps
from stairwise.table import Table
from stairwise.theory.spectra import grown
from stairwise.training.following import followed_summary

PARTS = {"z": "online", "predictor": "predictor", "target": "target"}
MODES = 32  # that are stored
PREDICTED, RISING = 3, 3  # steps from small initialization, and modes that a gap needs (docs/results/byol.md)
OTHERS = 0.95  # the least gap that another loss has from small initialization: Barlow Twins, in the covariance
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
    kinds = trained.chosen_kinds(config.only, config.chosen(), ["standard", "small"], ["standard", "small"])
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
    # a run that was stopped may have followed its views once more; the log rounds t
    recorded = found["t"] <= run.times[-1] * (1 + 1e-6)
    t = found["t"][recorded]
    arrays: dict[str, Any] = {f"{kind}.t": t, f"{kind}.loss": np.interp(t, run.times, run.series("loss"))}
    for part in PARTS:
        lam = found[f"spectrum.{part}"][recorded].astype(float)
        steps = detect_steps(t, lam) if len(lam) >= FEWEST else None
        arrays[f"{kind}.{part}"] = lam[:, :MODES].astype(np.float32)
        arrays[f"{kind}.{part}.steps"] = np.zeros(0) if steps is None else steps.times
        arrays[f"{kind}.{part}.grown"] = np.array(grown(lam[-1])[0])
        gaps = separation(t, relative_variance(lam)).gaps if len(lam) >= FEWEST else np.zeros(0)
        arrays[f"{kind}.{part}.gaps"] = gaps
    return arrays


def check(arrays: Arrays) -> list[Claim]:
    claims = [
        Claim.note(f"{_title(arrays, kind, part)}: {what}", value)
        for kind in trained.methods_in(arrays)
        for part in PARTS
        for what, value in (("steps", len(arrays[f"{kind}.{part}.steps"])), ("gap", _gap(arrays, kind, part)))
    ]
    whole = "small" in trained.methods_in(arrays) and not trained.so_far(arrays, "small")
    if whole and trained.foretold(arrays, "small"):
        name, gaps = _title(arrays, "small", "z"), arrays["small.z.gaps"]
        claims.append(Claim.at_least(f"{name}: steps, predicted", len(arrays["small.z.steps"]), PREDICTED))
        text = f"{name}: gap to the next mode, predicted"
        fewer = f"< {OTHERS:.2f} decades, the least of the other losses, with at least {RISING} rising modes"
        claims.append(
            Claim(text, _gap(arrays, "small", "z"), fewer, len(gaps) >= RISING and _gap(arrays, "small", "z") < OTHERS)
        )
    return claims


def _gap(arrays: Arrays, kind: str, part: str) -> float:
    """Median gap in decades between a rising mode and the next (`stairwise.staircase.separation`); 0 if none rises."""
    gaps = arrays[f"{kind}.{part}.gaps"]
    return float(np.median(gaps)) if len(gaps) else 0.0


def _title(arrays: Arrays, kind: str, part: str) -> str:
    return f"{kind} initialization, {PARTS[part]}{trained.so_far(arrays, kind)}"


def table(arrays: Arrays) -> Table:
    rows = [
        [
            kind + trained.so_far(arrays, kind),
            words,
            str(len(arrays[f"{kind}.{part}.steps"])),
            ", ".join(f"{t:.4g}" for t in arrays[f"{kind}.{part}.steps"]) or "–",
            f"{_gap(arrays, kind, part):.2f}",
            str(len(arrays[f"{kind}.{part}.gaps"])),
            str(arrays[f"{kind}.{part}.grown"]),
        ]
        for kind in trained.methods_in(arrays)
        for part, words in PARTS.items()
    ]
    header = ["initialization", "part", "steps", "at t", "gap in decades", "rising modes, of ten", "grown at the end"]
    return Table("Steps of BYOL", header, rows)


def draw(arrays: Arrays) -> Figure:
    runs = {}
    for kind in trained.methods_in(arrays):
        t, loss = arrays[f"{kind}.t"], arrays[f"{kind}.loss"]
        parts = [Course(words, t, loss, arrays[f"{kind}.{part}"], "Cov") for part, words in PARTS.items()]
        runs[f"{kind} initialization{trained.so_far(arrays, kind)}"] = parts
    return draw_parts(runs, shown=MODES)


def page(arrays: Arrays) -> Page:
    return Page(
        "Does BYOL step?",
        "Eigenvalues of the covariance of the online network, the predictor and the target.",
        [],
        [table(arrays), trained.runs_table(arrays)],
    )
