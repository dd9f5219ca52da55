"""Block Krylov: the leading modes from products of K̃ with blocks of vectors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stairwise.checks import InputError, as_numpy
from stairwise.kernel.arrays import Matrix, like, namespace, on_gpu
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
AT_REST = 1e-4  # largest residual of modes whose γ does not change any more
STALLED = 12  # looks without a residual half as large, after which nothing is expected any more


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

    Where K̃ has rough products, they find the space of the modes, until γ rest. The errors of these products in
    directions where K̃ is small keep residuals from falling, so these do not count. Then the same iteration starts from
    that space with exact products. One is usually enough: errors of γ are the squares of residuals.
    """
    aim = _Aim.of(pairs, k, spare, tol)
    if not pairs.has_rough:
        found, products = _search(pairs, aim, pairs.matmul, passes, seed, progress)
        return _solution(pairs, aim, found, products)
    rough, products = _search(pairs, replace(aim, rough=True), pairs.rough, passes, seed, progress)
    start = _cleaned(pairs, rough)
    aim = replace(aim, first=start.shape[1], limit=np.maximum(aim.limit, AT_REST))
    found, products = _search(pairs, aim, pairs.matmul, passes, seed + 1, progress, start, products)
    return _solution(pairs, aim, found, products)


def _search(
    pairs: AbstractPairs,
    aim: "_Aim",
    times: Callable[[Matrix], Matrix],
    passes: int,
    seed: int,
    progress: Progress,
    start: Matrix | None = None,
    products: int = 0,
) -> tuple["_Ritz", int]:
    """Ritz pairs from products `times`, and their number; the first block is random without `start`."""
    fresh = _random_blocks(pairs, times, aim.block, seed)
    if start is None:
        start, products = fresh(), products + aim.block
    space = _Space.empty(pairs, start)
    new = space.outside(start)
    watch, found = _Watch(aim), _Ritz.nothing(space.basis)
    for _ in range(passes):
        progress(min(products / (EXPECTED * aim.k), 0.99), 1.0, f"{products} products with K̃")
        products += new.shape[1]
        following, due = space.grow(new, times(new)), watch.due(space.size)
        if not due:
            new = space.outside(following)
            if new.shape[1] > 0:
                continue
        found = space.ritz(aim, found.theta)
        if watch.finished(found, space.size):
            break
        if not found.done and space.size + 2 * aim.block > aim.most:
            watch.looked = space.restart(found, aim)
            new = space.outside(found.worst(aim.block))
        elif due:
            new = space.outside(following)
        if found.done or new.shape[1] == 0:
            products += aim.block
            more = fresh() if found.done else namespace(new).concatenate([found.worst(aim.block), fresh()], 1)
            new = space.outside(more)
            if new.shape[1] == 0:
                break
    return found, products


