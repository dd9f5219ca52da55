"""Plateaus are saddles: count the directions of descent at a point of the trajectory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from stairwise.checks import number, positive_int
from stairwise.dynamics.eigenbasis import jacobian
from stairwise.theory.correlation import Correlation, checked

WAITING = 1 / 3  # below it the loss of a mode is concave


@dataclass(frozen=True)
class Saddle:
    """Unstable directions of the loss at W.

    Attributes:
        modes: number of modes not yet learned, eigenvalues of C below 1/3 (where the loss of a mode, (1 − γs²)², is
            concave in s): d at the start, one less on each plateau.
        index: number of negative eigenvalues of the full Hessian. With k of d modes learned and p positive eigenvalues
            of Γ it is (d − k)(p − k), because each free direction can grow along any free eigenvector.
    """

    modes: int
    index: int


def saddle_at(W: ArrayLike, corr: Correlation, top: int | None = None, tolerance: float | None = None) -> Saddle:
    """Count the unstable directions of L at W (d, m), in the span of the `top` leading eigenvectors of Γ (default all).

    The dense Hessian has (d · top)² entries. Eigenvalues above −tolerance × the largest magnitude count as flat: on a
    plateau the next mode has already grown to √λ, and the last one is 1 − λ short of its end, which tilts the flat
    directions by about as much. By default the tolerance is three times the larger of both, and at most 0.01; far
    from a saddle, directions of a γ below a hundredth of the largest are then not counted.

    >>> corr = Correlation.from_matrix([4.0, 2.0, 1.0])
    >>> saddle_at(np.zeros((2, 3)), corr)
    Saddle(modes=2, index=6)
    >>> saddle_at([[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]], corr)  # the first mode learned
    Saddle(modes=1, index=2)
    """
    u, gamma = checked(corr).project(W, "W")
    spectrum = np.linalg.eigvalsh((u * gamma) @ u.T)
    if tolerance is None:
        off = np.where(spectrum < WAITING, np.sqrt(np.maximum(spectrum, 0)), np.abs(1 - spectrum)).max()
        tolerance = float(np.clip(3 * off, 1e-9, 1e-2))
    tolerance = number(tolerance, "tolerance", least=0, most=1)
    top = len(gamma) if top is None else positive_int(top, "top", len(gamma))
    curvature = np.linalg.eigvalsh(-jacobian(u[:, :top], gamma[:top]))
    waiting = int((spectrum[::-1][: int((gamma > 0).sum())] < WAITING).sum())
    return Saddle(waiting, int((curvature < -tolerance * np.abs(curvature).max()).sum()))
