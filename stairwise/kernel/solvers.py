"""The leading modes of P K̃: γ and a with P K̃ a = N γ a and aᵀ K̃ a = 1.

The paper's K_Γ = K̃^{-1/2} Z K̃^{-1/2} has the same eigenvalues, but neither inverse nor root is needed: Z = K̃ P K̃ / N,
so K_Γ = K̃^{1/2} P K̃^{1/2} / N, and g_j = Σ_i a_ij φ(x_i) is the eigenvector of Γ in feature space.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from stairwise.checks import InputError, one_of, positive_int
from stairwise.kernel.arrays import Matrix, as_numpy, like, namespace
from stairwise.kernel.operators import AbstractPairs, DensePairs, FeaturePairs

__all__ = ["SOLVERS", "Solution", "cholesky", "features", "krylov", "solve"]

SMALL = 600  # points below which a dense factorization is fastest
MOST_DENSE = 12_000  # points above which one should not be tried
UNCERTAIN = 50  # γ_j below this many units of rounding error of γ_1 is noise


@dataclass(frozen=True, eq=False)
class Solution:
    """Leading modes and how far to trust them.

    Attributes:
        eigenvalues: γ_j, descending, (k,), numpy float64.
        coefficients: a_j in columns, (N, k).
        residual: max_j ‖P K̃ a_j − N γ_j a_j‖ / (N γ_1 ‖a_j‖).
        products: how many columns K̃ was multiplied with.
        solver: which road was taken.
        precision: expected relative error of the smallest γ, from the precision of K̃.
    """

    eigenvalues: np.ndarray
    coefficients: Matrix
    residual: float
    products: int
    solver: str
    precision: float

    @property
    def trusted(self) -> bool:
        """Whether all modes stand out of the rounding error and the equations are solved."""
        return self.precision < 1e-2 and self.residual < 1e-5


def solve(pairs: AbstractPairs, k: int, solver: str = "auto") -> Solution:
    """The k leading modes.

    `auto`: "features" for explicit features fewer than points; "cholesky" up to 600 points, or when more than an eighth
    of all modes are wanted and there are at most 12,000 points; "krylov" otherwise.

    Raises:
        InputError: fewer than k modes are positive, or some drown in the rounding error of K̃.

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
    return _judged(pairs, SOLVERS[solver](pairs, k), k)


def _judged(pairs: AbstractPairs, found: Solution, k: int) -> Solution:
    """Refuse modes that are not there or not known."""
    gamma = found.eigenvalues
    top = float(np.abs(gamma).max(initial=0.0))
    if top == 0 or not np.isfinite(gamma).all():
        raise InputError("kernel", "must not vanish on the data", None, "all entries of K̃ are zero or not finite")
    floor = UNCERTAIN * pairs.eps * top
    usable = int((gamma > floor).sum())
    if usable < k:
        # float32 may hide modes that float64 would show
        single = pairs.eps > 1e-10
        remedy = f"lower n_components to {usable}" + (', or use dtype="float64"' if single else "")
        noise = f"γ_{usable + 1} / γ_1 is not above the rounding error {UNCERTAIN * pairs.eps:.0e}"
        rule = f"must be at most {usable}: {noise}"
        raise InputError("n_components", rule, k, remedy)
    if found.residual > 1e-5:
        raise InputError(
            "K̃", f"could not be solved (residual {found.residual:.1e})", None, 'use solver="cholesky", or float64'
        )
    return found


def _solution(
    pairs: AbstractPairs, gamma: np.ndarray, a: Matrix, image: Matrix, products: int, solver: str
) -> Solution:
    """Package modes with their residual; image = K̃ a."""
    xp = namespace(a)
    scale = like(gamma * pairs.size, a)
    off = pairs.swap(image) - a * scale
    size = xp.sqrt((a * a).sum(0))
    top = max(float(np.abs(gamma).max(initial=0.0)), np.finfo(float).tiny) * pairs.size
    residual = float((xp.sqrt((off * off).sum(0)) / xp.clip(size, 1e-300, None)).max()) / top
    smallest = float(np.abs(gamma).min(initial=top))
    precision = pairs.eps * top / pairs.size / max(smallest, np.finfo(float).tiny)
    return Solution(gamma, a, residual, products, solver, precision)


