"""K̃, the kernel over both views together, as an operator that multiplies blocks of vectors.

Its rows are x_1 … x_n, x′_1 … x′_n, so N = 2n. The theory needs only P K̃, where P swaps the two views: P K̃ a = N γ a,
aᵀ K̃ a = 1. If both views are the same data (X = X′), the n points are enough and P is the identity.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stairwise.checks import InputError, as_numpy
from stairwise.kernel.arrays import Matrix, cast, finite, like, namespace, on_gpu
from stairwise.kernel.kernels import Kernel

MEMORY = 4 << 30  # bytes that K̃ may take before its tiles are recomputed


@dataclass(frozen=True, eq=False)
class Blocks:
    """The kernel over both views, computed block by block.

    Attributes:
        parts: the data, one part if X = X′, otherwise two.
        kernels: one per part.
        shared: whether one kernel covers both parts; if not, they are two modalities with 0 between them.
        dtype: precision of the values.
    """

    parts: tuple[Matrix, ...]
    kernels: tuple[Kernel, ...]
    shared: bool
    dtype: str = "float64"

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)

    def rows(self, X: Matrix, part: int) -> Matrix:
        """k(x, all points), (len(X), size), for x belonging to `part`."""
        own = [self.block(X, part, other) for other in range(len(self.parts))]
        return own[0] if len(own) == 1 else namespace(own[0]).concatenate(own, 1)

    def block(self, X: Matrix, part: int, other: int, columns: slice = slice(None)) -> Matrix:
        """k(x, y) for x belonging to `part` and the points y of part `other`, all of them or those of `columns`."""
        Y = self.parts[other][columns]
        if part != other and not self.shared:
            return cast(like(np.zeros((len(X), len(Y))), X), self.dtype)
        return evaluated(self.kernels[other], X, Y, self.dtype)

    def matrix(self) -> Matrix:
        """K̃ in full."""
        return namespace(self.parts[0]).concatenate([self.rows(X, i) for i, X in enumerate(self.parts)])


class AbstractPairs(ABC):
    """K̃ and P.

    Attributes:
        size: number of points N.
        swaps: whether P swaps the halves (False if both views are the same data).
        eps: relative precision to which K̃ is known.
        seed_like: an array whose type and device all blocks share.
        reads_much: whether a product with many columns takes hardly longer than one with few.
        free_columns: number of columns up to which a product takes no longer than with one; 0: each of them counts.
        has_rough: whether `rough` is faster than `matmul`.
    """

    size: int
    swaps: bool
    eps: float
    seed_like: Matrix
    reads_much: bool = False
    free_columns: int = 0
    has_rough: bool = False

    @abstractmethod
    def matmul(self, block: Matrix) -> Matrix:
        """K̃ times a float64 block (N, b)."""

    def rough(self, block: Matrix) -> Matrix:
        """The same with fewer digits, good enough to find the space of the modes."""
        return self.matmul(block)

    def swap(self, block: Matrix) -> Matrix:
        """P times a block."""
        half = self.size // 2
        return namespace(block).concatenate([block[half:], block[:half]]) if self.swaps else block


@dataclass(frozen=True, eq=False)
class DensePairs(AbstractPairs):
    """K̃ held in memory, float64 or float32."""

    matrix: Matrix
    swaps: bool = True
    precision: float = 0.0  # of the values, if lower than their dtype suggests

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.matrix))
        object.__setattr__(self, "eps", max(self.precision, _eps(self.matrix)))
        object.__setattr__(self, "seed_like", self.matrix)

    def matmul(self, block: Matrix) -> Matrix:
        return times_float64(block.T, self.matrix).T  # K̃ is symmetric, and BLAS is faster this way round

    def refuse_indefinite(self, name: str) -> None:
        """Check K̃ by Cholesky, allowing for rounding error."""
        dense = np.asarray(as_numpy(self.matrix), dtype=np.float64)
        shift = max(self.eps, 1e-12) * self.size * np.abs(np.diag(dense)).max(initial=0.0)
        try:
            np.linalg.cholesky(dense + shift * np.eye(self.size))
        except np.linalg.LinAlgError:
            low = f"an eigenvalue of {np.linalg.eigvalsh(dense)[0]:.3g}"
            raise InputError(name, "must be positive semidefinite", low, "clip it, or add a multiple of I") from None


@dataclass(frozen=True, eq=False)
class FeaturePairs(AbstractPairs):
    """K̃ = Φ Φᵀ of explicit features Φ (N, m). K̃ is never formed; with few features Γ can be diagonalized instead."""

    features: Matrix
    swaps: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.features))
        object.__setattr__(self, "eps", _eps(self.features))
        object.__setattr__(self, "seed_like", self.features)

    @cached_property
    def _wide(self) -> Matrix:
        return cast(self.features, "float64")

    def matmul(self, block: Matrix) -> Matrix:
        return self._wide @ (self._wide.T @ block)


def evaluated(kernel: Kernel, X: Matrix, Y: Matrix, dtype: str) -> Matrix:
    """k(x, y), (len(X), len(Y)); what a user's kernel returns is checked."""
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        block = kernel(X, Y)
    if tuple(getattr(block, "shape", ())) != (len(X), len(Y)):
        raise InputError(
            "kernel",
            f"must return a matrix of shape {(len(X), len(Y))}",
            getattr(block, "shape", type(block)),
            "it is called with X (n, m) and Y (k, m)",
        )
    if str(block.dtype).endswith("float32") and dtype == "float64":
        raise InputError("kernel", "returned float32 instead of float64", None, 'use dtype="float32"')
    block = cast(block, dtype)
    if not finite(block):
        raise InputError("kernel", "must return finite numbers", None, "scale the data or choose another kernel")
    return block


def times_float64(a: Matrix, b: Matrix) -> Matrix:
    """a b as float64; multiplied in float32 if one of them is float32."""
    if a.dtype == b.dtype:
        return a @ b
    if on_gpu(a):
        from stairwise.kernel.halves import long_product

        return long_product(cast(a, "float32"), cast(b, "float32"))
    return cast(cast(a, "float32") @ cast(b, "float32"), "float64")


def _eps(x: Matrix) -> float:
    return float(namespace(x).finfo(x.dtype).eps)
