"""Γ, the cross-correlation of two views. The linear theory needs nothing else from the data."""

from collections.abc import Iterator
from functools import cached_property
from typing import Self

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import (
    LARGEST,
    InputError,
    in_blocks,
    instance,
    matrix,
    pair,
    positive_int,
    real,
    symmetric,
    vector,
)
from stairwise.theory.krylov import top_eigenpairs

Floats = NDArray[np.float64]

MATRIX_LIMIT = 8192  # with more features, memory-mapped pairs stay on disk, because Γ would take over 0.5 GB
DENSE_LIMIT = 2048  # below this many features a dense solver is faster than Krylov


class Correlation:
    r"""Feature cross-correlation of pairs of views (Sec. 4.1). It is a sum over pairs, so parts can be merged.

    .. math:: Γ = \\frac{1}{2n} \\sum_i (x_i x_i'^T + x_i' x_i^T)

    It stores the pairs themselves while 2n < m ("thin") and the m × m sum afterwards, so streaming any number of pairs
    through `update` stores at most m² numbers. Memory-mapped arrays are read in pieces and never copied whole. All
    arithmetic is in float64, whatever the input dtype.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x_a, x_b = rng.standard_normal((2, 100, 5))
        >>> whole = Correlation.from_pairs(x_a, x_b)
        >>> parts = Correlation().update(x_a[:30], x_b[:30]) + Correlation().update(x_a[30:], x_b[30:])
        >>> bool(np.allclose(whole.matrix, parts.matrix)), whole.pairs, whole.features
        (True, 100, 5)
    """

    def __init__(self) -> None:
        self._sum: Floats | None = None  # Σ x x'ᵀ + x' xᵀ over the pairs already summed
        self._held: list[tuple[NDArray, NDArray]] = []  # the pairs not yet summed
        self._pairs = 0
        self._features = 0

    @classmethod
    def from_pairs(cls, x_a: ArrayLike, x_b: ArrayLike) -> Self:
        """Γ of the rows x_a[i], x_b[i]; shapes (n, m)."""
        return cls().update(x_a, x_b)

    @classmethod
    def from_matrix(cls, gamma: ArrayLike, pairs: int = 1) -> Self:
        """From a given Γ: symmetric (m, m), or (m,) for a diagonal one; `pairs` is its weight when merged."""
        values = real(gamma, "gamma")
        dense = symmetric(np.diag(vector(values, "gamma")) if values.ndim == 1 else values, "gamma")
        new = cls()
        new._features, new._pairs = len(dense), positive_int(pairs, "pairs", 2**53)
        new._sum = 2 * new._pairs * dense
        return new

    def update(self, x_a: ArrayLike, x_b: ArrayLike) -> Self:
        """Add pairs in place and return self. Invalid pairs raise an error and change nothing."""
        a, b = pair(x_a, x_b)
        if self._features and a.shape[1] != self._features:
            raise InputError("x_a and x_b", f"must have {self._features} features like the earlier pairs", a.shape[1])
        self._forget()
        self._features = a.shape[1]
        self._pairs += len(a)
        self._held = [*self._held, (a, b)]
        if not self._fold():
            self._held[-1] = _kept(a), _kept(b)
        return self

    def __add__(self, other: Self) -> Self:
        """Γ of both sets of pairs together, as a new object."""
        if not isinstance(other, Correlation):
            return NotImplemented
        if self._features and other._features and self._features != other._features:
            raise InputError("correlations", "must have the same features", f"{self._features} and {other._features}")
        new = type(self)()
        new._features = self._features or other._features
        new._pairs = self._pairs + other._pairs
        sums = [part._sum for part in (self, other) if part._sum is not None]
        new._sum = sum(sums[1:], sums[0].copy()) if sums else None
        new._held = self._held + other._held
        new._fold()
        return new

    def __repr__(self) -> str:
        return f"Correlation({self.pairs} pairs, {self._features} features)"

    @property
    def pairs(self) -> int:
        """Number of pairs n."""
        return self._pairs

    @property
    def features(self) -> int:
        """Number of features m."""
        return self._features

    @property
    def rank_bound(self) -> int:
        """min(m, 2n): the number of eigenvalues that `eigenvalues` returns. All others are zero."""
        return self._features if self._sum is not None else min(self._features, 2 * self._pairs)

    @cached_property
    def matrix(self) -> Floats:
        """Γ itself, (m, m)."""
        self._require_pairs()
        total = np.zeros((self._features, self._features)) if self._sum is None else self._sum.copy()
        for a, b in self._chunks():
            total += _twice_symmetrized(a, b)
        return _frozen(total / (2 * self._pairs))

    @property
    def eigenvalues(self) -> Floats:
        """Descending, shape (min(m, 2n),). The exact zeros of a thin Γ are left out."""
        return self._decomposition[0]

    @property
    def eigenvectors(self) -> Floats:
        """In columns, shape (m, min(m, 2n)). The largest entry of each column is positive."""
        return self._decomposition[1]

    def top(self, k: int) -> tuple[Floats, Floats]:
        """The k algebraically largest eigenpairs: (k,) descending and (m, k) in columns.

        Dense if there are few features or the full decomposition is already known. Otherwise block Krylov on products
        with Γ, which reads the pairs a few dozen times and never forms an m × m matrix.
        """
        self._require_pairs()
        remedy = f"Γ of {self.pairs} pairs with {self._features} features has at most {self.rank_bound} modes"
        k = positive_int(k, "k", self.rank_bound, remedy)
        if "_decomposition" in self.__dict__ or self._features <= DENSE_LIMIT or 4 * k > self.rank_bound:
            return self.eigenvalues[:k], self.eigenvectors[:, :k]
        values, vectors = top_eigenpairs(self.product, self._features, k)
        return values, _fix_signs(vectors)

    def product(self, x: ArrayLike) -> Floats:
        """Γ x for x of shape (m, b), without forming Γ."""
        self._require_pairs()
        x = np.asarray(matrix(x, "x", most=LARGEST), dtype=np.float64)
        if len(x) != self._features:
            raise InputError("x", f"must have {self._features} rows, one per feature", x.shape)
        total = np.zeros_like(x) if self._sum is None else self._sum @ x
        for a, b in self._chunks():
            total += a.T @ (b @ x) + b.T @ (a @ x)
        return total / (2 * self._pairs)

    def project(self, weights: ArrayLike, name: str = "W0") -> tuple[Floats, Floats]:
        """Coordinates W V of weights (d, m) in the eigenbasis, (d, r), and the eigenvalues (r,)."""
        self._require_pairs()
        w = np.asarray(matrix(weights, name, self._features, LARGEST), dtype=np.float64)
        return w @ self.eigenvectors, self.eigenvalues

    @cached_property
    def _decomposition(self) -> tuple[Floats, Floats]:
        self._require_pairs()
        if self._sum is not None or 2 * self._pairs >= self._features:
            values, vectors = scipy.linalg.eigh(self.matrix)
        else:  # thin: with [x_a; x_b]ᵀ = Q R, Γ = Q (R P Rᵀ / 2n) Qᵀ where P swaps the two views
            stacked = np.concatenate([a for a, _ in self._held] + [b for _, b in self._held]).astype(np.float64)
            q, r = scipy.linalg.qr(stacked.T, mode="economic")
            r_a, r_b = np.split(r, 2, axis=1)
            small = _twice_symmetrized(r_a.T, r_b.T) / (2 * self._pairs)
            values, vectors = scipy.linalg.eigh(small)
            vectors = q @ vectors
        return _frozen(values[::-1]), _frozen(_fix_signs(vectors[:, ::-1]))

    def _fold(self) -> bool:
        """Add the held pairs to the sum if the sum takes less memory; return whether it was done."""
        on_disk = any(isinstance(x, np.memmap) for pair in self._held for x in pair)
        smaller = self._sum is not None or 2 * self._pairs >= self._features
        if not smaller or (on_disk and self._features > MATRIX_LIMIT):
            return False
        total = np.zeros((self._features, self._features)) if self._sum is None else self._sum
        for a, b in self._chunks():
            total += _twice_symmetrized(a, b)
        self._sum, self._held = total, []
        return True

    def _chunks(self) -> Iterator[tuple[Floats, Floats]]:
        return _in_chunks(self._held)

    def _forget(self) -> None:
        for name in ("matrix", "_decomposition"):
            self.__dict__.pop(name, None)

    def _require_pairs(self) -> None:
        if not self._pairs:
            raise InputError("Correlation", "must hold at least one pair", 0, "call update(x_a, x_b) first")


