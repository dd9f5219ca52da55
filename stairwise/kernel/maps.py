"""Finite features of a kernel, φ(x)·φ(y) ≈ k(x, y): random features, landmarks (Nyström), or the points themselves.

A map returns raw rows r(x) (n, width), and φ(x) = r(x) W with a fixed matrix W. Sums over pairs are taken of raw rows,
and W is applied once at the end: for Nyström that halves the work of a pass.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import erf

from stairwise.checks import InputError, as_numpy, is_tensor
from stairwise.kernel import landmarks
from stairwise.kernel.arrays import Matrix, cast, like, namespace
from stairwise.kernel.kernels import Kernel, laplace, linear, nngp, rbf
from stairwise.kernel.operators import evaluated

SMALLEST = 1e-11  # of directions, relative to the largest: sums over pairs are rounded at 1e-16, and W divides by this
WELL = 1e-6  # of eigenvalues, relative to the largest: if all are larger, no direction needs to be left out
ROUNDING = 1e-6  # of eigenvalues, relative to the largest: kernels of networks lose half of the digits at small angles


class AbstractMap(ABC):
    """Raw rows and the matrix that turns them into features.

    Attributes:
        kernel: the kernel that it stands for.
        dtype: precision of the rows.
    """

    kernel: Kernel
    dtype: str

    @abstractmethod
    def rows(self, X: Matrix) -> Matrix:
        """r(x), (n, width)."""

    @abstractmethod
    def arrays(self) -> list[Matrix]:
        """What defines the map besides the kernel; the constructor takes them in this order."""

    @staticmethod
    @abstractmethod
    def shapes(features: int) -> list[tuple[int | None, ...]]:
        """Shapes of `arrays`. None: any length; -1: that of the first array's last axis."""

    @staticmethod
    @abstractmethod
    def suits(kernel: Kernel) -> bool:
        """Whether a kernel has such features."""

    @property
    def whitening(self) -> Matrix | None:
        """W (width, rank) in float64; None for the identity."""
        return None

    @property
    def lost(self) -> Matrix | None:
        """Columns that W would have without rounding, as far as they are known; None if there are none."""
        return None


@dataclass(frozen=True, eq=False)
class Identity(AbstractMap):
    """The points themselves: the linear kernel, exactly."""

    kernel: Kernel
    dtype: str

    def rows(self, X: Matrix) -> Matrix:
        return X

    def arrays(self) -> list[Matrix]:
        return []

    @staticmethod
    def shapes(features: int) -> list[tuple[int | None, ...]]:
        return []

    @staticmethod
    def suits(kernel: Kernel) -> bool:
        return isinstance(kernel, linear)


@dataclass(frozen=True, eq=False)
class Landmarks(AbstractMap):
    """Nyström: r(x) = k(x, landmarks) and W Wᵀ = k(landmarks, landmarks)⁻¹, without directions lost in rounding."""

    kernel: Kernel
    dtype: str
    points: Matrix

    def rows(self, X: Matrix) -> Matrix:
        return evaluated(self.kernel, X, self.points, self.dtype)

    def arrays(self) -> list[Matrix]:
        return [self.points]

    @staticmethod
    def shapes(features: int) -> list[tuple[int | None, ...]]:
        return [(None, features)]

    @staticmethod
    def suits(kernel: Kernel) -> bool:
        return not isinstance(kernel, linear)

    @property
    def whitening(self) -> Matrix:
        return self._columns[0]

    @property
    def lost(self) -> Matrix | None:
        return self._columns[1]

    @cached_property
    def _columns(self) -> tuple[Matrix, Matrix | None]:
        """W with W Wᵀ = k(landmarks, landmarks)⁻¹: columns that are used, and those that are not."""
        points = cast(self.points, "float64")
        K = evaluated(self.kernel, points, points, "float64")
        xp = namespace(K)
        K = (K + K.T) / 2
        inverse = _inverse_factor(K)
        if inverse is not None:
            return inverse, None
        sizes, vectors = xp.linalg.eigh(K)
        least, most = float(sizes[0]), float(sizes[-1])
        if least < -ROUNDING * abs(most):
            raise InputError(
                "kernel", "must be positive semidefinite", f"an eigenvalue of {least:.3g}", "choose another"
            )
        known = sizes > max(len(K) * float(np.finfo(float).eps) * most, -2 * least)
        keep = known & (sizes > SMALLEST * most)
        if not bool(keep.any()):
            raise InputError("kernel", "must not vanish on the landmarks")
        unused = known & ~keep
        lost = vectors[:, unused] / xp.sqrt(sizes[unused]) if bool(unused.any()) else None
        return vectors[:, keep] / xp.sqrt(sizes[keep]), lost


@dataclass(frozen=True, eq=False)
class Waves(AbstractMap):
    """cos and sin of random projections: Gaussian frequencies for the RBF kernel, Cauchy's for the Laplace kernel."""

    kernel: Kernel
    dtype: str
    frequencies: Matrix  # (features, width / 2)
    origin: Matrix  # subtracted from x, because a large mean would lose digits; the kernel does not notice

    def rows(self, X: Matrix) -> Matrix:
        xp = namespace(X)
        phase = (X - self.origin) @ self.frequencies
        return xp.concatenate([xp.cos(phase), xp.sin(phase)], 1) / self.frequencies.shape[1] ** 0.5

    def arrays(self) -> list[Matrix]:
        return [self.frequencies, self.origin]

    @staticmethod
    def shapes(features: int) -> list[tuple[int | None, ...]]:
        return [(features, None), (features,)]

    @staticmethod
    def suits(kernel: Kernel) -> bool:
        return isinstance(kernel, rbf | laplace)


