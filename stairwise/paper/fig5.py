"""Fig. 5: hidden representations step when the embeddings do, small initialization.

    stairwise reproduce fig5                      the runs of fig1cd and fig2cf, with their times
    stairwise reproduce fig5 --set methods=bt --set fast=true    Barlow Twins, and the same at twice the learning rate
    stairwise reproduce fig5 --data cifar10
    stairwise reproduce fig5 --smoke              seconds on a CPU, photographs; numbers without meaning

9000 of STL-10's 13,000 labelled images (docs/results/stl10.md); the paper had 105,000.
Top: eigenvalues of the embeddings (of C for Barlow Twins, of the covariance for the others), bottom: of the covariance
of the representations before the head. Expected from the paper: the changes of their total variances correlate, without
a lag to speak of, more than they do when one is shifted against the other in time. Ours do so weakly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError
from stairwise.figures.training import draw_layers
from stairwise.paper.harness import Arrays, Claim, claims_table
from stairwise.paper.trained import (
    FAST,
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
from stairwise.progress import Progress
from stairwise.report.page import Page, Picture
from stairwise.staircase.steps import coupling
from stairwise.table import Table

SMOKE = {"smoke": True}
TITLES = {**METHODS, "bt-fast": "Barlow Twins, twice the rate"}
OPENING = 0.06  # of the time: left out once, since everything grows at first


@dataclass(frozen=True)
class Config(RunsConfig):
    """E4, E6 and E8 of the paper; fast: also Barlow Twins at twice the learning rate."""

    kinds = (SMALL, FAST)
    fast: bool = False


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Both spectra over time, and how they go together."""
    if config.fast and config.chosen() != ["bt"]:
        raise InputError("methods", "must be bt where fast is true", config.methods, "leave one of them out")
    runs = obtain(config, SMALL, progress, (0.0, 0.5 if config.fast else 1.0))
    if config.fast:
        runs["bt-fast"] = obtain(config, FAST, progress, (0.5, 1.0))["bt"]
    arrays = about(runs)
    for method, run in runs.items():
        series = "eigenvalues" if method.startswith("bt") else "covariance"
        both = curves(f"{method}.z", run, series) | curves(f"{method}.h", run, "hidden")
        arrays |= {name: array for name, array in both.items() if not name.endswith(".every")}
        total = [np.maximum(run.series(name), 0.0).sum(axis=1) for name in (series, "hidden")]
        arrays[f"{method}.total"] = np.stack([run.times, *total]).astype(np.float32)
    return arrays


def together(arrays: Arrays, method: str) -> dict[str, tuple[float, ...]]:
    """By part of the time: correlation of the changes of total variance, 99 % of chance, the same at the best lag, and
    that lag as a share of the whole time."""
    t, z, h = arrays[f"{method}.total"].astype(float)
    found: dict[str, tuple[float, ...]] = {}
    for when, late in (("", t >= 0), (", without the opening", t > OPENING * t[-1])):
        one = coupling(t[late], z[late, None], h[late, None])
        found[when] = (one.unshifted, one.by_chance, one.correlation, one.lag / (t[-1] - t[0]))
    return found


def check(arrays: Arrays) -> list[Claim]:
    """They go together."""
    claims = []
    for m in methods_in(arrays):
        for when, (unshifted, chance, _, lag) in together(arrays, m).items():
            text = f"{TITLES[m]}: correlation of the changes{when}"
            claims.append(Claim(text, unshifted, "≥ 0.5", unshifted >= 0.5))
            text = f"{TITLES[m]}: the same, against chance{when}"
            claims.append(Claim(text, unshifted, f"> {chance:.3f}, 99 % of shifts in time", unshifted > chance))
            text = f"{TITLES[m]}: |best lag|, as a share of the whole time{when}"
            claims.append(Claim.at_most(text, abs(lag), 0.02))
    return claims


def table(arrays: Arrays) -> Table:
    """Method by method."""
    rows = []
    for m in methods_in(arrays):
        for when, (unshifted, chance, correlation, lag) in together(arrays, m).items():
            rows.append(
                [TITLES[m] + when, f"{unshifted:.3f}", f"{chance:.3f}", f"{correlation:.3f}", f"{100 * lag:+.2f} %"]
            )
    header = ["method", "correlation", "99 % of shifts stay below", "at the best lag", "that lag, of the whole time"]
    return Table("Embeddings and representations", header, rows)


def draw(arrays: Arrays) -> Figure:
    """A column a method: embeddings above, representations below."""
    return draw_layers(
        [
            (
                TITLES[m],
                arrays[f"{m}.z.t"],
                arrays[f"{m}.z.lam"],
                arrays[f"{m}.h.lam"],
                "C" if m.startswith("bt") else "Cov z",
            )
            for m in methods_in(arrays)
        ]
    )


def page(arrays: Arrays, claims: list[Claim], picture: Path, facts: dict[str, str]) -> Page:
    """Interactive version."""
    layers = [
        (f"{m}.{x}", f"{TITLES[m]}, {name}")
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
