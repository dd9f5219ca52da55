"""Fig. 1A,B: a linear model learns real images one dimension at a time, as predicted.

    stairwise reproduce fig1ab                    2 s on a CPU, photographs that ship with scikit-learn
    stairwise reproduce fig1ab --data cifar10     the paper's data (pixel scaling is our choice: standardized)

n = 500 pairs of 20×20×3 crops, d = 10, W₀ ~ N(0, α²) with α = 1e-7, full-batch descent at learning rate 5e-5. Expected:
ten steps. The logistic law agrees with the flow within 0.005 and, with the growth factor of descent, with descent
within 0.03; step times agree within 1 %. For comparison: the paper's aligned law, from these weights and from α alone.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError, TheoryWarning
from stairwise.data.crops import two_crops
from stairwise.data.images import load
from stairwise.dynamics.descent import gradient_descent
from stairwise.dynamics.flow import gradient_flow
from stairwise.figures.staircase import draw_staircase
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress, part
from stairwise.report.page import Line, Page, Panel
from stairwise.table import Table
from stairwise.theory.alignment import effective_singular_values, gaussian_init
from stairwise.theory.conditions import check_conditions
from stairwise.theory.correlation import Correlation
from stairwise.theory.laws import closed_form, learning_rate_bound
from stairwise.theory.modes import Modes
from stairwise.theory.solutions import check_dimension
from stairwise.theory.trajectory import Trajectory

RECORDS = 400
ALT = "Loss and eigenvalues of C over time, measured (solid) and predicted (dashed)."


@dataclass(frozen=True)
class CropsConfig:
    """A linear model on pairs of crops, with the paper's numbers (Sec. 4.4)."""

    data: str = "photos"
    n: int = 500
    crop: int = 20
    pixels: str = "standardize"
    d: int = 10
    alpha: float = 1e-7
    seed: int = 0

    def begin(self) -> tuple[Correlation, np.ndarray]:
        """Γ of the pairs, and W₀."""
        corr = Correlation.from_pairs(*two_crops(load(self.data), self.n, self.crop, self.pixels, self.seed))
        check_dimension(self.d, corr.eigenvalues)
        return corr, gaussian_init(self.d, corr.features, self.alpha, self.seed)


@dataclass(frozen=True)
class Config(CropsConfig):
    lr: float = 5e-5


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    progress(0.0, 1, "crops and eigenvectors of Γ")
    corr, W0 = config.begin()
    start = check_conditions(W0, corr).start
    if not start < 1:
        raise InputError("alpha", "must start with all eigenvalues of C below 1", f"{start:.3g}", "lower alpha")
    steps = int(np.ceil(1.2 * _last_step(W0, corr, config) / config.lr))
    # evenly spaced, plus logarithmically spaced for the fast modes
    records = np.unique(np.concatenate([np.linspace(0, steps, RECORDS), np.geomspace(1, steps, RECORDS)]).astype(int))

    descent = gradient_descent(W0, corr, config.lr, steps, records, progress=part(progress, 0.2, 0.8))
    t = descent.times
    progress(0.8, 1, "gradient flow")
    flow = gradient_flow(W0, corr, t, rtol=1e-9)
    progress(0.95, 1, "closed forms")
    s0 = effective_singular_values(W0, corr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TheoryWarning)  # it is computed for comparison only
        aligned = closed_form(W0, corr, t, law="aligned")
    return {
        "times": t,
        "descent": descent.eigenvalues,
        "flow": flow.eigenvalues,
        "law": closed_form(W0, corr, t).eigenvalues,
        "law_descent": closed_form(W0, corr, t, lr=config.lr).eigenvalues,
        "aligned": aligned.eigenvalues,
        "gamma": corr.eigenvalues[: config.d + 1],
        "tau": Modes(corr.eigenvalues[: config.d], s0).step_times(),
        "alpha": config.alpha,
        "weakest": s0[-1] / config.alpha,
        "lr": config.lr,
        "lr_bound": learning_rate_bound(corr.eigenvalues),
    }


def _last_step(W0: np.ndarray, corr: Correlation, config: Config) -> float:
    """Time of the last step by the logistic law with the growth factor of descent."""
    bound = 2 * Modes(corr.eigenvalues[: config.d], effective_singular_values(W0, corr)).step_times().max()
    predicted = closed_form(W0, corr, np.linspace(0, bound, 2000), lr=config.lr).step_times()
    return float(predicted[np.isfinite(predicted)].max())


def _step_times(arrays: Arrays) -> dict[str, np.ndarray]:
    """Times at which the eigenvalues of each trajectory cross 1/2."""
    names = ("descent", "flow", "law", "law_descent", "aligned")
    return {name: Trajectory(arrays["times"], arrays[name], name).step_times() for name in names}