def checked(corr: object, name: str = "corr") -> Correlation:
    """Return `corr`; anything but a Correlation, such as None or a matrix, is an error that says how to make one."""
    remedy = "use Correlation.from_pairs(x_a, x_b) or Correlation.from_matrix(Γ)"
    found: Correlation = instance(corr, name, Correlation, remedy)
    return found


def _in_chunks(pairs: list[tuple[NDArray, NDArray]]) -> Iterator[tuple[Floats, Floats]]:
    for a, b in pairs:
        for (_, rows_a), (_, rows_b) in zip(in_blocks(a), in_blocks(b), strict=True):
            yield np.asarray(rows_a, dtype=np.float64), np.asarray(rows_b, dtype=np.float64)


def _twice_symmetrized(a: Floats, b: Floats) -> Floats:
    """AᵀB + BᵀA."""
    product = a.T @ b
    return product + product.T


def _kept(x: NDArray) -> NDArray:
    """A copy, unless the data is memory-mapped."""
    return x if isinstance(x, np.memmap) else x.copy()


def _frozen(x: Floats) -> Floats:
    """Make `x` read-only, because callers share the cached array."""
    x.flags.writeable = False
    return x


def _fix_signs(vectors: Floats) -> Floats:
    """Make the largest entry of each column positive, so that results do not depend on the solver."""
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])]
    return vectors * np.where(largest < 0, -1.0, 1.0)
