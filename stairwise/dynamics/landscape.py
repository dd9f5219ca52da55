"""Gradient flow and descent of single modes on any landscape."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import number, positive_int, time_vector
from stairwise.dynamics.integrate import integrate
from stairwise.theory.landscapes import AbstractLandscape

Floats = NDArray[np.float64]


def landscape_flow(
    landscape: AbstractLandscape, s_bar0: ArrayLike, gamma: ArrayLike, t: ArrayLike, rtol: float = 1e-9
) -> Floats:
    """s̄(t) of s̄' = −γ dL/ds̄, by numerical integration; shape (T, *modes)."""
    start, gamma = np.broadcast_arrays(np.asarray(s_bar0, dtype=float), np.asarray(gamma, dtype=float))
    moments = time_vector(t, infinite=False)
    return integrate(lambda s: landscape.rate(s, gamma), start.copy(), moments, rtol)


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
