"""The answer of a solver: modes and their accuracy."""

from dataclasses import dataclass

import numpy as np

from stairwise.checks import as_numpy
from stairwise.kernel.arrays import Matrix, like, namespace
from stairwise.kernel.operators import AbstractPairs

UNCERTAIN = 50  # γ_j below this many times the rounding error of γ_1 is noise


@dataclass(frozen=True, eq=False)
class Solution:
    """Leading modes and their accuracy.

    Attributes:
        eigenvalues: γ_j, descending, (k,), numpy float64.
        coefficients: a_j in columns, (N, k).
        residual: max_j ‖P K̃ a_j − N γ_j a_j‖ / (N γ_j ‖a_j‖).
        products: number of columns that K̃ was multiplied with.
        solver: name of the solver that was used.
        precision: expected relative error of γ, from the precision of K̃ (for landmarks also from that of the sums, and
            from directions that were left out as rounding).
        more: these modes and the spare ones that were asked for, if they were found.
    """

    eigenvalues: np.ndarray
    coefficients: Matrix
    residual: float
    products: int
    solver: str
    precision: float
    more: "Solution | None" = None

    @property
    def trusted(self) -> bool:
        """Whether all modes are above rounding error and the residual is at that level."""
        return self.precision < 1e-2 and self.residual < allowed_residual(self.precision)


def allowed_residual(precision: float) -> float:
    """The largest residual that rounding of K̃ can explain."""
    return max(1e-6, 1e3 * precision)


def measured(pairs: AbstractPairs, gamma: np.ndarray, a: Matrix, image: Matrix, products: int, solver: str) -> Solution:
    """A `Solution` of these modes with its residual; image = K̃ a."""
    xp = namespace(a)
    tiny = np.finfo(float).tiny
    theta = like(np.maximum(gamma * pairs.size, tiny), a)
    off = xp.sqrt(((pairs.swap(image) - a * theta) ** 2).sum(0)) / theta / xp.clip(xp.sqrt((a * a).sum(0)), tiny, None)
    positive = gamma > 0
    residual = float(as_numpy(off)[positive].max(initial=0.0)) if positive.any() else np.inf
    return Solution(gamma, fix_signs(a), residual, products, solver, precision_of(pairs, gamma))


def precision_of(pairs: AbstractPairs, gamma: np.ndarray) -> float:
    tiny = np.finfo(float).tiny
    return float(pairs.eps * np.abs(gamma).max(initial=tiny) / max(np.abs(gamma).min(initial=np.inf), tiny))


def fix_signs(a: Matrix) -> Matrix:
    """Make the largest coefficient of each mode positive, so that results do not depend on the solver."""
    largest = as_numpy(a[abs(a).argmax(0), like(np.arange(a.shape[1]), a)])
    return a * like(np.where(largest < 0, -1.0, 1.0), a)


def above_rounding(pairs: AbstractPairs, gamma: np.ndarray) -> int:
    """Number of γ that are more than noise."""
    return int((gamma > UNCERTAIN * pairs.eps * np.abs(gamma).max(initial=0.0)).sum())


def padded(gamma: np.ndarray, a: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad with zeros for modes beyond the rank; `_judged` rejects them later."""
    more = k - len(gamma)
    return np.append(gamma, np.zeros(more)), np.hstack([a, np.zeros((len(a), more))])


def padded_like(gamma: np.ndarray, a: Matrix, image: Matrix, k: int) -> tuple[np.ndarray, Matrix, Matrix]:
    if len(gamma) == k:
        return gamma, a, image
    wide, columns = padded(gamma, as_numpy(a), k)
    return wide, like(columns, a), like(padded(gamma, as_numpy(image), k)[1], a)