def cholesky(pairs: AbstractPairs, k: int) -> Solution:
    """Pivoted Cholesky K̃ = L Lᵀ, then the leading eigenvectors b of LᵀPL / N; a = P L b / N γ. Dense."""
    if pairs.size > MOST_DENSE:
        need = 24 * pairs.size**2 / 2**30
        raise InputError(
            "solver", f"cholesky takes {need:.0f} GiB for {pairs.size:,} points", None, 'use solver="krylov"'
        )
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
    gamma, a = _padded(gamma, swapped @ vectors[:, ::-1] / (pairs.size * safe), k)
    image = factor @ (factor.T @ a)
    return _solution(pairs, gamma, like(a, pairs.seed_like), like(image, pairs.seed_like), pairs.size, "cholesky")


def _factor(dense: np.ndarray, eps: float) -> np.ndarray:
    """L of K̃ = L Lᵀ, (N, rank); refuses an indefinite K̃."""
    top = float(np.diag(dense).max(initial=0.0))
    if top <= 0:
        raise InputError("K̃", "must be positive semidefinite", f"largest diagonal entry {top:g}")
    packed, pivots, rank, _ = scipy.linalg.lapack.dpstrf(dense, tol=4 * len(dense) * eps * top, lower=1)
    lower = np.tril(packed)[:, :rank]
    factor = np.empty_like(lower)
    factor[pivots - 1] = lower
    missed = np.abs(np.diag(dense) - (factor**2).sum(1)).max()
    probe = np.random.default_rng(0).standard_normal((len(dense), 2))
    left = np.abs(dense @ probe - factor @ (factor.T @ probe)).max()
    if max(missed, left / len(dense) ** 0.5) > 1e3 * len(dense) * eps * top:
        raise InputError(
            "K̃",
            "must be positive semidefinite",
            f"what Cholesky leaves over is {left / top:.1e} of the diagonal",
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
    return _solution(pairs, *_padded_like(gamma, a, pairs.matmul(a), k), k, "features")


def _padded(gamma: np.ndarray, a: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Zeros for modes beyond the rank; they are refused later."""
    more = k - len(gamma)
    return np.append(gamma, np.zeros(more)), np.hstack([a, np.zeros((len(a), more))])


def krylov(pairs: AbstractPairs, k: int, tol: float = 1e-11, passes: int = 1000, seed: int = 0) -> Solution:
    """Block Krylov with thick restart; only products of K̃ with blocks.

    P K̃ is self-adjoint in the inner product of K̃, so Rayleigh–Ritz is done in it, on a basis that is orthonormal in the
    Euclidean one: a K̃-orthonormal basis would fall apart where K̃ is singular. At a restart the next block is made of
    the residuals of Ritz pairs, which by Galerkin's condition are K̃-orthogonal to the whole old basis. Stops when
    the residuals are below `tol` of γ_1, or when they have stopped falling (at the precision of K̃).
    """
    N, xp = pairs.size, namespace(pairs.seed_like)
    block = min(N, max(4, k // 4))
    most, look_every = min(N, max(8 * k, 60)), 2 * block
    # start in the range of P K̃: what K̃ does not see would never leave the basis again
    start = pairs.swap(pairs.matmul(like(np.random.default_rng(seed).standard_normal((N, block)), pairs.seed_like)))
    new = _orthonormal_to(start[:, :0], start)
    basis = image = new[:, :0]
    h = metric = np.zeros((0, 0))
    products, looked, best, stalled = block, 0, np.inf, 0
    for _ in range(passes):
        new_image = pairs.matmul(new)
        products += new.shape[1]
        h, metric = _grown(h, metric, pairs, (basis, image), (new, new_image))
        basis, image = xp.concatenate([basis, new], 1), xp.concatenate([image, new_image], 1)
        size, new = basis.shape[1], _orthonormal_to(basis, pairs.swap(new_image))
        exhausted = new.shape[1] == 0
        if not exhausted and (size < min(4 * k, most) or size - looked < look_every):
            continue
        theta, y = _rayleigh_ritz(h, metric, pairs.eps)
        here = like(y[:, :k], basis)
        a, a_image = basis @ here, image @ here
        residual = pairs.swap(a_image) - a * like(theta[:k], basis)
        errors = as_numpy(xp.sqrt((residual * residual).sum(0) / xp.clip((a * a).sum(0), 1e-300, None)))
        worst = errors.max(initial=0.0) / max(abs(theta[0]), np.finfo(float).tiny) if len(theta) >= k else np.inf
        looked, stalled, best = size, (stalled + 1 if worst > best / 2 else 0), min(best, worst)
        if exhausted or worst <= tol or (stalled >= 3 and worst <= max(1e-9, 10 * pairs.eps)) or stalled >= 30:
            break
        if size + block > most:
            kept, _ = np.linalg.qr(y[:, : 2 * k])
            h, metric, looked = kept.T @ h @ kept, kept.T @ metric @ kept, kept.shape[1]
            basis, image = basis @ like(kept, basis), image @ like(kept, basis)
            new = _orthonormal_to(basis, residual[:, _indices(np.argsort(-errors, kind="stable")[:block], basis)])
            if new.shape[1] == 0:
                break
    if worst > tol and theta[: a.shape[1]].min() > 0:  # one more step, a ← P K̃ a / Nγ, removes what K̃ does not see
        a = pairs.swap(a_image) / like(theta[: a.shape[1]], basis)
        a_image, products = pairs.matmul(a), products + a.shape[1]
    return _solution(pairs, *_padded_like(theta[:k] / N, a, a_image, k), products, "krylov")


def _padded_like(gamma: np.ndarray, a: Matrix, image: Matrix, k: int) -> tuple[np.ndarray, Matrix, Matrix]:
    if len(gamma) == k:
        return gamma, a, image
    wide, columns = _padded(gamma, as_numpy(a), k)
    return wide, like(columns, a), like(_padded(gamma, as_numpy(image), k)[1], a)


def _indices(order: np.ndarray, x: Matrix) -> Matrix:
    return like(np.sort(order), x)


def _grown(
    h: np.ndarray, metric: np.ndarray, pairs: AbstractPairs, old: tuple[Matrix, Matrix], new: tuple[Matrix, Matrix]
) -> tuple[np.ndarray, np.ndarray]:
    """Both Gram matrices with the rows and columns of the new block."""
    swapped = pairs.swap(new[1])
    cross = as_numpy(old[1].T @ swapped), as_numpy(old[0].T @ new[1])
    corner = as_numpy(new[1].T @ swapped), as_numpy(new[0].T @ new[1])
    grown = (np.block([[m, c], [c.T, e]]) for m, c, e in zip((h, metric), cross, corner, strict=True))
    return next(grown), next(grown)


def _rayleigh_ritz(h: np.ndarray, metric: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """θ descending and y with h y = θ metric y, yᵀ metric y = 1, on the part where the metric is not negligible."""
    h, metric = (h + h.T) / 2, (metric + metric.T) / 2
    size, vectors = np.linalg.eigh(metric)
    if size[0] < -1e3 * len(size) * max(eps, 1e-15) * size[-1]:
        raise InputError(
            "K̃",
            "must be positive semidefinite",
            f"an eigenvalue of about {size[0]:.2e} beside {size[-1]:.2e}",
            "the kernel is indefinite; clip its negative eigenvalues or choose another",
        )
    keep = size > 10 * len(size) * np.finfo(float).eps * size[-1]
    white = vectors[:, keep] / np.sqrt(size[keep])
    theta, z = np.linalg.eigh(white.T @ h @ white)
    return theta[::-1], white @ z[:, ::-1]


def _orthonormal_to(basis: Matrix, block: Matrix) -> Matrix:
    """An orthonormal basis of what `block` adds to `basis`."""
    xp = namespace(basis)
    size = xp.sqrt((block * block).sum(0))
    block = block / xp.clip(size, 1e-300, None)
    for _ in range(2):  # twice is enough
        block = block - basis @ (basis.T @ block)
        block, r = xp.linalg.qr(block)
        strength = as_numpy(abs(xp.diagonal(r)))
        block = block[:, _indices(np.flatnonzero(strength > 1e-10), basis)] if (strength <= 1e-10).any() else block
    return block


SOLVERS: dict[str, Callable[[AbstractPairs, int], Solution]] = {
    "krylov": krylov,
    "cholesky": cholesky,
    "features": features,
}
