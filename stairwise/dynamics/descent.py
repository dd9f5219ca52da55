"""Full-batch gradient descent of the linear model, simulated step by step in the eigenbasis, and of single modes."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, number, positive_int
from stairwise.dynamics.eigenbasis import Split
from stairwise.progress import Progress, silent
from stairwise.theory.correlation import Correlation
from stairwise.theory.landscapes import AbstractLandscape
from stairwise.theory.trajectory import Trajectory

Floats = NDArray[np.float64]


def gradient_descent(
    W0: ArrayLike,
    corr: Correlation,
    lr: float,
    steps: int,
    record_every: int | NDArray = 1,
    momentum: float = 0.0,
    weights: bool = False,
    progress: Progress = silent,
) -> Trajectory:
    """W ← W − lr ∇L, optionally with heavy-ball momentum; exact up to rounding error, 1e-12 in C.

    Arguments:
        W0: initial weights, (d, m).
        corr: the data.
        lr: learning rate; stable below 1/(4 γ_1).
        steps: number of steps.
        record_every: record step 0, every `record_every`-th step and the last; or an array of the steps to record.
        progress: called at each record.

    Example:
        >>> corr = Correlation.from_matrix([2.0, 1.0])
        >>> run = gradient_descent(1e-3 * np.eye(2), corr, lr=0.01, steps=200, record_every=100)
        >>> run.times, run.eigenvalues.round(3)
        (array([0., 1., 2.]), array([[0.   , 0.   ],
               [0.929, 0.003],
               [1.   , 0.88 ]]))
    """
    lr, momentum = number(lr, "lr", above=0), number(momentum, "momentum", least=0)
    steps = positive_int(steps, "steps")
    records = _records(steps, record_every)
    if momentum >= 1:
        raise InputError("momentum", "must be below 1", momentum)
    # with momentum, passive columns do not grow by a simple law, so all columns are simulated
    split = Split.of(W0, corr, lr * steps, tolerance=0.0 if momentum or weights else 1e-12)
    u, gamma = np.ascontiguousarray(split.u[:, split.active]), split.gamma[split.active]
    kept = np.empty((len(records), *u.shape))
    y, z, c = np.empty_like(u), np.empty_like(u), np.empty((len(u), len(u)))
    velocity = np.zeros_like(u)
    done, rate = 0, 4 * lr
    with np.errstate(over="ignore", invalid="ignore"):  # divergence is reported by `trajectory`
        for i, step in enumerate(records):
            for _ in range(step - done):
                np.multiply(u, gamma, out=y)
                np.matmul(y, u.T, out=c)
                np.matmul(c, y, out=z)
                y -= z
                y *= rate
                if momentum:
                    velocity *= momentum
                    velocity += y
                    u += velocity
                else:
                    u += y
            done = step
            kept[i] = u
            progress(float(step), steps, f"gradient descent, {steps:,} steps")
            if not np.isfinite(u).all():
                kept[i:] = np.nan
                break
    how = f"gradient descent (lr={lr:g}" + (f", momentum={momentum:g})" if momentum else ")")
    return split.trajectory(lr * records, kept, how, weights, lr)


def _records(steps: int, every: int | NDArray) -> NDArray:
    if not isinstance(every, np.ndarray):
        return np.unique(np.append(np.arange(0, steps, positive_int(every, "record_every")), steps))
    if every.dtype.kind not in "iu" or every.size == 0 or every.min() < 0 or every.max() > steps:
        raise InputError("record_every", f"must be whole numbers between 0 and {steps}", every)
    return np.unique(every)


def landscape_descent(
    landscape: AbstractLandscape, s_bar0: ArrayLike, gamma: ArrayLike, lr: float, steps: int
) -> Floats:
    """s̄ after 0, 1, … steps of s̄ ← s̄ − lr γ dL/ds̄; shape (steps + 1, *modes).

    >>> from stairwise.theory.landscapes import BarlowTwins
    >>> landscape_descent(BarlowTwins(), 0.5, 1.0, lr=0.1, steps=2).round(4)
    array([0.5   , 0.65  , 0.8002])
    """
    lr, steps = number(lr, "lr", above=0), positive_int(steps, "steps")
    s, gamma = np.broadcast_arrays(np.asarray(s_bar0, dtype=float), np.asarray(gamma, dtype=float))
    out = np.empty((steps + 1, *s.shape))
    out[0] = s
    for i in range(steps):
        out[i + 1] = out[i] + lr * landscape.rate(out[i], gamma)
    return out
