"""Fig. 5: hidden representations step when the embeddings do, small initialization.

    stairwise reproduce fig5                      the small-initialization runs, which it shares with fig1cd and fig2cf
    stairwise reproduce fig5 --data cifar10
    stairwise reproduce fig5 --smoke              seconds on a CPU, photographs; numbers without meaning

Top: eigenvalues of the embeddings (of C for Barlow Twins, of the covariance for the others), bottom: of the covariance
of the representations before the head. Expected: rates of rise of the two correlate, without a lag to speak of, more
than they do when one is shifted against the other in time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.experiments.experiment import Arrays, Claim, Progress, claims_table
from stairwise.experiments.runs import (
    METHODS,
    SMALL,
    RunsConfig,
    about,
    curves,
    methods_in,
    obtain,
    runs_table,
    spectrum_panels,
)
from stairwise.figures.training import draw_layers
from stairwise.monitor.steps import coupling
from stairwise.report.page import Page, Picture, Table

SMOKE = {"smoke": True}


@dataclass(frozen=True)
class Config(RunsConfig):
    """E4, E6 and E8 of the paper."""

    kinds = (SMALL,)


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Both spectra over time, and how they go together."""
    runs = obtain(config, SMALL, progress)
    arrays = about(runs)
    for method, run in runs.items():
        series = "eigenvalues" if method == "bt" else "covariance"
        arrays |= curves(f"{method}.z", run, series) | curves(f"{method}.h", run, "hidden")
        found = coupling(run.times, run.series(series), run.series("hidden"))
        share = found.lag / (run.times[-1] - run.times[0])
        arrays[f"{method}.coupling"] = np.array([found.correlation, share, found.unshifted, found.by_chance])
    return arrays


def check(arrays: Arrays) -> list[Claim]:
    """They go together."""
    claims = []
    for m in methods_in(arrays):
        _, lag, unshifted, chance = (float(x) for x in arrays[f"{m}.coupling"])
        text = f"{METHODS[m]}: correlation of the rates of rise, without lag"
        claims.append(Claim(text, unshifted, f"> {chance:.3f}, 99 % of other alignments in time", unshifted > chance))
        claims.append(Claim.at_most(f"{METHODS[m]}: |lag|, as a share of the whole time", abs(lag), 0.02))
    return claims


def table(arrays: Arrays) -> Table:
    """Method by method."""
    rows = []
    for m in methods_in(arrays):
        correlation, lag, unshifted, chance = (float(x) for x in arrays[f"{m}.coupling"])
        rows.append([METHODS[m], f"{unshifted:.3f}", f"{chance:.3f}", f"{correlation:.3f}", f"{100 * lag:+.2f} %"])
    header = ["method", "correlation", "99 % of chance", "at the best lag", "that lag, of the whole time"]
    return Table("Embeddings and representations", header, rows)


def draw(arrays: Arrays) -> Figure:
    """A column a method: embeddings above, representations below."""
    return draw_layers(
        [
            (METHODS[m], arrays[f"{m}.z.t"], arrays[f"{m}.z.lam"], arrays[f"{m}.h.lam"], "C" if m == "bt" else "Cov z")
            for m in methods_in(arrays)
        ]
    )


def page(arrays: Arrays, claims: list[Claim], picture: Path, facts: dict[str, str]) -> Page:
    """Interactive version."""
    layers = [
        (f"{m}.{x}", f"{METHODS[m]}, {name}")
        for m in methods_in(arrays)
        for x, name in (("z", "embeddings"), ("h", "representations"))
    ]
    return Page(
        "Hidden representations step with the embeddings",
        "Eigenvalues of the embeddings and of the representations before the head, over training time.",
        spectrum_panels(arrays, layers),
        [table(arrays), runs_table(arrays), claims_table(claims)],
        [Picture(picture, "Eigenvalues of embeddings and of hidden representations over training time.")],
        facts,
    )