@dataclass(frozen=True, eq=False)
class _Aim:
    """What is looked for, and in steps of which size.

    Attributes:
        k: modes that must reach `tol`.
        tol: their residual.
        block: columns per step.
        pause: columns between two looks at Ritz pairs.
        limit: residual of each wanted mode, those beyond k are spare.
        most: columns of the basis before a restart.
        first: columns of the basis at which Ritz pairs are first computed.
        noise: rounding error of θ relative to the largest one, with a margin.
        rough: whether modes have converged when θ rests, whatever their residuals.
    """

    k: int
    tol: float
    block: int
    pause: int
    limit: np.ndarray
    most: int
    first: int
    noise: float
    rough: bool = False

    @classmethod
    def of(cls, pairs: AbstractPairs, k: int, spare: int, tol: float) -> "_Aim":
        block, looks = max(4, k // (2 if pairs.reads_much else 5)), 2
        if pairs.free_columns:  # few steps: they take longer than looking
            block, looks = max(block, min(pairs.free_columns, 16 * -(-k // 16))), 1
        block, wanted = min(pairs.size, block), min(pairs.size, k + spare)
        most = min(pairs.size, max(8 * k, 60, 6 * wanted, 8 * block))
        limit = np.where(np.arange(wanted) < k, tol, max(tol, LOOSE))
        first = min(max(4 * k, wanted), most)
        return cls(k, tol, block, looks * block, limit, most, first, UNCERTAIN * pairs.eps)


@dataclass(frozen=True, eq=False)
class _Ritz:
    """Ritz pairs, θ descending: a = basis y, its image K̃ a, P K̃ a − θ a, and errors that must fall below `allowed`."""

    theta: np.ndarray
    y: Matrix  # all of them, not only those that are wanted
    a: Matrix
    image: Matrix
    residual: Matrix
    errors: np.ndarray
    allowed: np.ndarray
    relative: np.ndarray  # errors over the limits that hold without rounding

    @classmethod
    def nothing(cls, basis: Matrix) -> "_Ritz":
        none = np.zeros(0)
        return cls(none, basis, basis, basis, basis, none, none, none)

    @property
    def done(self) -> bool:
        return bool((self.errors <= self.allowed).all())

    def worst(self, count: int) -> Matrix:
        """Residuals of the pairs that are furthest from converged."""
        return self.residual[:, _indices(np.argsort(-self.relative, kind="stable")[:count], self.residual)]


@dataclass(eq=False)
class _Watch:
    """When to look at Ritz pairs, and when to stop.

    Attributes:
        looked: columns of the basis at the last look.
        settled: θ of the last look, if all modes had converged.
        best, stalled: the smallest of the largest errors, and the number of looks since it was halved.
    """

    aim: _Aim
    looked: int = 0
    settled: np.ndarray | None = None
    best: float = np.inf
    stalled: int = 0

    def due(self, size: int) -> bool:
        pause = self.aim.pause if self.settled is None else CONFIRM * self.aim.block
        return size >= self.aim.first and size - self.looked >= pause

    def finished(self, found: _Ritz, size: int) -> bool:
        """Whether nothing is left to do: all modes are found, all directions used, or errors do not fall any more."""
        self.looked = size
        leading = found.theta[: self.aim.k]
        noise = self.aim.noise * np.abs(found.theta).max(initial=0.0)
        unchanged = (
            self.settled is not None
            and len(self.settled) == len(leading)
            and np.allclose(leading, self.settled, 1e-8, noise)
        )
        worst = float(found.relative.max())
        self.best, self.stalled = (worst, 0) if worst < self.best / 2 else (self.best, self.stalled + 1)
        self.settled = leading if found.done else None
        accepted = found.done and (unchanged or _copies(leading) < self.aim.block)
        return size >= len(found.a) or accepted or self.stalled > STALLED


@dataclass(eq=False)
class _Space:
    """A basis, orthonormal in the Euclidean sense, and what is known of P K̃ on it.

    Attributes:
        image: K̃ basis.
        h, metric: imageᵀ P image and basisᵀ image, the Gram matrices of Rayleigh–Ritz.
    """

    pairs: AbstractPairs
    basis: Matrix
    image: Matrix
    h: Matrix
    metric: Matrix

    @classmethod
    def empty(cls, pairs: AbstractPairs, block: Matrix) -> "_Space":
        none = block[:, :0]
        return cls(pairs, none, none, none[:0], none[:0])

    @property
    def size(self) -> int:
        """Columns of the basis."""
        return int(self.basis.shape[1])

    def outside(self, block: Matrix) -> Matrix:
        """An orthonormal basis of the part of `block` outside the space."""
        return _orthonormal_to(self.basis, block)

    def grow(self, new: Matrix, image: Matrix) -> Matrix:
        """Add an orthonormal block, image = K̃ new, and return P K̃ new, whose part outside is the next one."""
        swapped, join = self.pairs.swap(image), namespace(new).concatenate
        self.h = _bordered(self.h, self.image.T @ swapped, image.T @ swapped)
        self.metric = _bordered(self.metric, self.basis.T @ image, new.T @ image)
        self.basis, self.image = join([self.basis, new], 1), join([self.image, image], 1)
        return swapped

    def ritz(self, aim: _Aim, before: np.ndarray) -> _Ritz:
        """The wanted Ritz pairs and their errors, residuals relative to θ; `before`: θ of the last look.

        Rounding of K̃ is amplified in directions where K̃ is small, which the last step of the solver removes. So pairs
        whose θ rests may have a larger residual.
        """
        theta, y = _rayleigh_ritz(self.h, self.metric, self.pairs, self.image, aim.k)
        theta, here, xp = theta[: len(aim.limit)], y[:, : len(aim.limit)], namespace(y)
        a, image = self.basis @ here, self.image @ here
        residual = self.pairs.swap(image) - a * like(theta, a)
        norms = as_numpy(xp.sqrt((residual * residual).sum(0) / xp.clip((a * a).sum(0), 1e-300, None)))
        noise, limit = aim.noise * np.abs(theta).max(initial=0.0), aim.limit[: len(theta)]
        errors = np.where(theta > noise, norms / np.maximum(theta, 1e-300), 0.0)  # smaller γ are rejected later
        rounding = noise / np.maximum(theta, 1e-300)
        allowed = np.maximum(limit, 2 * rounding)
        if len(before) == len(theta):
            resting = np.abs(theta - before) <= noise / UNCERTAIN
            at_rest = np.maximum(allowed, np.minimum(60 * rounding, AT_REST))
            allowed = np.where(resting, np.inf, limit) if aim.rough else np.where(resting, at_rest, allowed)
        return _Ritz(theta, y, a, image, residual, errors, allowed, errors / limit)

    def restart(self, found: _Ritz, aim: _Aim) -> int:
        """Keep the span of the leading Ritz pairs only; returns their number."""
        kept, _ = namespace(found.y).linalg.qr(found.y[:, : max(2 * aim.k, len(aim.limit))])
        self.h, self.metric = kept.T @ self.h @ kept, kept.T @ self.metric @ kept
        self.basis, self.image = self.basis @ kept, self.image @ kept
        return self.size


def _solution(pairs: AbstractPairs, aim: _Aim, found: _Ritz, products: int) -> Solution:
    """The k modes and, if they have converged, those beyond in `more`."""
    theta, k, N = found.theta, aim.k, pairs.size
    clean = fix_signs(_cleaned(pairs, found))

    def with_errors(count: int) -> Solution:
        residual, precision = float(found.errors[:count].max()), precision_of(pairs, theta[:count])
        return Solution(theta[:count] / N, clean[:, :count], residual, products, "krylov", precision)

    usable = above_rounding(pairs, theta)
    complete = len(aim.limit) > k and usable >= k and (found.errors <= found.allowed)[:usable].all()
    more = with_errors(usable) if complete else None
    # after rough products only clean modes were multiplied, so their residuals need no other product
    if len(theta) >= k and (found.errors[:k] <= (found.allowed[:k] if pairs.has_rough else aim.tol)).all():
        return replace(with_errors(k), more=more)
    filled = padded_like(theta[:k] / N, clean[:, :k], pairs.matmul(clean[:, :k]), k)
    return replace(measured(pairs, *filled, products + k, "krylov"), more=more)


def _cleaned(pairs: AbstractPairs, found: _Ritz) -> Matrix:
    """One more step, a ← P K̃ a / Nγ, which costs nothing and removes the null space of K̃."""
    return pairs.swap(found.image) / like(np.where(found.theta > 0, found.theta, np.inf), found.image)


def _random_blocks(
    pairs: AbstractPairs, times: Callable[[Matrix], Matrix], columns: int, seed: int
) -> Callable[[], Matrix]:
    """A function that draws blocks in the range of P K̃, because its null space would stay in the basis forever."""
    shape, x = (pairs.size, columns), pairs.seed_like
    numbers: Callable[[], Matrix]
    if on_gpu(x):
        torch = namespace(x)
        generator = torch.Generator(x.device).manual_seed(seed)
        numbers = partial(torch.randn, shape, generator=generator, device=x.device, dtype=torch.float64)
    else:
        rng = np.random.default_rng(seed)
        numbers = lambda: like(rng.standard_normal(shape), x)  # noqa: E731

    def draw() -> Matrix:
        return pairs.swap(times(numbers()))

    return draw


def _copies(theta: np.ndarray) -> int:
    """Multiplicity of the most frequent value, up to 1e-6; θ descending."""
    ends = np.flatnonzero(-np.diff(theta) > 1e-6 * np.abs(theta[:-1]))
    return int(np.diff(np.concatenate([[-1], ends, [len(theta) - 1]])).max())


def _indices(order: np.ndarray, x: Matrix) -> Matrix:
    return like(np.sort(order), x)


def _bordered(corner: Matrix, side: Matrix, end: Matrix) -> Matrix:
    """A symmetric matrix with further rows and columns."""
    join = namespace(end).concatenate
    return join([join([corner, side], 1), join([side.T, end], 1)])


def _rayleigh_ritz(h: Matrix, metric: Matrix, pairs: AbstractPairs, image: Matrix, k: int) -> tuple[np.ndarray, Matrix]:
    """θ descending and y with h y = θ metric y, yᵀ metric y = 1, where the metric is above rounding error.

    Computed from h, the smallest value θ_k has a relative error of eps (θ_1/θ_k)². If that is too large, θ are computed
    as the eigenvalues of Lᵀ P L with L = K̃ Q metric^{-1/2}, K̃ ≈ L Lᵀ, which has a relative error of eps θ_1/θ_k.
    """
    sizes, vectors = _eigh(metric)
    if not np.any(sizes):
        raise InputError("kernel", "must not vanish on the data", None, "all entries of K̃ are zero")
    if sizes[0] < -1e3 * len(sizes) * max(pairs.eps, 1e-15) * sizes[-1]:
        raise InputError(
            "K̃",
            "must be positive semidefinite",
            f"an eigenvalue of about {sizes[0]:.2e}, the largest is {sizes[-1]:.2e}",
            "the kernel is indefinite; clip its negative eigenvalues or choose another",
        )
    keep = np.flatnonzero(sizes > 10 * len(sizes) * np.finfo(float).eps * sizes[-1])
    white = vectors[:, _indices(keep, vectors)] / like(np.sqrt(sizes[keep]), vectors)
    theta, z = _eigh(white.T @ h @ white)
    if theta[-min(k, len(theta))] < 1e-3 * theta[-1]:
        factor = image @ white
        theta, z = _eigh(factor.T @ pairs.swap(factor))
    return theta[::-1], white @ (z[:, ::-1] if namespace(z) is np else z.flip(1))


def _eigh(matrix: Matrix) -> tuple[np.ndarray, Matrix]:
    """Eigenvalues, ascending, and eigenvectors of the symmetric part, on the device of the matrix."""
    values, vectors = namespace(matrix).linalg.eigh((matrix + matrix.T) / 2)
    return as_numpy(values), vectors


def _orthonormal_to(basis: Matrix, block: Matrix) -> Matrix:
    """An orthonormal basis of the part of `block` outside `basis`."""
    block = _normalized(block)
    block = block - basis @ (basis.T @ block)
    block, strength = _orthonormal(block)
    if (strength <= 1e-12).any():  # rounding error of directions already in the basis
        block = block[:, _indices(np.flatnonzero(strength > 1e-12), basis)]
    if strength.min(initial=1.0) < 0.1:  # large cancellation, so orthogonalize again
        block, _ = _orthonormal(block - basis @ (basis.T @ block))
    return block[:, : basis.shape[0] - basis.shape[1]]


def _orthonormal(block: Matrix) -> tuple[Matrix, np.ndarray]:
    """Q and |diag R| of block = Q R."""
    xp = namespace(block)
    if on_gpu(block):
        found = _cholesky_qr(block)
        if found is not None:
            return found
    q, r = xp.linalg.qr(block)
    return q, as_numpy(abs(xp.diagonal(r)))


def _cholesky_qr(block: Matrix) -> tuple[Matrix, np.ndarray] | None:
    """Q and diag R from two Cholesky factorizations of Gram matrices; None if the columns are too dependent for it.

    On a GPU products are fast, and Householder's reflections of few long columns are not.
    """
    torch, strength = namespace(block), np.ones(block.shape[1])
    factor = eye = torch.eye(block.shape[1], dtype=block.dtype, device=block.device)
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(block.T @ block, upper=True)
        if bool(failed):
            return None
        block = block @ torch.linalg.solve_triangular(factor, eye, upper=True)
        strength = strength * as_numpy(factor.diagonal())
    return (block, strength) if bool((abs(factor - eye) < 1e-3).all()) else None


def _normalized(block: Matrix) -> Matrix:
    xp = namespace(block)
    return block / xp.clip(xp.sqrt((block * block).sum(0)), 1e-300, None)
