"""Fig. 2C–F: SimCLR and VICReg learn in steps as well, from small initialization.

    stairwise reproduce fig2cf                    two runs, STL-10 (SimCLR: 22 minutes, one H200)
    stairwise reproduce fig2cf --set methods=simclr --set only=x4 --store FOLDER --join    at four times the rate
    stairwise reproduce fig2cf --data cifar10     two minutes on one H200, ResNet-18
    stairwise reproduce fig2cf --smoke            seconds on a CPU, photographs; its numbers mean nothing

Trained on 9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper used 105,000.
Eigenvalues are those of the centred covariance. Expected: at least four steps for each method.
Predicted for STL-10 before the runs: at least five.
"""

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from stairwise.figures.training import Course, draw_courses
from stairwise.paper import trained
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page

PREDICTED = 5  # steps on STL-10; written on 2026-11-17 (docs/results/predictions.md)
STEPS, GROWN = {"vicreg": (14, 20)}, {"simclr-x4": (8, 13)}  # at the end; written on 2026-11-19
ALT = "Loss and eigenvalues of SimCLR and VICReg over training time."


@dataclass(frozen=True)
class Config(trained.RunsConfig):
    """E6 and E8 of the paper; only: these kinds of runs."""

    kinds = (trained.SMALL,)
    methods: str = "simclr,vicreg"
    only: str = ""


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    kinds = trained.chosen_kinds(config.only, config.chosen(), ["small"], trained.FROM_SMALL)
    runs = trained.obtain_small(config, kinds, progress)
    arrays = trained.about(runs)
    for name, run in runs.items():
        arrays |= trained.curves(name, run, "covariance")
    return arrays


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for m in trained.methods_in(arrays):
        name, steps = trained.title(arrays, m), len(trained.steps_of(arrays, m))
        ended, foretold = not trained.so_far(arrays, m), trained.foretold(arrays, m)
        bounds = {"": 4} | ({", predicted": PREDICTED} if foretold else {})
        for ending, least in bounds.items():
            text = f"steps of {name}{ending}"
            early = not ended and steps < least  # more may come
            claims.append(Claim.note(text, steps) if early else Claim.at_least(text, steps, least))
        if ended and foretold and m in STEPS:
            claims.append(Claim.between(f"steps of {name}, predicted later", steps, *STEPS[m]))
        if ended and foretold and m in GROWN:
            grown = float(arrays[f"{m}.grown"][0])
            claims.append(Claim.between(f"grown modes of {name}, predicted later", grown, *GROWN[m]))
    return claims


def draw(arrays: Arrays) -> Figure:
    return draw_courses(
        [
            Course(trained.title(arrays, m), arrays[f"{m}.t"], arrays[f"{m}.loss"], arrays[f"{m}.lam"], "Cov z")
            for m in trained.methods_in(arrays)
        ],
        shown=max(arrays[f"{m}.lam"].shape[1] for m in trained.methods_in(arrays)),
    )


def page(arrays: Arrays) -> Page:
    return Page(
        "Other losses, the same steps",
        "SimCLR and VICReg from small initialization: eigenvalues of the embedding's covariance.",
        trained.spectrum_panels(arrays, [(m, trained.title(arrays, m)) for m in trained.methods_in(arrays)]),
        [trained.runs_table(arrays)],
    )