def check(arrays: Arrays) -> list[Claim]:
    d = arrays["descent"].shape[1]
    steps = _step_times(arrays)
    error = {name: np.abs(arrays[name] - arrays["flow"]).max() for name in ("law", "aligned")}
    off = np.abs(steps["law_descent"] / steps["descent"] - 1)
    loss0 = ((1 - arrays["descent"][0]) ** 2).sum()
    return [
        Claim.close("the loss starts at d", loss0, d, 1e-3),
        Claim.close("steps taken by descent", np.isfinite(steps["descent"]).sum(), d, 0),
        Claim.at_most("largest error of λ, logistic law against flow", error["law"], 0.005),
        Claim.at_most(
            "largest error of λ, logistic law at this learning rate against descent",
            np.abs(arrays["law_descent"] - arrays["descent"]).max(),
            0.03,
        ),
        Claim.at_most("relative error of the step times, median", np.median(off), 0.01),
        Claim.note("largest error of λ, the paper's aligned law against flow (for comparison)", error["aligned"]),
        *_rough(arrays),
    ]


def _rough(arrays: Arrays) -> list[Claim]:
    """The paper's estimate from α alone, s_j(0) ≈ α √(d − j + 1) (Sec. 4.4; erratum A6), for comparison."""
    d = arrays["flow"].shape[1]
    modes = Modes(arrays["gamma"][:d], arrays["alpha"] * np.sqrt(np.arange(d, 0, -1)))
    error = np.abs(modes.eigenvalues(arrays["times"]) - arrays["flow"]).max()
    late = np.abs(modes.step_times() / _step_times(arrays)["flow"] - 1).max()
    name = "with s_j(0) from α alone against flow (for comparison)"
    return [
        Claim.note(f"largest error of λ, aligned law {name}", error),
        Claim.note(f"relative error of the step times, largest, aligned law {name}", late),
    ]


def draw(arrays: Arrays) -> Figure:
    steps = _step_times(arrays)["law_descent"]
    return draw_staircase(arrays["times"], arrays["descent"], arrays["law_descent"], steps)


def table(arrays: Arrays) -> Table:
    steps, lr = _step_times(arrays), float(arrays["lr"])
    rows = [
        [
            str(j + 1),
            f"{arrays['gamma'][j]:.4g}",
            f"{steps['law_descent'][j]:.4f}",
            f"{steps['descent'][j]:.4f}",
            f"{100 * (steps['law_descent'][j] / steps['descent'][j] - 1):+.2f} %",
            f"{steps['descent'][j] / lr:,.0f}",
            f"{arrays['tau'][j]:.4f}",
        ]
        for j in range(arrays["descent"].shape[1])
    ]
    header = ["mode", "γ", "predicted t", "measured t", "error", "measured step", "paper's τ (aligned)"]
    return Table("When each dimension is learned (λ = ½)", header, rows)


def staircase_panels(
    name: str, t: np.ndarray, measured: np.ndarray, predicted: np.ndarray, steps: np.ndarray
) -> list[Panel]:
    """Charts of the loss and of the eigenvalues of C (T, d), measured and predicted, with the predicted steps (d,)."""
    axis, d = "time t = learning rate × step", measured.shape[1]
    losses = [((1 - spectra) ** 2).sum(axis=1) for spectra in (measured, predicted)]
    lines = [Line(name, t, losses[0], (1, 3)), Line("predicted", t, losses[1], dashed=True)]
    curves = []
    for j in range(d):
        curves.append(Line(f"λ{j + 1}", t, measured[:, j], (j, d)))
        curves.append(Line(f"λ{j + 1} predicted", t, predicted[:, j], dashed=True, legend=False))
    return [
        Panel("Loss", axis, "loss ‖C − I‖²", lines, list(steps)),
        Panel("Eigenvalues of C", axis, "λ", curves, list(steps), log=True),
    ]


def page(arrays: Arrays) -> Page:
    measured, predicted = arrays["descent"], arrays["law_descent"]
    return Page(
        "Learning one dimension at a time",
        "A linear model f(x) = W x is trained to map two crops of the same image to the same point while keeping its "
        f"{measured.shape[1]} outputs uncorrelated (loss ‖C − I‖²). From a small start it learns one dimension after "
        "another: each step down of the loss is one eigenvalue of C going from 0 to 1. Solid: trained by gradient "
        "descent. Dashed: predicted in closed form from the data and the initial weights.",
        staircase_panels("descent", arrays["times"], measured, predicted, _step_times(arrays)["law_descent"]),
        [table(arrays)],
    )
