"""Block Krylov: the leading modes from products of K̃ with blocks of vectors."""

from dataclasses import replace

import numpy as np

from stairwise.checks import InputError, as_numpy
from stairwise.kernel.arrays import Matrix, like, namespace
from stairwise.kernel.operators import AbstractPairs
from stairwise.kernel.solution import (
    UNCERTAIN,
    Solution,
    above_rounding,
    fix_signs,
    measured,
    padded_like,
    precision_of,
)
from stairwise.progress import Progress, silent

CONFIRM = 4  # number of steps with an extra random block before the modes are accepted
EXPECTED = 7  # products per mode, for the progress
LOOSE = 1e-3  # residual allowed for spare modes; the error of γ is its square


def krylov(
    pairs: AbstractPairs,
    k: int,
    tol: float = 1e-7,
    passes: int = 600,
    seed: int = 0,
    progress: Progress = silent,
    spare: int = 0,
) -> Solution:
    """Block Krylov with thick restart; only products of K̃ with blocks.

    P K̃ is self-adjoint in the inner product of K̃, so Rayleigh–Ritz uses that inner product. The basis is orthonormal in
    the Euclidean one, because a K̃-orthonormal basis is unstable for singular K̃. At a restart, and if the Krylov space
    is exhausted, the next block consists of residuals of Ritz pairs, which by Galerkin's condition are K̃-orthogonal to
    the old basis. It has converged when each residual is below `tol` relative to its γ (the error of γ is the square)
    or at the precision of K̃. A block finds at most as many copies of a multiple eigenvalue as it has columns. If it
    found that many, a random block is added for a few steps, and the k modes are accepted only if they do not change.
    With `spare`, so many more modes must reach LOOSE; they are in `more`, which may lack copies of them.
    """
    N, xp = pairs.size, namespace(pairs.seed_like)
    block = min(N, max(4, k // (2 if pairs.reads_much else 5)))
    wanted = min(N, k + spare)
    most, look_every = min(N, max(8 * k, 60, 6 * wanted)), 2 * block
    tolerance = np.where(np.arange(wanted) < k, tol, max(tol, LOOSE))
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
    theta, a, a_image, errors, allowed = np.zeros(0), basis, basis, np.zeros(0), np.zeros(0)
    for _ in range(passes):
        progress(min(products / (EXPECTED * k), 0.99), 1.0, f"{products} products with K̃")
        new_image = pairs.matmul(new)
        products += new.shape[1]
        h, metric = _grown(h, metric, pairs, (basis, image), (new, new_image))
        basis, image = xp.concatenate([basis, new], 1), xp.concatenate([image, new_image], 1)
        size, new = basis.shape[1], _orthonormal_to(basis, pairs.swap(new_image))
        ended = new.shape[1] == 0
        pause = look_every if settled is None else CONFIRM * block
        if not ended and (size < min(max(4 * k, wanted), most) or size - looked < pause):
            continue
        theta, y = _rayleigh_ritz(h, metric, pairs, image, k)
        theta, here, looked = theta[:wanted], like(y[:, :wanted], basis), size
        a, a_image = basis @ here, image @ here
        residual = pairs.swap(a_image) - a * like(theta, basis)
        norms = as_numpy(xp.sqrt((residual * residual).sum(0) / xp.clip((a * a).sum(0), 1e-300, None)))
        noise = UNCERTAIN * pairs.eps * np.abs(theta).max(initial=0.0)
        errors = np.where(theta > noise, norms / np.maximum(theta, 1e-300), 0.0)  # smaller γ are rejected later
        limit = tolerance[: len(theta)]
        allowed = np.maximum(limit, 2 * noise / np.maximum(theta, 1e-300))
        done, worst_error = bool((errors <= allowed).all()), float((errors / limit).max())
        unchanged = (
            settled is not None and len(settled) == len(theta[:k]) and np.allclose(theta[:k], settled, 1e-8, noise)
        )
        best, stalled = (worst_error, 0) if worst_error < best / 2 else (best, stalled + 1)
        if size >= N or (done and (unchanged or _copies(theta[:k]) < block)) or stalled > 12:
            break
        settled = theta[:k] if done else None
        worst = residual[:, _indices(np.argsort(-errors / limit, kind="stable")[:block], basis)]
        if not done and size + 2 * block > most:
            kept, _ = np.linalg.qr(y[:, : max(2 * k, wanted)])
            h, metric, looked = kept.T @ h @ kept, kept.T @ metric @ kept, kept.shape[1]
            basis, image = basis @ like(kept, basis), image @ like(kept, basis)
            new = _orthonormal_to(basis, worst)
        if done or ended or new.shape[1] == 0:
            products += block
            new = _orthonormal_to(basis, fresh() if done else xp.concatenate([worst, fresh()], 1))
            if new.shape[1] == 0:
                break
    # one more step, a ← P K̃ a / Nγ, costs nothing and removes the null space of K̃
    clean = fix_signs(pairs.swap(a_image) / like(np.where(theta > 0, theta, np.inf), basis))

    def with_errors(count: int) -> Solution:
        residual, precision = float(errors[:count].max()), precision_of(pairs, theta[:count])
        return Solution(theta[:count] / N, clean[:, :count], residual, products, "krylov", precision)

    usable = above_rounding(pairs, theta)
    more = with_errors(usable) if spare and usable >= k and (errors <= allowed)[:usable].all() else None
    if len(theta) >= k and (errors[:k] <= tol).all():
        return replace(with_errors(k), more=more)
    filled = padded_like(theta[:k] / N, clean[:, :k], pairs.matmul(clean[:, :k]), k)
    return replace(measured(pairs, *filled, products + k, "krylov"), more=more)


def _copies(theta: np.ndarray) -> int:
    """Multiplicity of the most frequent value, up to 1e-6; θ descending."""
    ends = np.flatnonzero(-np.diff(theta) > 1e-6 * np.abs(theta[:-1]))
    return int(np.diff(np.concatenate([[-1], ends, [len(theta) - 1]])).max())


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
