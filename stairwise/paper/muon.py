"""Beyond the paper: the same data, two staircases. Gradient flow takes its steps at times ∝ 1/γ, spectral flow ∝ 1/√γ.

    stairwise reproduce muon                    10 s on a CPU, photographs that ship with scikit-learn
    stairwise reproduce muon --data cifar10     on CIFAR-10

n = 500 pairs of 20×20×3 crops, d = 6, W₀ ~ N(0, α²) with α = 1e-7, integrated by both rules: W' = −∇L and
W' = polar(−∇L), the continuous form of Muon. Expected: step times of the spectral law within 3 %, the share of the
learned span in the leading modes within 0.02; the last step comes about √(γ_1/γ_d) times as late as the first under
spectral flow, about γ_1/γ_d times or more under gradient flow.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.dynamics.flow import gradient_flow
from stairwise.figures.spectral import draw_two_rules
from stairwise.paper.fig1ab import CropsConfig, staircase_panels
from stairwise.paper.harness import Arrays, Claim
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.table import Table
from stairwise.theory.alignment import effective_singular_values
from stairwise.theory.correlation import Correlation
from stairwise.theory.laws import closed_form
from stairwise.theory.modes import Modes
from stairwise.theory.spectral_law import spectral_steps
from stairwise.theory.trajectory import Trajectory

ALT = "Eigenvalues of C over time under gradient flow and spectral flow, and their step times over γ in logarithms."
SMOKE = {"n": 60, "crop": 8, "d": 3}
RULES = {"gradient": "logistic", "spectral": "spectral"}  # and its law


@dataclass(frozen=True)
class Config(CropsConfig):
    """The data of Fig. 1A,B; d is our choice."""

    d: int = 6


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    progress(0.0, 1, "crops and eigenvectors of Γ")
    corr, W0 = config.begin()
    gamma = corr.eigenvalues[: config.d]
    tau = Modes(gamma, effective_singular_values(W0, corr)).step_times()
    steps = {"gradient": tau, "spectral": spectral_steps(*corr.project(W0))}
    arrays: dict[str, Any] = {"gamma": gamma}
    for i, (rule, law) in enumerate(RULES.items()):
        progress(0.1 + 0.2 * i, 1, f"{rule} flow")
        end = steps[rule].max() * (1.2 if rule == "gradient" else 1.6)
        t = np.unique(np.concatenate([np.linspace(0, end, 300), np.geomspace(steps[rule].min() / 3, end, 300)]))
        run = gradient_flow(W0, corr, t, weights=True, rule=rule)
        predicted = closed_form(W0, corr, t, law=law, weights=True)
        arrays |= {f"{rule}.t": t, f"{rule}.flow": run.eigenvalues, f"{rule}.law": predicted.eigenvalues}
        arrays[f"{rule}.overlap"] = [_overlap(w.weights, corr, config.d) for w in (run, predicted)]
    return arrays


def _overlap(weights: np.ndarray | None, corr: Correlation, d: int) -> float:
    """Share of the span of the last weights that lies in the leading d eigenvectors."""
    assert weights is not None
    rows = np.linalg.svd(weights[-1], full_matrices=False)[2]
    return float((np.square(rows @ corr.eigenvectors[:, :d])).sum() / d)


def _steps(arrays: Arrays, rule: str, which: str) -> np.ndarray:
    return Trajectory(arrays[f"{rule}.t"], arrays[f"{rule}.{which}"], which).step_times()


def check(arrays: Arrays) -> list[Claim]:
    gamma, claims = arrays["gamma"], []
    for rule, bound in (("gradient", 0.01), ("spectral", 0.03)):
        flow, law = (_steps(arrays, rule, which) for which in ("flow", "law"))
        off = np.abs(law / flow - 1).max()
        claims.append(Claim.at_most(f"{rule} flow: largest relative error of a step time", off, bound))
        span, predicted = arrays[f"{rule}.overlap"]
        claims.append(Claim.close(f"{rule} flow: overlap with the leading modes", span, predicted, 0.02))
        power = 1.0 if rule == "gradient" else 0.5
        ratio = float((gamma[0] / gamma[-1]) ** power)
        claims.append(Claim.note(f"{rule} flow: last step over first", flow[-1] / flow[0], ratio))
    slope = np.polyfit(np.log(gamma), np.log(_steps(arrays, "spectral", "flow")), 1)[0]
    claims.append(Claim.close("spectral flow: exponent of γ in the step times", float(slope), -0.5, 0.02))
    return claims


def draw(arrays: Arrays) -> Figure:
    runs = ((arrays[f"{rule}.t"], arrays[f"{rule}.flow"], arrays[f"{rule}.law"]) for rule in RULES)
    return draw_two_rules(arrays["gamma"], *runs)


def table(arrays: Arrays) -> Table:
    """Step times of both flows and both laws."""
    steps = [_steps(arrays, rule, which) for rule in RULES for which in ("law", "flow")]
    rows = [
        [str(j + 1), f"{gamma:.4g}", *(f"{column[j]:.4f}" for column in steps)]
        for j, gamma in enumerate(arrays["gamma"])
    ]
    header = ["mode", "γ", "gradient, predicted", "gradient flow", "spectral, predicted", "spectral flow"]
    return Table("When each dimension is learned (λ = ½)", header, rows)


def page(arrays: Arrays) -> Page:
    charts = []
    for rule in RULES:
        t, flow, law = (arrays[f"{rule}.{which}"] for which in ("t", "flow", "law"))
        charts += staircase_panels(f"{rule} flow", t, flow, law, _steps(arrays, rule, "law"))
    return Page(
        "Two rules, two staircases",
        "The same linear model on the same pairs, trained by gradient flow and by spectral flow, which moves along the "
        "polar factor of the gradient as Muon does. Under gradient flow a mode waits for a time proportional to 1/γ; "
        "under spectral flow all modes grow at the same speed, and the wait goes as 1/√γ.",
        charts,
        [table(arrays)],
    )