@dataclass(frozen=True, eq=False)
class RandomLayer(AbstractMap):
    """A random hidden layer, whose second moment is the covariance of a network of one infinite layer (arc-cosine)."""

    kernel: Any  # an nngp
    dtype: str
    weights: Matrix  # (features, width)
    biases: Matrix  # (width,)

    def rows(self, X: Matrix) -> Matrix:
        xp = namespace(X)
        hidden = X @ self.weights + self.biases
        if self.kernel.activation == "relu":
            active = xp.clip(hidden, 0, None)
        else:
            active = xp.erf(hidden) if is_tensor(X) else erf(hidden)
        active = active * (self.kernel.weight_variance / self.weights.shape[1]) ** 0.5
        if not self.kernel.bias_variance:
            return active
        constant = xp.ones_like(active[:, :1]) * self.kernel.bias_variance**0.5
        return xp.concatenate([active, constant], 1)

    def arrays(self) -> list[Matrix]:
        return [self.weights, self.biases]

    @staticmethod
    def shapes(features: int) -> list[tuple[int | None, ...]]:
        return [(features, None), (-1,)]

    @staticmethod
    def suits(kernel: Kernel) -> bool:
        return isinstance(kernel, nngp) and kernel.depth == 1


def _inverse_factor(K: Matrix) -> Matrix | None:
    """L⁻ᵀ of K = L Lᵀ if all eigenvalues are above WELL times the largest; otherwise None, and directions are chosen.

    That takes a small part of the time of a full decomposition.
    """
    xp = namespace(K)
    eye = xp.eye(len(K), dtype=K.dtype) if xp is np else xp.eye(len(K), dtype=K.dtype, device=K.device)
    shifted = K - WELL * float(abs(K).sum(0).max()) * eye  # the largest sum is at least the largest eigenvalue
    if xp is np:
        try:
            np.linalg.cholesky(shifted)
        except np.linalg.LinAlgError:
            return None
        return solve_triangular(np.linalg.cholesky(K), eye, lower=True).T
    if bool(xp.linalg.cholesky_ex(shifted)[1]):
        return None
    return xp.linalg.solve_triangular(xp.linalg.cholesky(K), eye, upper=False).T


MAPS = {kind.__name__: kind for kind in (Identity, Landmarks, Waves, RandomLayer)}


def build_map(method: str, kernel: Kernel, pool: Matrix, count: int, dtype: str, how: str, seed: int) -> AbstractMap:
    """The map of `method`, "nystroem" or "features", with `count` landmarks or random features.

    Arguments:
        pool: points from which landmarks are chosen, (n, features).
        how: how landmarks are chosen, see `landmarks.choose`.
    """
    rng = np.random.default_rng(seed)
    if isinstance(kernel, linear):
        return Identity(kernel, dtype)
    if method == "nystroem":
        return Landmarks(kernel, dtype, pool[landmarks.choose(how, kernel, pool, count, rng)])
    features, half = pool.shape[1], -(-count // 2)

    def drawn(values: np.ndarray) -> Matrix:
        return cast(like(values, pool), dtype)

    if isinstance(kernel, rbf | laplace):
        waves = rng.standard_normal((features, half))
        if kernel.gamma is None:
            raise InputError("gamma", "must be set before features are drawn", None, "call kernel.fit(X)")
        scale = (2 * kernel.gamma) ** 0.5 if isinstance(kernel, rbf) else kernel.gamma / abs(rng.standard_normal(half))
        return Waves(kernel, dtype, drawn(waves * scale), cast(pool.mean(0), dtype))
    if isinstance(kernel, nngp) and kernel.depth == 1:
        w, b = kernel.weight_variance, kernel.bias_variance
        weights = rng.standard_normal((features, count)) * (w / features) ** 0.5
        return RandomLayer(kernel, dtype, drawn(weights), drawn(b**0.5 * rng.standard_normal(count)))
    known = "linear, rbf, laplace, nngp(depth=1)"
    raise InputError("kernel", "has no random features", kernel, f'use method="nystroem", or one of {known}')


def restore_map(name: str, kernel: Kernel, dtype: str, arrays: list[Matrix]) -> AbstractMap:
    """The map of this name with what `arrays()` returned."""
    made: AbstractMap = MAPS[name](kernel, dtype, *arrays)
    return made


def width(one: AbstractMap, features: int) -> int:
    """Number of columns of the rows of points with so many features."""
    like_this = one.arrays()[0] if one.arrays() else np.zeros(0)
    return int(one.rows(cast(like(np.zeros((1, features)), like_this), one.dtype)).shape[1])


def same_map(one: AbstractMap, other: AbstractMap) -> bool:
    """Whether both give the same rows."""
    arrays = [[as_numpy(x) for x in m.arrays()] for m in (one, other)]
    equal = len(arrays[0]) == len(arrays[1]) and all(map(np.array_equal, *arrays))
    return type(one) is type(other) and one.kernel == other.kernel and one.dtype == other.dtype and equal
