"""The appendix's ideas for faster training (S1 to S7): what the theory predicts, and what was measured.

Predictions of S1 to S6 are for one mode of the linear model, relative to the plain loss: how much sooner it steps at
the same learning rate, from a small and from a standard start, and how much larger a rate its minimum bears. S1 is
raced as `sw.precondition`, which couples the modes; its prediction is for the last of D modes with γ_k = 1/k.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from benchmarks.race.entrants import HEADS, METHODS
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
SLOWEST = 0.1  # γ of the mode; ratios do not depend on it, but for S1
D = HEADS["modes"]["d"]
SPECTRUM = 1 / np.arange(1.0, D + 1)  # γ of S1's modes
NO_EFFECT = 0.02  # a change of accuracy up to which no effect is claimed: two standard errors of a difference
NOT_RUN = "*not run yet*"


@dataclass(frozen=True)
class Idea:
    """An idea; `loss` and `method` name its runs in the race."""

    number: str
    name: str
    loss: str
    method: str
    landscape: AbstractLandscape | None = None


IDEAS = (
    Idea("S1", "gradient times (C + δ c̄)^(−½), its norm kept", "plain", "precondition"),
    Idea("S2", "sharpened loss, √λ", "sharpened", "sgd", Sharpened()),
    Idea("S3", "flat beyond λ = 1", "flat", "sgd", Smoothed(epsilon=0.0)),
    Idea("S4", "less steep beyond λ = 1", "smoothed", "sgd", Smoothed(epsilon=0.1)),
    Idea("S5", "fourth power", "fourth_power", "sgd", FourthPower()),
    Idea("S6", "flat around λ = 1", "hinged", "sgd", Hinged()),
)


def preconditioned_time(start: float, gamma: NDArray, damping: float, power: float, keep_norm: bool = True) -> float:
    """Time until the last mode steps under `sw.precondition`: s̄_j' = 4γ_j s̄_j (1 − λ_j) a_j n, λ_j = s̄_j².

    a_j = (λ_j + damping · mean λ)^(−power), and n keeps the norm of the gradient with respect to the embeddings, whose
    squares are (1 − λ_j)² λ_j.

    >>> one, plain = np.array([0.1]), float(BarlowTwins().step_times(1e-3, 0.1))
    >>> round(preconditioned_time(1e-3, one, 0.1, 0.5) / plain, 4)  # a single mode has nothing to share with
    1.0
    """

    def rate(_: float, s: NDArray) -> NDArray:
        lam = s**2
        factor = (lam + damping * lam.mean()) ** -power
        squares = (1 - lam) ** 2 * lam
        kept = np.sqrt(squares.sum() / (squares * factor**2).sum()) if keep_norm else 1.0
        return 4 * gamma * s * (1 - lam) * factor * kept

    def half(_: float, s: NDArray) -> float:
        return s[-1] ** 2 - 0.5

    half.terminal = True
    end = 10 * float(BarlowTwins().step_times(start, gamma.min()))
    run = solve_ivp(rate, (0.0, end), np.full(len(gamma), start), method="LSODA", events=half, rtol=1e-8, atol=1e-10)
    return float(run.t_events[0][0])


def sooner(idea: Idea, start: float) -> float:
    """How many times sooner the slowest mode steps than with the plain loss, at the same learning rate."""
    if idea.landscape is not None:
        return float(BarlowTwins().step_times(start, SLOWEST) / idea.landscape.step_times(start, SLOWEST))
    if idea.method != "precondition":
        return 1.0
    plain = float(BarlowTwins().step_times(start, SPECTRUM[-1]))
    return plain / preconditioned_time(start, SPECTRUM, **METHODS["precondition"].settings["precondition"])


def bearable(idea: Idea) -> float:
    """How many times larger than with the plain loss the learning rate may be before the minimum does not hold."""
    if idea.landscape is None:  # at the minimum all λ are equal, so preconditioning changes nothing but the norm
        return 1.0
    plain = largest_lr(BarlowTwins(), 1.0)
    return largest_lr(idea.landscape, float(idea.landscape.solve(1e6, 0.5, 1.0))) / plain


def bound(gamma: float, momentum: float) -> float:
    """The largest stable rate of the plain loss at its minimum.

    >>> round(bound(2.0, 0.0), 3), round(bound(2.0, 0.9), 4)
    (0.125, 0.2375)
    """
    return (1 + momentum) / (4 * gamma)


def trials(results: dict[str, Result], data: str, loss: str, method: str, start: str) -> list[Result]:
    """All short runs, one per learning rate."""
    about = (data, loss, method, start, "tune")
    return [r for r in results.values() if (r["data"], r["loss"], r["method"], r["start"], r["stage"]) == about]


def best_trial(runs: list[Result]) -> Result | None:
    """The run with the highest accuracy on held-out training images; None if all diverged or none was made."""
    kept = [r for r in runs if r["logistic"] and not r["diverged"]]
    return max(kept, key=lambda r: r["logistic"][-1], default=None)


def rows(results: dict[str, Result], data: str, initial: dict[str, Any] | None = None) -> list[list[str]]:
    """The table: one row per idea; empty if nothing was measured. `initial`: what `largest_rate` has stored."""
    table, measured = [], False
    for idea in IDEAS:
        cells, rates, effects = [], [], []
        for start in STARTS:
            plain = trials(results, data, "plain", "sgd", start)
            found = trials(results, data, idea.loss, idea.method, start)
            measured |= bool(plain and found)
            cells.append(_cell(idea, plain, found))
            rates.append(_rate(plain, found))
            effects.append(_effect(plain, found))
        table.append([idea.number, idea.name, _prediction(idea), *cells, ", ".join(rates), _verdict(idea, effects)])
    return [*table, larger_rate(results, data, initial)] if measured else []


@cache  # the largest rates are found by simulation
def _prediction(idea: Idea) -> str:
    small, standard = (sooner(idea, start) for start in STARTS.values())
    rate = bearable(idea)
    bound = "at least " if rate > 60 else ""  # where the search for the largest rate ends
    return f"{small:.2g}×, {standard:.2g}×; {bound}{rate:.2g}×"


def _cell(idea: Idea, plain: list[Result], found: list[Result]) -> str:
    """Accuracy and modes with the plain loss and with the idea, each with its best rate."""
    before, after = best_trial(plain), best_trial(found)
    if not found or not plain:
        return NOT_RUN
    if after is None:
        return f"diverged at every rate from {min(r['lr'] for r in found):g} on"
    if before is None:
        return f"the plain loss diverged at every rate; with the idea {100 * after['logistic'][-1]:.1f} %"
    change = f"{100 * before['logistic'][-1]:.1f} → {100 * after['logistic'][-1]:.1f} %"
    return f"{change}, {before['grown'][-1]} → {after['grown'][-1]} modes"


def larger_rate(results: dict[str, Result], data: str, initial: dict[str, Any] | None) -> list[str]:
    """S7, a larger learning rate: accuracies at all rates, and the largest that did not diverge over the predicted one;
    `initial` must be of the same images."""
    about, cells, predicted, ratios = ["S7", "larger learning rate"], [], [], []
    for start in STARTS:
        plain = sorted(trials(results, data, "plain", "sgd", start), key=lambda r: float(r["lr"]))
        cells.append(", ".join(f"{r['lr']:g}: {_end(r)}" for r in plain) or NOT_RUN)
        largest = _largest(plain)
        if initial and initial["data"] == data and largest:
            predicted.append(bound(initial[start]["gamma"][0], initial[start]["momentum"]))
            ratios.append(largest / predicted[-1])
    if not ratios:
        return [*about, f"bearable up to {largest_lr(BarlowTwins(), 1.0):.2f}/γ₁", *cells, "", NOT_RUN]
    limits, times = ", ".join(f"{rate:.2g}" for rate in predicted), " and ".join(f"{ratio:.1f}" for ratio in ratios)
    words = f"bears at least {times} times the predicted rate"
    return [*about, f"bearable up to {limits}", *cells, ", ".join(f"{ratio:.1f}×" for ratio in ratios), words]


def _end(run: Result) -> str:
    return "diverged" if run["diverged"] else f"{100 * run['logistic'][-1]:.1f} %"


def _largest(runs: list[Result]) -> float | None:
    """The largest learning rate that did not diverge."""
    return max((r["lr"] for r in runs if not r["diverged"]), default=None)


def _rate(plain: list[Result], found: list[Result]) -> str:
    """How many times larger than with the plain loss a learning rate did not diverge."""
    before, after = _largest(plain), _largest(found)
    if not plain or not found:
        return NOT_RUN
    if before is None:
        return "plain diverged"
    return f"{after / before:.2g}×" if after else f"less than {min(r['lr'] for r in found) / before:.2g}×"


def _effect(plain: list[Result], found: list[Result]) -> float | None:
    """The change of accuracy; minus all of it if the idea diverged at every rate, None if it was not run."""
    before, after = best_trial(plain), best_trial(found)
    if not found or before is None:
        return None
    return (after["logistic"][-1] if after else 0.0) - before["logistic"][-1]


def _verdict(idea: Idea, effects: list[float | None]) -> str:
    """In words, from the effects at the starts that were measured; two points or less are no effect."""
    found = {start: effect for start, effect in zip(STARTS, effects, strict=True) if effect is not None}
    helped = [start for start, effect in found.items() if effect > NO_EFFECT]
    harmed = [start for start, effect in found.items() if effect < -NO_EFFECT]
    words = [f"{verb} from {' and '.join(at)}" for verb, at in (("helps", helped), ("harms", harmed)) if at]
    return ", ".join(words) or ("no effect" if found else NOT_RUN)
