"""Fig. 9: modified landscapes in which slow modes learn sooner.

    stairwise reproduce fig9        1 s on a CPU

A: Barlow Twins. B: sharpened at zero, so that small modes leave at once. C, D: wider minima (fourth power; hinged),
which allow larger learning rates. Expected: step times from s̄(0) = 1e-6 agree with the closed form; at γ = 1 the plain
loss is unstable above lr = 1/4, sharpened above 1 (curvature 2), and fourth power and hinged above more than 1/4.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import number, seed
from stairwise.dynamics.descent import landscape_descent
from stairwise.dynamics.flow import landscape_flow
from stairwise.figures.appendix import draw_landscapes
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.theory.landscapes import AbstractLandscape, BarlowTwins, FourthPower, Hinged, Sharpened

SHOWN: dict[str, AbstractLandscape] = {
    "Barlow Twins": BarlowTwins(),
    "sharpened at zero": Sharpened(),
    "fourth power": FourthPower(),
    "hinged": Hinged(),
}
ALT = "Four landscapes of one mode: plain, sharpened at zero, fourth power, hinged."


@dataclass(frozen=True)
class Config:
    """Our choice: the paper gives no numbers for these panels."""

    start: float = 1e-6
    seed: int = 0


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Landscapes, integrated step times, and the largest stable learning rate, all at γ = 1."""
    number(config.start, "start", above=0)
    x, t = np.linspace(-1.6, 1.6, 401), np.linspace(0, 6, 6001)
    arrays: dict[str, Any] = {"x": x, "times": t[::10]}
    for i, landscape in enumerate(SHOWN.values()):
        progress(i / len(SHOWN), 1, list(SHOWN)[i])
        path = landscape_flow(landscape, config.start, 1.0, t)
        rest = float(landscape.solve(1e6, 0.5, 1.0))
        arrays[f"loss{i}"] = landscape.loss(x)
        arrays[f"path{i}"] = path[::10]
        arrays[f"step{i}"] = [np.interp(rest**2 / 2, path**2, t), landscape.step_times(config.start, 1.0)]
        arrays[f"lr{i}"] = largest_lr(landscape, rest, seed(config.seed))
        arrays[f"rest{i}"] = rest
    return arrays


def largest_lr(landscape: AbstractLandscape, rest: float, seed: int = 0) -> float:
    """Find by bisection the learning rate above which descent from 1 % off the minimum moves away from it."""
    near = rest * (1 + 0.01 * np.random.default_rng(seed).choice([-1.0, 1.0], 8))
    low, high = 0.01, 16.0
    for _ in range(30):
        middle = np.sqrt(low * high)
        with np.errstate(over="ignore", invalid="ignore"):
            end = landscape_descent(landscape, near, 1.0, middle, 400)[-1]
        stays = np.isfinite(end).all() and (np.abs(np.abs(end) - rest) <= 0.02 * rest).all()
        low, high = (middle, high) if stays else (low, middle)
    return float(low)


def check(arrays: Arrays) -> list[Claim]:
    steps = []
    for i, name in enumerate(SHOWN):
        measured, predicted = arrays[f"step{i}"]
        steps.append(Claim.close(f"step time, {name}", measured, predicted, 0.002))
    lrs = {name: float(arrays[f"lr{i}"]) for i, name in enumerate(SHOWN)}
    text = "largest learning rate that holds the minimum"
    return [
        *steps,
        Claim.close(f"{text}, Barlow Twins", lrs["Barlow Twins"], 0.25, 0.01),
        Claim.close(f"{text}, sharpened", lrs["sharpened at zero"], 1.0, 0.01),
        *(
            Claim(f"{text} (of those up to 16), {name}", lrs[name], "> 0.25", lrs[name] > 0.25)
            for name in ("fourth power", "hinged")
        ),
    ]


def draw(arrays: Arrays) -> Figure:
    rests = [[-float(arrays[f"rest{i}"]), float(arrays[f"rest{i}"])] for i in range(len(SHOWN))]
    return draw_landscapes(arrays["x"], [arrays[f"loss{i}"] for i in range(len(SHOWN))], list(SHOWN), rests)


def page(arrays: Arrays) -> Page:
    lines = [Line(name, arrays["times"], arrays[f"path{i}"], (i, len(SHOWN))) for i, name in enumerate(SHOWN)]
    return Page(
        "Landscapes modified for speed",
        "Self-supervised learning is slow because small modes wait at an unstable equilibrium, and because the "
        "minima of large modes forbid a larger learning rate. A kink at zero removes the first cause, a wider minimum "
        "the second.",
        [Panel("Path of a mode with γ = 1 from a small start", "time t", "s̄", lines, log=True)],
    )
