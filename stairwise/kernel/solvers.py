"""The leading modes of P K̃: γ and a with P K̃ a = N γ a and aᵀ K̃ a = 1.

The paper's K_Γ = K̃^{-1/2} Z K̃^{-1/2} has the same eigenvalues, but no inverse or root is needed: Z = K̃ P K̃ / N,
so K_Γ = K̃^{1/2} P K̃^{1/2} / N, and g_j = Σ_i a_ij φ(x_i) is the eigenvector of Γ in feature space.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from stairwise.checks import InputError, as_numpy, one_of, positive_int
from stairwise.kernel.arrays import Matrix, like, namespace
from stairwise.kernel.operators import AbstractPairs, DensePairs, FeaturePairs
from stairwise.progress import Progress, silent

SMALL = 600  # points below which a dense factorization is fastest
MOST_DENSE = 12_000  # points above which a dense factorization is refused
CONFIRM = 4  # number of steps with an extra random block before the modes are accepted
EXPECTED = 7  # products per mode, for the progress
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
        """Whether all modes are above rounding error and the residual is at that level."""
        return self.precision < 1e-2 and self.residual < _allowed(self.precision)


def solve(
    pairs: AbstractPairs, k: int, solver: str = "auto", at_most: bool = False, progress: Progress = silent
) -> Solution:
    """The k leading modes; with `at_most`, fewer if fewer exist.

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
    solution = krylov(pairs, k, progress=progress) if solver == "krylov" else SOLVERS[solver](pairs, k)
    if solver == "krylov" and not solution.residual < _allowed(solution.precision) and pairs.size <= MOST_DENSE:
        solution = cholesky(pairs, k)  # Krylov has stalled
    return _judged(pairs, solution, k, at_most)


def _allowed(precision: float) -> float:
    """The largest residual that rounding of K̃ can explain."""
    return max(1e-6, 1e3 * precision)


def _judged(pairs: AbstractPairs, solution: Solution, k: int, at_most: bool) -> Solution:
    """Raise an error for modes that do not exist or are below rounding error."""
    gamma = solution.eigenvalues
    top = float(np.abs(gamma).max(initial=0.0))
    if top == 0 or not np.isfinite(gamma).all():
        raise InputError("kernel", "must not vanish on the data", None, "K̃ is zero or has entries that are not finite")
    floor = UNCERTAIN * pairs.eps * top
    usable = int((gamma > floor).sum())
    if usable < k and at_most and usable:
        return _first(pairs, solution, usable)
    if usable < k:
        # float64 may resolve modes that float32 cannot
        single = pairs.eps > 1e-10
        remedy = f"lower n_components to {usable}" + (', or use dtype="float64"' if single else "")
        noise = f"γ_{usable + 1} / γ_1 is not above the rounding error {UNCERTAIN * pairs.eps:.0e}"
        rule = f"must be at most {usable}: {noise}"
        raise InputError("n_components", rule, k, remedy)
    if not solution.residual < _allowed(solution.precision):
        raise InputError(
            "K̃", f"could not be solved (residual {solution.residual:.1e})", None, 'use solver="cholesky", or float64'
        )
    return solution


def _first(pairs: AbstractPairs, solution: Solution, k: int) -> Solution:
    """The first k modes of a solution."""
    a = solution.coefficients[:, :k]
    return _solution(pairs, solution.eigenvalues[:k], a, pairs.matmul(a), solution.products, solution.solver)


def _solution(
    pairs: AbstractPairs, gamma: np.ndarray, a: Matrix, image: Matrix, products: int, solver: str
) -> Solution:
    """A `Solution` of these modes with its residual; image = K̃ a."""
    xp = namespace(a)
    tiny = np.finfo(float).tiny
    theta = like(np.maximum(gamma * pairs.size, tiny), a)
    off = xp.sqrt(((pairs.swap(image) - a * theta) ** 2).sum(0)) / theta / xp.clip(xp.sqrt((a * a).sum(0)), tiny, None)
    positive = gamma > 0
    residual = float(as_numpy(off)[positive].max(initial=0.0)) if positive.any() else np.inf
    return Solution(gamma, _fix_signs(a), residual, products, solver, _precision(pairs, gamma))


def _precision(pairs: AbstractPairs, gamma: np.ndarray) -> float:
    tiny = np.finfo(float).tiny
    return float(pairs.eps * np.abs(gamma).max(initial=tiny) / max(np.abs(gamma).min(initial=np.inf), tiny))


