"""Is SimCLR more stepwise than Barlow Twins and VICReg at standard initialization? A footnote of the paper says so.

    stairwise reproduce sharpness                          nine runs of 3200 updates, CIFAR-10, five minutes on one H200
    stairwise reproduce sharpness --set methods=simclr     one method alone; --store FOLDER --join adds it
    stairwise reproduce sharpness --set control=lars,warm  also SimCLR with VICReg's optimizer, and with a warm-up
    stairwise reproduce sharpness --set seeds=1 --set run_seed=2      the third seed alone
    stairwise reproduce sharpness --set methods= --set control=plain  SimCLR without momentum alone
    stairwise reproduce sharpness --smoke                  seconds on a CPU, photographs; its numbers mean nothing

"We found that SimCLR showed noticeably more apparent stepwise behavior in the standard case …, with steps visible even
in the loss curve (not shown). We are rather surprised by this difference and invite attempts to replicate it."

Each method keeps the optimizer that the paper gave it; network, d, batch and images are the same. Two numbers per run,
defined before any of these runs was made (`stairwise.staircase.separation`): the gap in decades between a rising mode
and the next one, and how much faster the loss falls while modes rise. Neither depends on the scale of the loss or of
the embedding, and the first not on time at all. They are taken of C after batch norm for Barlow Twins and of the
centred covariance for the others, as in Fig. 3. The paper's claim holds for a number if the lowest of SimCLR's seeds is
above the highest of the other method's. Predictions on the means over seeds are judged beside it
(docs/results/sharpness.md).
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError, one_of
from stairwise.figures.training import draw_apart
from stairwise.paper import trained
from stairwise.paper.fig3 import SPECTRA
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Line, Page, Panel
from stairwise.runs.reader import Run
from stairwise.staircase.separation import Separation, loss_contrast, relative_variance, separation
from stairwise.staircase.steps import FEWEST, detect_steps
from stairwise.table import Table

CONTROLS = {"lars": "SimCLR with LARS", "warm": "SimCLR with a warm-up", "plain": "SimCLR without momentum"}
TITLES = trained.METHODS | {f"simclr-{control}": title for control, title in CONTROLS.items()}
NUMBERS = {"gap": "gap", "contrast": "contrast of the loss"}
TWICE, ALIKE = 2.0, 1.5  # predicted: SimCLR's gap is at least twice the others'; less than this factor is "hardly"
CLEAN = 1.0  # decades; predicted: without momentum no gap is as large (written on 2026-11-19)
MODES, RECORDS = 22, 320  # that are stored of each run; the first thirteen have 28 modes
SMOKE = {"seeds": 1}
ALT = "Relative eigenvalues over time, standard initialization; losses, gaps and contrasts of every run."


@dataclass(frozen=True)
class Config(trained.RunsConfig):
    """E3, E5 and E7 of the paper; seeds: number of runs per method; control: also SimCLR with VICReg's optimizer
    ("lars"), with an epoch of warm-up ("warm"), without momentum ("plain"), or several ("lars,warm")."""

    kinds = ("-standard", *(f"-standard-{control}" for control in CONTROLS), trained.STANDARD)
    data: str = "cifar10"
    seeds: int = 3
    control: str = ""

    def chosen(self) -> list[str]:
        return super().chosen() if self.methods or not self.control else []

    def source(self) -> str:
        return " ".join(
            trained.RunsConfig.source(replace(one, methods=one.methods or "simclr")) for one in _by_seed(self)
        )


def _by_seed(config: Config) -> list[Config]:
    if not 1 <= config.seeds <= 9:
        raise InputError("seeds", "must be from 1 to 9", config.seeds)
    return [replace(config, run_seed=config.run_seed + i) for i in range(config.seeds)]


def _kind(config: Config) -> str:
    """Suffix of the recipes: on STL-10 those of Fig. 3 are meant."""
    return "-standard" if config.data == "cifar10" and not config.smoke else trained.STANDARD


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    controls = [one_of(name.strip(), "control", CONTROLS) for name in config.control.split(",") if name.strip()]
    if controls and _kind(config) == trained.STANDARD:
        raise InputError("control", "needs data=cifar10 and no smoke", config.data, "leave it out")
    runs: dict[str, Run] = {}
    every = _by_seed(config)
    share = 1 / len(every)
    for i, one in enumerate(every):
        parts = np.linspace(i * share, (i + 1) * share, 2 + len(controls))
        found = trained.obtain(one, _kind(config), progress, (parts[0], parts[1]))
        for control, span in zip(controls, pairwise(parts[1:]), strict=True):
            only = replace(one, methods="simclr")
            found[f"simclr-{control}"] = trained.obtain(only, f"-standard-{control}", progress, span)["simclr"]
        runs |= {f"{method} {one.run_seed}": run for method, run in found.items()}
    arrays = trained.about(runs)
    for name, run in runs.items():
        arrays |= _stored(name, run)
    return arrays


def _stored(name: str, run: Run) -> dict[str, Any]:
    """Relative variances of the leading modes at records evenly spaced in log t, and the loss."""
    method = name.split("-")[0].split()[0]
    t, lam = run.times, run.series(SPECTRA[method][0][0])
    rows = np.unique(np.geomspace(1, len(t), 4 * RECORDS).round().astype(int)) - 1
    if len(rows) > RECORDS:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, RECORDS).round().astype(int))]
    x, of_covariance = (relative_variance(values)[rows, :MODES] for values in (lam, run.series("covariance")))
    return {
        f"{name}.t": t[rows],
        f"{name}.loss": run.series("loss")[rows].astype(np.float32),
        f"{name}.x": x.astype(np.float16),
        f"{name}.covariance": separation(t[rows], of_covariance).gap if len(rows) >= FEWEST else 0.0,
        f"{name}.steps": len(detect_steps(t, lam)) if len(t) >= FEWEST else 0,
    }


def rising(arrays: Arrays, name: str) -> Separation:
    """The rising modes of a run."""
    return separation(arrays[f"{name}.t"], arrays[f"{name}.x"].astype(float))


def numbers(arrays: Arrays, number: str) -> dict[str, list[float]]:
    """Gaps or contrasts of all seeds, by method."""
    by_method: dict[str, list[float]] = {}
    for name in trained.methods_in(arrays):
        found = rising(arrays, name)
        loss = arrays[f"{name}.loss"].astype(float)
        value = found.gap if number == "gap" else loss_contrast(arrays[f"{name}.t"], loss, found)
        by_method.setdefault(name.split()[0], []).append(value)
    return by_method


def check(arrays: Arrays) -> list[Claim]:
    claims = []
    for number, words in NUMBERS.items():
        values = numbers(arrays, number)
        for method, others in values.items():
            if method in ("bt", "vicreg") and "simclr" in values:
                text = f"{words}: lowest of SimCLR less highest of {TITLES[method]}"
                ahead = min(values["simclr"]) - max(others)
                claims.append(Claim(text, ahead, "> 0", ahead > 0))
            else:
                claims.append(Claim.note(f"{words}: mean of {TITLES[method]}", float(np.mean(others))))
    return claims + _predictions(arrays)


def _predictions(arrays: Arrays) -> list[Claim]:
    """What was written before the runs, about means over seeds."""
    gap, contrast = ({m: float(np.mean(v)) for m, v in numbers(arrays, number).items()} for number in NUMBERS)
    others = [m for m in ("bt", "vicreg") if m in gap and "simclr" in gap]
    claims = [
        Claim.at_least(f"predicted: gap of SimCLR over that of {TITLES[m]}", _ratio(gap["simclr"], gap[m]), TWICE)
        for m in others
    ]
    if others:
        ahead = contrast["simclr"] - max(contrast[m] for m in others)
        claims.append(Claim("predicted: contrast of SimCLR less that of the others", ahead, "> 0", bool(ahead > 0)))
    if {"bt", "vicreg"} <= gap.keys():
        low, high = sorted((gap["bt"], gap["vicreg"]))
        text = "predicted: gaps of Barlow Twins and VICReg, larger over smaller"
        claims.append(Claim.at_most(text, _ratio(high, low), ALIKE))
    for control, title in CONTROLS.items():
        if {"simclr", f"simclr-{control}"} <= gap.keys():
            text = f"predicted: gap of SimCLR over that of {title}"
            ratio = _ratio(gap["simclr"], gap[f"simclr-{control}"])
            claims.append(
                Claim.at_most(text, ratio, ALIKE) if control == "lars" else Claim.at_least(text, ratio, TWICE)
            )
    if "simclr-plain" in gap:
        largest = max(numbers(arrays, "gap")["simclr-plain"])
        claims.append(Claim.at_most(f"predicted: largest gap of {CONTROLS['plain']}", largest, CLEAN))
    return claims


def _ratio(above: float, below: float) -> float:
    """The quotient of two gaps; a gap is 0 if no mode has risen, and NaN, of 0 and 0, is accepted by no bound."""
    return above / below if below > 0 else float("inf" if above > 0 else "nan")


def table(arrays: Arrays) -> Table:
    rows = []
    contrasts = {m: iter(values) for m, values in numbers(arrays, "contrast").items()}
    for name in trained.methods_in(arrays):
        method, seed = name.split()
        found = rising(arrays, name)
        values = [found.gap, next(contrasts[method]), float(arrays[f"{name}.covariance"])]
        counts = [len(found.times), found.clean, int(arrays[f"{name}.steps"])]
        rows.append([TITLES[method], seed, *(f"{value:.2f}" for value in values), *(str(count) for count in counts)])
    columns = ["gap in decades", "contrast of the loss", "gap of the covariance"]
    header = ["method", "seed", *columns, "rising modes, of ten", "clean", "detect_steps"]
    return Table("How stepwise each run is", header, rows)


def draw(arrays: Arrays) -> Figure:
    shown: dict[str, tuple[Any, Any]] = {}
    for name in trained.methods_in(arrays):
        shown.setdefault(TITLES[name.split()[0]], (arrays[f"{name}.t"], arrays[f"{name}.x"].astype(float)))
    losses: dict[str, list[tuple[Any, Any]]] = {}
    for name in trained.methods_in(arrays):
        losses.setdefault(TITLES[name.split()[0]], []).append((arrays[f"{name}.t"], arrays[f"{name}.loss"]))
    units = {"gap": " in decades, at most 3.7"}
    dots = {
        words + units.get(number, ""): {TITLES[m]: values for m, values in numbers(arrays, number).items()}
        for number, words in NUMBERS.items()
    }
    return draw_apart(shown, losses, dots)


def page(arrays: Arrays) -> Page:
    panels = []
    for name in trained.methods_in(arrays):
        t, x = arrays[f"{name}.t"], arrays[f"{name}.x"].astype(float)
        lines = [Line(f"mode {j + 1}", t, x[:, j], (j, x.shape[1]), legend=False) for j in range(x.shape[1])]
        title = f"{TITLES[name.split()[0]]}, seed {name.split()[1]}"
        marks = list(rising(arrays, name).times)
        panels.append(Panel(title, "time t = Σ lr", "λ / typical variance", lines, marks=marks, log=True))
    return Page(
        "How stepwise is standard initialization?",
        "Eigenvalues in units of the typical variance Σλ²/Σλ, three seeds per loss.",
        panels,
        [table(arrays), trained.runs_table(arrays)],
    )
