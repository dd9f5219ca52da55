"""The appendix's ideas for faster training (S1 to S7): what the theory predicts, and what was measured.

Predictions are for one mode of the linear model, relative to the plain loss: how much sooner it steps at the same
learning rate, from a small and from a standard start, and how much larger a learning rate its minimum bears.
"""

from dataclasses import dataclass

import numpy as np
from scipy.integrate import quad

from benchmarks.race.store import Result
from stairwise.paper.fig9 import largest_lr
from stairwise.theory.landscapes import (
    AbstractLandscape,
    BarlowTwins,
    FourthPower,
    Hinged,
    Sharpened,
    Smoothed,
)

STARTS = {"small": 1e-3, "standard": 0.3}  # √λ of every mode at the start
SLOWEST = 0.1  # γ of the mode; ratios do not depend on it
DAMPING = 0.1


@dataclass(frozen=True)
class Idea:
    """An idea; `loss` and `method` name its runs in the race, and `note` what the table says of it."""

    number: str
    name: str
    loss: str
    method: str
    landscape: AbstractLandscape | None = None


IDEAS = (
    Idea("S1", "gradient times (FᵀF + δ)⁻¹", "plain", "precondition"),
    Idea("S2", "sharpened loss, √λ", "sharpened", "sgd", Sharpened()),
    Idea("S3", "flat beyond λ = 1", "flat", "sgd", Smoothed(epsilon=0.0)),
    Idea("S4", "less steep beyond λ = 1", "smoothed", "sgd", Smoothed(epsilon=0.1)),
    Idea("S5", "fourth power", "fourth_power", "sgd", FourthPower()),
    Idea("S6", "flat around λ = 1", "hinged", "sgd", Hinged()),
    Idea("S7", "larger learning rate", "plain", "sgd"),
)


def preconditioned_time(start: float, damping: float = DAMPING) -> float:
    """Time until the slowest mode steps if its gradient is divided by λ + damping: ∫ (s̄² + δ) / (4γ s̄ (1 − s̄²)) ds̄.

    >>> preconditioned_time(1e-3, damping=0.0) < preconditioned_time(1e-3) < float(BarlowTwins().step_times(1e-3, 0.1))
    True
    """
    time, _ = quad(
        lambda u: (np.exp(2 * u) + damping) / (4 * SLOWEST * (1 - np.exp(2 * u))), np.log(start), -np.log(2) / 2
    )
    return float(time)


def sooner(idea: Idea, start: float) -> float:
    """How many times sooner the slowest mode steps than with the plain loss, at the same learning rate."""
    plain = float(BarlowTwins().step_times(start, SLOWEST))
    if idea.landscape is not None:
        return plain / float(idea.landscape.step_times(start, SLOWEST))
    return plain / preconditioned_time(start) if idea.method == "precondition" else 1.0


def bearable(idea: Idea) -> float:
    """How many times larger than with the plain loss the learning rate may be before the minimum does not hold."""
    plain = largest_lr(BarlowTwins(), 1.0)
    if idea.landscape is None:  # preconditioning divides the curvature at the minimum by 1 + damping
        return 1 + DAMPING if idea.method == "precondition" else 1.0
    return largest_lr(idea.landscape, float(idea.landscape.solve(1e6, 0.5, 1.0))) / plain


def best_trial(results: dict[str, Result], data: str, loss: str, method: str, start: str) -> Result | None:
    """The trial with the highest accuracy on held-out training images."""
    about = (data, loss, method, start, "tune")
    found = [r for r in results.values() if (r["data"], r["loss"], r["method"], r["start"], r["stage"]) == about]
    kept = [r for r in found if r["logistic"] and not r["diverged"]]
    return max(kept, key=lambda r: r["logistic"][-1], default=None)


def rows(results: dict[str, Result], data: str) -> list[list[str]]:
    """The table: one row per idea that was measured at one start at least; empty if none was."""
    table = []
    for idea in IDEAS:
        cells, effects = [], []
        for start in STARTS:
            plain = best_trial(results, data, "plain", "sgd", start)
            found = best_trial(results, data, idea.loss, idea.method, start)
            if plain is None or found is None:
                cells.append("*not run yet*")
                continue
            cells.append(_cell(idea, plain, found, results, data, start))
            effects.append(found["logistic"][-1] - plain["logistic"][-1])
        if effects or idea.number == "S7":
            table.append([idea.number, idea.name, _prediction(idea), *cells, _verdict(idea, effects)])
    return table if any("not run" not in cell for row in table for cell in row[3:5]) else []


def _prediction(idea: Idea) -> str:
    if idea.number == "S7":
        return f"the rate is bearable up to {largest_lr(BarlowTwins(), 1.0):.2f}/γ₁"
    small, standard = (sooner(idea, start) for start in STARTS.values())
    rate = bearable(idea)
    bound = "at least " if rate > 60 else ""  # where the search for the largest rate ends
    return f"{small:.2g}×, {standard:.2g}×; {bound}{rate:.2g}×"


def _cell(idea: Idea, plain: Result, found: Result, results: dict[str, Result], data: str, start: str) -> str:
    if idea.number == "S7":
        trials = [
            r
            for r in results.values()
            if (r["data"], r["loss"], r["method"], r["start"], r["stage"]) == (data, "plain", "sgd", start, "tune")
        ]
        stable = max(r["lr"] for r in trials if not r["diverged"])
        return f"best lr {plain['lr']:g}, largest that did not diverge {stable:g}"
    change = f"{100 * plain['logistic'][-1]:.1f} → {100 * found['logistic'][-1]:.1f} %"
    return f"{change}, {plain['grown'][-1]} → {found['grown'][-1]} modes"


def _verdict(idea: Idea, effects: list[float]) -> str:
    """In words, from the effects at the starts that were measured; a point or less is no effect."""
    if idea.number == "S7":
        return "every row has its own best rate"
    words = {(True, True): "helps at both", (True, False): "helps at one", (False, False): "does not help"}
    if len(effects) < len(STARTS):
        return "helps where measured" if effects and effects[0] > 0.01 else "does not help where measured"
    better = sorted((effect > 0.01 for effect in effects), reverse=True)
    return words[(better[0], better[1])]