def _fix_signs(a: Matrix) -> Matrix:
    """Make the largest coefficient of each mode positive, so that results do not depend on the solver."""
    values = as_numpy(a)
    largest = values[np.abs(values).argmax(axis=0), np.arange(values.shape[1])]
    return a * like(np.where(largest < 0, -1.0, 1.0), a)


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
    gamma, a = _padded(gamma, swapped @ vectors[:, ::-1] / (pairs.size * safe), k)
    a = like(a, pairs.seed_like)
    return _solution(pairs, gamma, a, pairs.matmul(a), pairs.size, "cholesky")


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
    return _solution(pairs, *_padded_like(gamma, a, pairs.matmul(a), k), k, "features")


def _padded(gamma: np.ndarray, a: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad with zeros for modes beyond the rank; `_judged` rejects them later."""
    more = k - len(gamma)
    return np.append(gamma, np.zeros(more)), np.hstack([a, np.zeros((len(a), more))])


def krylov(
    pairs: AbstractPairs, k: int, tol: float = 1e-7, passes: int = 600, seed: int = 0, progress: Progress = silent
) -> Solution:
    """Block Krylov with thick restart; only products of K̃ with blocks.

    P K̃ is self-adjoint in the inner product of K̃, so Rayleigh–Ritz uses that inner product. The basis is orthonormal in
    the Euclidean one, because a K̃-orthonormal basis is unstable for singular K̃. At a restart, and if the Krylov space
    is exhausted, the next block consists of residuals of Ritz pairs, which by Galerkin's condition are K̃-orthogonal to
    the old basis. It has converged when each residual is below `tol` relative to its γ (the error of γ is the square)
    or at the precision of K̃. A block finds at most as many copies of a multiple eigenvalue as it has columns. If it
    found that many, a random block is added for a few steps, and the modes are accepted only if they do not change.
    """
    N, xp = pairs.size, namespace(pairs.seed_like)
    block = min(N, max(4, k // (2 if pairs.reads_much else 5)))
    most, look_every = min(N, max(8 * k, 60)), 2 * block
    rng = np.random.default_rng(seed)

    def fresh() -> Matrix:
        """A random block in the range of P K̃, because its null space would stay in the basis forever."""
        return pairs.swap(pairs.matmul(like(rng.standard_normal((N, block)), pairs.seed_like)))

    new = fresh()
    basis = image = new[:, :0]
    new = _orthonormal_to(basis, new)
    h = metric = np.zeros((0, 0))
    products, looked, best, stalled = block, 0, np.inf, 0
    settled: np.ndarray | None = None
    theta, a, a_image, errors = np.zeros(0), basis, basis, np.zeros(0)
    for _ in range(passes):
        progress(min(products / (EXPECTED * k), 0.99), 1.0, f"{products} products with K̃")
        new_image = pairs.matmul(new)
        products += new.shape[1]
        h, metric = _grown(h, metric, pairs, (basis, image), (new, new_image))
        basis, image = xp.concatenate([basis, new], 1), xp.concatenate([image, new_image], 1)
        size, new = basis.shape[1], _orthonormal_to(basis, pairs.swap(new_image))
        ended = new.shape[1] == 0
        pause = look_every if settled is None else CONFIRM * block
        if not ended and (size < min(4 * k, most) or size - looked < pause):
            continue
        theta, y = _rayleigh_ritz(h, metric, pairs, image, k)
        here, looked = like(y[:, :k], basis), size
        a, a_image = basis @ here, image @ here
        residual = pairs.swap(a_image) - a * like(theta[:k], basis)
        norms = as_numpy(xp.sqrt((residual * residual).sum(0) / xp.clip((a * a).sum(0), 1e-300, None)))
        noise = UNCERTAIN * pairs.eps * np.abs(theta).max(initial=0.0)
        errors = np.where(theta[:k] > noise, norms / np.maximum(theta[:k], 1e-300), 0.0)  # smaller γ are rejected later
        done = bool((errors <= np.maximum(tol, 2 * noise / np.maximum(theta[:k], 1e-300))).all())
        unchanged = (
            settled is not None and len(settled) == len(theta[:k]) and np.allclose(theta[:k], settled, 1e-8, noise)
        )
        best, stalled = (errors.max(), 0) if errors.max() < best / 2 else (best, stalled + 1)
        if size >= N or (done and (unchanged or _copies(theta[:k]) < block)) or stalled > 12:
            break
        settled = theta[:k] if done else None
        worst = residual[:, _indices(np.argsort(-errors, kind="stable")[:block], basis)]
        if not done and size + 2 * block > most:
            kept, _ = np.linalg.qr(y[:, : 2 * k])
            h, metric, looked = kept.T @ h @ kept, kept.T @ metric @ kept, kept.shape[1]
            basis, image = basis @ like(kept, basis), image @ like(kept, basis)
            new = _orthonormal_to(basis, worst)
        if done or ended or new.shape[1] == 0:
            products += block
            new = _orthonormal_to(basis, fresh() if done else xp.concatenate([worst, fresh()], 1))
            if new.shape[1] == 0:
                break
    theta = theta[:k]
    # one more step, a ← P K̃ a / Nγ, costs nothing and removes the null space of K̃
    clean = pairs.swap(a_image) / like(np.where(theta > 0, theta, np.inf), basis)
    if len(theta) == k and (errors <= tol).all():
        return Solution(theta / N, _fix_signs(clean), float(errors.max()), products, "krylov", _precision(pairs, theta))
    return _solution(pairs, *_padded_like(theta / N, clean, pairs.matmul(clean), k), products + k, "krylov")


def _copies(theta: np.ndarray) -> int:
    """Multiplicity of the most frequent value, up to 1e-6; θ descending."""
    ends = np.flatnonzero(-np.diff(theta) > 1e-6 * np.abs(theta[:-1]))
    return int(np.diff(np.concatenate([[-1], ends, [len(theta) - 1]])).max())


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
    """Both Gram matrices, extended by the rows and columns of the new block."""
    swapped = pairs.swap(new[1])
    cross = as_numpy(old[1].T @ swapped), as_numpy(old[0].T @ new[1])
    corner = as_numpy(new[1].T @ swapped), as_numpy(new[0].T @ new[1])
    grown = (np.block([[m, c], [c.T, e]]) for m, c, e in zip((h, metric), cross, corner, strict=True))
    return next(grown), next(grown)


def _rayleigh_ritz(
    h: np.ndarray, metric: np.ndarray, pairs: AbstractPairs, image: Matrix, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """θ descending and y with h y = θ metric y, yᵀ metric y = 1, where the metric is above rounding error.

    Computed from h, the smallest value θ_k has a relative error of eps (θ_1/θ_k)². If that is too large, θ are computed
    as the eigenvalues of Lᵀ P L with L = K̃ Q metric^{-1/2}, K̃ ≈ L Lᵀ, which has a relative error of eps θ_1/θ_k.
    """
    if not np.any(metric):
        raise InputError("kernel", "must not vanish on the data", None, "all entries of K̃ are zero")
    size, vectors = np.linalg.eigh((metric + metric.T) / 2)
    if size[0] < -1e3 * len(size) * max(pairs.eps, 1e-15) * size[-1]:
        raise InputError(
            "K̃",
            "must be positive semidefinite",
            f"an eigenvalue of about {size[0]:.2e}, the largest is {size[-1]:.2e}",
            "the kernel is indefinite; clip its negative eigenvalues or choose another",
        )
    keep = size > 10 * len(size) * np.finfo(float).eps * size[-1]
    white = vectors[:, keep] / np.sqrt(size[keep])
    small = white.T @ h @ white
    theta, z = np.linalg.eigh((small + small.T) / 2)
    if theta[-min(k, len(theta))] < 1e-3 * theta[-1]:
        factor = image @ like(white, image)
        small = as_numpy(factor.T @ pairs.swap(factor))
        theta, z = np.linalg.eigh((small + small.T) / 2)
    return theta[::-1], white @ z[:, ::-1]


def _orthonormal_to(basis: Matrix, block: Matrix) -> Matrix:
    """An orthonormal basis of the part of `block` outside `basis`."""
    xp = namespace(basis)
    block = _normalized(block)
    block = block - basis @ (basis.T @ block)
    block, r = xp.linalg.qr(block)
    strength = as_numpy(abs(xp.diagonal(r)))
    if (strength <= 1e-12).any():  # rounding error of directions already in the basis
        block = block[:, _indices(np.flatnonzero(strength > 1e-12), basis)]
    if strength.min(initial=1.0) < 0.1:  # large cancellation, so orthogonalize again
        block, _ = xp.linalg.qr(block - basis @ (basis.T @ block))
    return block[:, : basis.shape[0] - basis.shape[1]]


def _normalized(block: Matrix) -> Matrix:
    xp = namespace(block)
    return block / xp.clip(xp.sqrt((block * block).sum(0)), 1e-300, None)


SOLVERS: dict[str, Callable[[AbstractPairs, int], Solution]] = {
    "krylov": krylov,
    "cholesky": cholesky,
    "features": features,
}
