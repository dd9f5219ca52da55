"""The leading modes of P K̃: γ and a with P K̃ a = N γ a and aᵀ K̃ a = 1.

The paper's K_Γ = K̃^{-1/2} Z K̃^{-1/2} has the same eigenvalues, but no inverse or root is needed: Z = K̃ P K̃ / N,
so K_Γ = K̃^{1/2} P K̃^{1/2} / N, and g_j = Σ_i a_ij φ(x_i) is the eigenvector of Γ in feature space.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import scipy.linalg

from stairwise.checks import InputError, as_numpy, one_of, positive_int
from stairwise.kernel.arrays import like, namespace
from stairwise.kernel.krylov import krylov
from stairwise.kernel.operators import AbstractPairs, DensePairs, FeaturePairs
from stairwise.kernel.solution import (
    UNCERTAIN,
    Solution,
    above_rounding,
    allowed_residual,
    measured,
    padded,
    padded_like,
)
from stairwise.progress import Progress, silent

SMALL = 600  # points below which a dense factorization is fastest
MOST_DENSE = 12_000  # points above which a dense factorization is refused


def solve(
    pairs: AbstractPairs,
    k: int,
    solver: str = "auto",
    at_most: bool = False,
    progress: Progress = silent,
    spare: int = 0,
) -> Solution:
    """The k leading modes; with `at_most`, fewer if fewer exist. With `spare`, up to so many more in `Solution.more`.

    Spare modes cost little, because they need a residual of 1e-3 only.

    `auto` chooses "features" for explicit features if there are fewer than points; "cholesky" up to 600 points, or if k
    is more than an eighth of at most 12,000 points; otherwise "krylov". If Krylov stalls on a very steep spectrum,
    Cholesky is used for up to 12,000 points. `Solution.solver` says which one was used.

    Raises:
        InputError: fewer than k modes are positive, or some are below the rounding error of K̃.

    Example:
        >>> x = np.array([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])  # x_1, x_2, x'_1, x'_2
        >>> solve(DensePairs(x @ x.T), 2).eigenvalues
        array([1., 1.])
    """
    one_of(solver, "solver", ["auto", *SOLVERS])
    k = positive_int(k, "n_components", pairs.size, f"there are {pairs.size} points")
    if solver == "auto":
        if isinstance(pairs, FeaturePairs) and pairs.features.shape[1] <= pairs.size:
            solver = "features"
        elif pairs.size <= SMALL or (8 * k > pairs.size and pairs.size <= MOST_DENSE):
            solver = "cholesky"
        else:
            solver = "krylov"
    if solver == "krylov":
        solution = krylov(pairs, k, progress=progress, spare=spare)
    else:
        solution = _split(pairs, SOLVERS[solver](pairs, min(k + spare, pairs.size)), k)
    if solver == "krylov" and not solution.residual < allowed_residual(solution.precision) and pairs.size <= MOST_DENSE:
        solution = _split(pairs, cholesky(pairs, min(k + spare, pairs.size)), k)  # Krylov has stalled
    return _judged(pairs, solution, k, at_most)


def _split(pairs: AbstractPairs, whole: Solution, k: int) -> Solution:
    """The first k modes, and in `more` all that are above rounding error."""
    if len(whole.eigenvalues) == k:
        return whole
    usable = above_rounding(pairs, whole.eigenvalues)
    return replace(_first(pairs, whole, k), more=_first(pairs, whole, usable) if usable >= k else None)


def _judged(pairs: AbstractPairs, solution: Solution, k: int, at_most: bool) -> Solution:
    """Raise an error for modes that do not exist or are below rounding error."""
    gamma = solution.eigenvalues
    top = float(np.abs(gamma).max(initial=0.0))
    if top == 0 or not np.isfinite(gamma).all():
        raise InputError("kernel", "must not vanish on the data", None, "K̃ is zero or has entries that are not finite")
    usable = above_rounding(pairs, gamma)
    if usable == 0:
        raise InputError("views", "must have something in common: no mode of Γ is positive", f"γ_1 = {gamma[0]:.3g}")
    if usable < k and at_most:
        return _first(pairs, solution, usable)
    if usable < k:
        # float64 may resolve modes that float32 cannot
        single = pairs.eps > 1e-10
        remedy = f"lower n_components to {usable}" + (', or use dtype="float64"' if single else "")
        noise = f"γ_{usable + 1} / γ_1 is not above the rounding error {UNCERTAIN * pairs.eps:.0e}"
        rule = f"must be at most {usable}: {noise}"
        raise InputError("n_components", rule, k, remedy)
    if not solution.residual < allowed_residual(solution.precision):
        raise InputError(
            "K̃", f"could not be solved (residual {solution.residual:.1e})", None, 'use solver="cholesky", or float64'
        )
    return solution


def _first(pairs: AbstractPairs, solution: Solution, k: int) -> Solution:
    """The first k modes of a solution."""
    a = solution.coefficients[:, :k]
    return measured(pairs, solution.eigenvalues[:k], a, pairs.matmul(a), solution.products, solution.solver)


def cholesky(pairs: AbstractPairs, k: int) -> Solution:
    """Pivoted Cholesky K̃ = L Lᵀ, then the leading eigenvectors b of LᵀPL / N; a = P L b / N γ. Dense."""
    refuse_large(pairs.size)
    eye = np.eye(pairs.size)
    dense = pairs.matrix if isinstance(pairs, DensePairs) else pairs.matmul(like(eye, pairs.seed_like))
    factor = _factor(np.asarray(as_numpy(dense), dtype=np.float64), max(pairs.eps, np.finfo(float).eps))
    swapped = pairs.swap(factor)
    small = factor.T @ swapped
    rank = len(small)
    wanted = min(k, rank)
    values, vectors = scipy.linalg.eigh((small + small.T) / 2, subset_by_index=[rank - wanted, rank - 1])
    gamma = values[::-1] / pairs.size
    safe = np.where(gamma > 0, gamma, np.inf)
    gamma, a = padded(gamma, swapped @ vectors[:, ::-1] / (pairs.size * safe), k)
    a = like(a, pairs.seed_like)
    return measured(pairs, gamma, a, pairs.matmul(a), pairs.size, "cholesky")


def refuse_large(size: int) -> None:
    """Raise an error if a dense factorization would take too much memory."""
    if size > MOST_DENSE:
        need = 24 * size**2 / 2**30
        raise InputError("solver", f"cholesky takes {need:.0f} GiB for {size:,} points", None, 'use solver="krylov"')


def _factor(dense: np.ndarray, eps: float) -> np.ndarray:
    """L of K̃ = L Lᵀ, (N, rank); raises an error if K̃ is indefinite."""
    top = float(np.diag(dense).max(initial=0.0))
    if top <= 0:
        raise InputError("K̃", "must be positive semidefinite", f"largest diagonal entry {top:g}")
    noise = (4 * len(dense) * np.finfo(float).eps + 2 * eps) * top
    packed, pivots, rank, _ = scipy.linalg.lapack.dpstrf(dense, tol=noise, lower=1)
    lower = np.tril(packed)[:, :rank]
    factor = np.empty_like(lower)
    factor[pivots - 1] = lower
    missed = np.abs(np.diag(dense) - (factor**2).sum(1)).max()
    probe = np.random.default_rng(0).standard_normal((len(dense), 2))
    left = np.abs(dense @ probe - factor @ (factor.T @ probe)).max()
    if max(missed, left / len(dense) ** 0.5) > 100 * (noise + len(dense) ** 0.5 * eps * top):
        raise InputError(
            "K̃",
            "must be positive semidefinite",
            f"a Cholesky remainder of {left / top:.1e} of the diagonal",
            "the kernel is indefinite; clip its negative eigenvalues or choose another",
        )
    return factor


def features(pairs: AbstractPairs, k: int) -> Solution:
    """Γ = Φᵀ P Φ / N (m × m) of explicit features, diagonalized; a = P Φ g / N γ. K̃ is never formed."""
    if not isinstance(pairs, FeaturePairs):
        raise InputError("solver", 'features needs explicit features: kernel="linear"', type(pairs).__name__)
    phi = pairs._wide
    xp = namespace(phi)
    correlation = phi.T @ pairs.swap(phi) / pairs.size
    values, vectors = xp.linalg.eigh((correlation + correlation.T) / 2)
    wanted = min(k, len(values))
    gamma = as_numpy(values)[::-1][:wanted].copy()
    g = xp.flip(vectors, (1,))[:, :wanted] if xp is not np else vectors[:, ::-1][:, :wanted]
    safe = like(np.where(gamma > 0, gamma, np.inf) * pairs.size, phi)
    a = pairs.swap(phi @ g) / safe
    return measured(pairs, *padded_like(gamma, a, pairs.matmul(a), k), k, "features")


SOLVERS: dict[str, Callable[[AbstractPairs, int], Solution]] = {
    "krylov": krylov,
    "cholesky": cholesky,
    "features": features,
}
