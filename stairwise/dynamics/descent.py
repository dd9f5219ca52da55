"""Full-batch gradient and spectral descent of the linear model, simulated in the eigenbasis, and of single modes."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, flag, instance, number, one_of, positive_int, rate, real
from stairwise.dynamics.eigenbasis import Split
from stairwise.dynamics.spectral import newton_schulz
from stairwise.progress import Progress, silent
from stairwise.theory.correlation import Correlation
from stairwise.theory.landscapes import LARGEST_WEIGHT, AbstractLandscape
from stairwise.theory.spectral_law import gradient, polar
from stairwise.theory.trajectory import Trajectory

Floats = NDArray[np.float64]

MOST_STEPS = 10**9
RULES = ("gradient", "spectral", "newton_schulz")


def gradient_descent(
    W0: ArrayLike,
    corr: Correlation,
    lr: float,
    steps: int,
    record_every: int | NDArray = 1,
    momentum: float = 0.0,
    weights: bool = False,
    progress: Progress = silent,
    rule: str = "gradient",
) -> Trajectory:
    """W ← W − lr ∇L, optionally with heavy-ball momentum; exact up to rounding error, 1e-12 in C.

    The spectral rules replace the update by its polar factor, W ← W + lr polar(Σ momentum^i (−∇L_i)), as Muon does.

    Arguments:
        W0: initial weights, (d, m).
        corr: the data.
        lr: learning rate; stable below 1/(4 γ_1). Spectral rules are stable for any, and λ ends within about
            2 lr √γ of 1.
        steps: number of steps.
        record_every: record step 0, every `record_every`-th step and the last; or an array of the steps to record.
        progress: called at each record.
        rule: "gradient", "spectral" (exact polar factor) or "newton_schulz" (Muon's five iterations).

    Example:
        >>> corr = Correlation.from_matrix([2.0, 1.0])
        >>> run = gradient_descent(1e-3 * np.eye(2), corr, lr=0.01, steps=200, record_every=100)
        >>> run.times, run.eigenvalues.round(3)
        (array([0., 1., 2.]), array([[0.   , 0.   ],
               [0.929, 0.003],
               [1.   , 0.88 ]]))
    """
    lr, momentum, weights = rate(lr), number(momentum, "momentum", least=0), flag(weights, "weights")
    steps = positive_int(steps, "steps", MOST_STEPS)
    records = _records(steps, record_every)
    if momentum >= 1:
        raise InputError("momentum", "must be below 1", momentum)
    # with momentum, passive columns do not grow by a simple law, so all columns are simulated
    plain = one_of(rule, "rule", RULES) == "gradient"
    split = Split.of(W0, corr, lr * steps, tolerance=1e-12 if plain and not (momentum or weights) else 0.0)
    u, gamma = np.ascontiguousarray(split.u[:, split.active]), split.gamma[split.active]
    advance = _gradient_steps(u, gamma, lr, momentum) if plain else _spectral_steps(u, gamma, lr, momentum, rule)
    kept = np.empty((len(records), *u.shape))
    done = 0
    with np.errstate(over="ignore", invalid="ignore"):  # divergence is reported by `trajectory`
        for i, step in enumerate(records):
            advance(step - done)
            done = step
            kept[i] = u
            progress(float(step), steps, f"{rule.replace('_', '–')} descent, {steps:,} steps")
            if not np.isfinite(u).all():
                kept[i:] = np.nan
                break
    how = f"{rule.replace('_', '–')} descent (lr={lr:g}" + (f", momentum={momentum:g})" if momentum else ")")
    return split.trajectory(lr * records, kept, how, weights, lr)


def _gradient_steps(u: Floats, gamma: Floats, lr: float, momentum: float) -> Callable[[int], None]:
    """A function that moves u by a number of steps along the gradient, in place."""
    y, z, c = np.empty_like(u), np.empty_like(u), np.empty((len(u), len(u)))
    velocity = np.zeros_like(u)

    def advance(count: int) -> None:
        for _ in range(count):
            np.multiply(u, gamma, out=y)
            np.matmul(y, u.T, out=c)
            np.matmul(c, y, out=z)
            np.subtract(y, z, out=y)
            np.multiply(y, 4 * lr, out=y)
            if momentum:
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, y, out=velocity)
                np.add(u, velocity, out=u)
            else:
                np.add(u, y, out=u)

    return advance


def _spectral_steps(u: Floats, gamma: Floats, lr: float, momentum: float, rule: str) -> Callable[[int], None]:
    """A function that moves u by a number of steps along polar factors, in place."""
    sums = np.zeros_like(u)

    def advance(count: int) -> None:
        for _ in range(count):
            g, noise = gradient(u, gamma)
            np.add(momentum * sums, g, out=sums)
            np.add(u, lr * (polar(sums, noise) if rule == "spectral" else newton_schulz(sums)), out=u)

    return advance


def _records(steps: int, every: int | NDArray) -> NDArray:
    if not isinstance(every, np.ndarray):
        return np.unique(np.append(np.arange(0, steps, positive_int(every, "record_every")), steps))
    if every.dtype.kind not in "iu" or every.size == 0 or every.min() < 0 or every.max() > steps:
        raise InputError("record_every", f"must be whole numbers between 0 and {steps}", every)
    return np.unique(every)


def landscape_descent(
    landscape: AbstractLandscape, s_bar0: ArrayLike, gamma: ArrayLike, lr: float, steps: int
) -> Floats:
    """s̄ after 0, 1, … steps of s̄ ← s̄ − lr γ dL/ds̄; shape (steps + 1, *modes). What passes 1e30 stays there.

    >>> from stairwise.theory.landscapes import BarlowTwins
    >>> landscape_descent(BarlowTwins(), 0.5, 1.0, lr=0.1, steps=2).round(4)
    array([0.5   , 0.65  , 0.8002])
    """
    lr, steps = rate(lr), positive_int(steps, "steps", MOST_STEPS)
    instance(landscape, "landscape", AbstractLandscape, "use one of sw.landscapes")
    s, gamma = np.broadcast_arrays(real(s_bar0, "s_bar0").astype(float), real(gamma, "gamma").astype(float))
    out = np.empty((steps + 1, *s.shape))
    out[0] = s
    for i in range(steps):
        bounded = np.abs(out[i]) <= LARGEST_WEIGHT
        motion = lr * landscape.rate(np.where(bounded, out[i], 0.0), gamma)
        out[i + 1] = np.where(bounded, out[i] + motion, out[i])
    return out
