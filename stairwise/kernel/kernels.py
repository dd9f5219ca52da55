"""Kernels as small objects. Called with X (n, m) and Y (k, m), they return the matrix of k(x, y), (n, k).

`fit(X)` sets data-dependent parameters and returns the kernel to use. Any function (X, Y) → matrix is accepted too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from stairwise.checks import LARGEST, InputError, as_numpy, is_tensor, number, one_of, positive_int
from stairwise.kernel.arrays import Matrix, namespace
from stairwise.kernel.convnet import ACTIVATIONS, ConvNet

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KERNELS",
    "AbstractKernel",
    "Kernel",
    "conv_nngp",
    "conv_ntk",
    "laplace",
    "linear",
    "nngp",
    "ntk",
    "polynomial",
    "rbf",
    "resolve",
]

Kernel = Callable[[Matrix, Matrix], Matrix]


class AbstractKernel(ABC):
    """A kernel with a name and parameters."""

    @abstractmethod
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix: ...

    def fit(self, X: Matrix) -> Self:
        """The kernel with its data-dependent parameters set."""
        return self


def _of_rows(call: Callable[[Any, Matrix, Matrix], Matrix]) -> Callable[[Any, Matrix, Matrix], Matrix]:
    """Refuse X and Y that are not real matrices with as many columns."""

    @wraps(call)
    def checked(self: Any, X: Matrix, Y: Matrix) -> Matrix:
        for name, x in (("X", X), ("Y", Y)):
            if len(getattr(x, "shape", ())) != 2:
                raise InputError(name, "must be a 2-D array or tensor, rows are samples", f"shape {np.shape(x)}")
            if x.is_complex() if is_tensor(x) else np.iscomplexobj(x):
                raise InputError(name, "must be real", x.dtype, "stack real and imaginary parts")
        if X.shape[1] != Y.shape[1]:
            raise InputError("Y", f"must have {X.shape[1]} columns, as X", Y.shape[1])
        return call(self, X, Y)

    return checked


@dataclass(frozen=True)
class linear(AbstractKernel):
    """x · y: the linear kernel, equal to the linear model."""

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        return X @ Y.T


@dataclass(frozen=True)
class polynomial(AbstractKernel):
    """(gamma x·y + coef0)^degree. Default gamma: 1 / number of features."""

    degree: int = 3
    gamma: float | None = None
    coef0: float = 1.0

    def __post_init__(self) -> None:
        positive_int(self.degree, "degree", 100)
        object.__setattr__(self, "coef0", number(self.coef0, "coef0", least=-LARGEST, most=LARGEST))
        object.__setattr__(self, "gamma", _width(self.gamma))

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        gamma = 1 / X.shape[1] if self.gamma is None else self.gamma
        with np.errstate(over="ignore"):  # the solver refuses a kernel that is not finite
            return (gamma * (X @ Y.T) + self.coef0) ** self.degree


@dataclass(frozen=True)
class rbf(AbstractKernel):
    """exp(−gamma ‖x − y‖²). Default gamma: 1 / median of ‖x − y‖² over the data (the median heuristic).

    >>> X = np.array([[0.0], [1.0], [3.0]])
    >>> rbf().fit(X).gamma
    0.25
    """

    gamma: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _width(self.gamma))

    def fit(self, X: Matrix) -> Self:
        return self if self.gamma is not None else replace(self, gamma=1 / _median(X, squared=True))

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        gamma = 1 / _median(Y, squared=True) if self.gamma is None else self.gamma
        return _exp(_squared_distances(X, Y), -gamma)


@dataclass(frozen=True)
class laplace(AbstractKernel):
    """exp(−gamma ‖x − y‖). Default gamma: 1 / median of ‖x − y‖ over the data."""

    gamma: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _width(self.gamma))

    def fit(self, X: Matrix) -> Self:
        return self if self.gamma is not None else replace(self, gamma=1 / _median(X, squared=False))

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        gamma = 1 / _median(Y, squared=False) if self.gamma is None else self.gamma
        return _exp(namespace(X).sqrt(_squared_distances(X, Y)), -gamma)


@dataclass(frozen=True)
class _Wide(AbstractKernel):
    """Fully connected network of infinite width with `depth` hidden layers, NTK parameterization.

    First layer: Σ = σ_w² x·y/m + σ_b². Each hidden layer: Σ ← σ_w² E[φφ] + σ_b², Θ ← Σ_new + σ_w² Θ E[φ′φ′].
    """

    depth: int = 1
    activation: str = "relu"
    weight_variance: float = 2.0
    bias_variance: float = 0.0

    def __post_init__(self) -> None:
        one_of(self.activation, "activation", ACTIVATIONS)
        weight = number(self.weight_variance, "weight_variance", above=0, least=1e-30, most=1e30)
        object.__setattr__(self, "weight_variance", weight)
        object.__setattr__(self, "bias_variance", number(self.bias_variance, "bias_variance", least=0, most=1e30))
        positive_int(self.depth, "depth", 1000)

    def _covariances(self, X: Matrix, Y: Matrix) -> tuple[Matrix, Matrix]:
        """Covariance Σ and tangent kernel Θ of the output."""
        w, b = self.weight_variance, self.bias_variance
        m = X.shape[1]
        step = _relu if self.activation == "relu" else _erf
        xy = w * (X @ Y.T) / m + b
        xx, yy = (w * (Z * Z).sum(1) / m + b for Z in (X, Y))
        theta = xy
        for _ in range(self.depth):
            xy_new, slope = step(xy, xx[:, None], yy[None, :])
            xx, yy = (w * step(v, v, v)[0] + b for v in (xx, yy))
            xy = w * xy_new + b
            theta = xy + w * theta * slope
        return xy, theta


@dataclass(frozen=True)
class nngp(_Wide):
    """Covariance of the outputs at initialization; the kernel if only the last layer is trained."""

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        return self._covariances(X, Y)[0]


@dataclass(frozen=True)
class ntk(_Wide):
    """Neural tangent kernel; the kernel if all layers are trained.

    >>> ntk(depth=1)(np.eye(2), np.eye(2)).round(4)
    array([[2.    , 0.3183],
           [0.3183, 2.    ]])
    """

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        return self._covariances(X, Y)[1]


@dataclass(frozen=True)
class _WideConv(ConvNet, AbstractKernel):
    """Convolutional network of infinite width, for rows that are flattened images (height, width, channels).

    The other fields are the architecture's, as `stairwise.kernel.convnet.ConvNet` describes them.

    Attributes:
        shape: (height, width, channels). None: square images of three channels or one, by the number of features.
    """

    shape: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("strides", "shape"):  # lists, as JSON has them
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self.check()
        for name in ("weight_variance", "bias_variance"):  # plain numbers, if they were tensors
            object.__setattr__(self, name, number(getattr(self, name), name))
        if self.shape is not None and not (isinstance(self.shape, tuple) and len(self.shape) == 3):
            raise InputError("shape", "must be (height, width, channels), or None", self.shape)
        for length in self.shape or ():
            positive_int(length, "shape")

    def fit(self, X: Matrix) -> Self:
        return replace(self, shape=self._shape(X.shape[1]))

    def _shape(self, features: int) -> tuple[int, int, int]:
        square = (
            [(isqrt(features // c), isqrt(features // c), c) for c in (3, 1)] if self.shape is None else [self.shape]
        )
        for shape in square:
            if prod(shape) == features:
                return shape
        remedy = "give shape=(height, width, channels)"
        raise InputError("shape", f"must fit rows of {features} features", self.shape or "no square image does", remedy)

    def _covariances(self, X: Matrix, Y: Matrix, tangent: bool) -> Matrix:
        """Covariance Σ, or tangent kernel Θ, of the output."""
        import torch  # only this kernel needs it

        from stairwise.kernel.conv import conv_covariances

        def images(rows: Matrix) -> "Tensor":
            tensor = rows if is_tensor(rows) else torch.tensor(np.asarray(rows))
            tensor = tensor.double() if not tensor.is_floating_point() else tensor
            tensor = tensor.float() if tensor.element_size() < 4 else tensor
            return tensor.reshape(len(tensor), *self._shape(tensor.shape[1]))

        x = images(X)
        with torch.no_grad():
            sigma, theta = conv_covariances(self, x, x if Y is X else images(Y), tangent=tangent)
        out = sigma if theta is None else theta
        return out if is_tensor(X) else out.numpy()


@dataclass(frozen=True)
class conv_nngp(_WideConv):
    """Covariance of the outputs of a convolutional network at initialization; arguments as for `conv_ntk`."""

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        return self._covariances(X, Y, tangent=False)


@dataclass(frozen=True)
class conv_ntk(_WideConv):
    """Neural tangent kernel of a convolutional network of infinite width, for rows that are flattened images.

    The network has `depth` convolutions of side `kernel_size` with `strides`, `padding`, an `activation` after each and
    shortcuts around each `skip` of them, and the `head` "flatten" or "gap" (global average pooling):
    `stairwise.kernel.convnet.ConvNet`. `shape` is (height, width, channels), by default that of square images of three
    channels or one.

    An entry takes height · width numbers per layer with a flattened head, and (height · width)² with global average
    pooling; strides leave fewer. It is computed on the device of X: give tensors on a GPU to compute it there.

    >>> white, left = np.ones((4, 4)), np.repeat([[1.0, 1.0, 0.0, 0.0]], 4, 0)
    >>> rows = np.stack([white, left]).reshape(2, 16)
    >>> conv_ntk(depth=3)(rows, rows).round(4)
    array([[3.1715, 1.2736],
           [1.2736, 1.5857]])
    >>> conv_ntk(depth=3, strides=(1, 2), head="gap", shape=(4, 4, 1))(rows, rows).round(4)
    array([[0.7501, 0.3863],
           [0.3863, 0.3707]])
    """

    @_of_rows
    def __call__(self, X: Matrix, Y: Matrix) -> Matrix:
        return self._covariances(X, Y, tangent=True)


KERNELS = {kind.__name__: kind for kind in (linear, rbf, polynomial, laplace, nngp, ntk, conv_nngp, conv_ntk)}


def resolve(kernel: str | Kernel, X: Matrix) -> Kernel:
    """The kernel given by name, object or function, with its parameters set from the data X."""
    if isinstance(kernel, str):
        kernel = KERNELS[one_of(kernel, "kernel", KERNELS)]()
    if isinstance(kernel, AbstractKernel):
        for name, value in vars(kernel).items():
            if name in {"gamma", "coef0"} and value is not None:
                number(value, name)
        return kernel.fit(X)
    if not callable(kernel) or isinstance(kernel, type):
        raise InputError(
            "kernel", "must be a name, an object or a function of (X, Y)", repr(kernel), ", ".join(KERNELS)
        )
    some = X[:32]
    square = as_numpy(kernel(some, some))
    if not np.isfinite(square).all():
        raise InputError("kernel", "must return finite numbers", None, f"k(X, X) of {len(some)} rows is not finite")
    if square.shape == (len(some), len(some)) and not np.allclose(square, square.T, rtol=1e-6, atol=1e-12):
        raise InputError("kernel", "must be symmetric, k(x, y) = k(y, x)", None, "on 32 points it is not")
    return kernel


def describe(kernel: Kernel) -> tuple[str, dict]:  # for `KernelSSL.save`
    if type(kernel) not in KERNELS.values():
        raise InputError("kernel", "must be one of stairwise's kernels to be saved", kernel, ", ".join(KERNELS))
    return type(kernel).__name__, dict(vars(kernel))


def _width(gamma: float | None) -> float | None:
    return None if gamma is None else number(gamma, "gamma", least=1e-100, most=1e100)


def _exp(values: Matrix, scale: float) -> Matrix:
    """exp(scale · values), in place."""
    values *= scale
    return namespace(values).exp(values, out=values)


def _squared_distances(X: Matrix, Y: Matrix) -> Matrix:
    """‖x − y‖², computed after centring, because a large mean offset would lose all digits."""
    xp = namespace(X)
    origin = Y.mean(0)
    X, Y = X - origin, Y - origin
    sizes = (X * X).sum(1)[:, None] + (Y * Y).sum(1)[None, :]
    distances = X @ Y.T
    distances *= -2  # in place, because K̃ may fill the memory
    distances += sizes
    sizes *= 8 * xp.finfo(X.dtype).eps
    distances *= distances > sizes  # the rest is rounding
    return distances


def _median(X: Matrix, squared: bool, most: int = 1000) -> float:
    """Median distance between different rows, over at most `most` evenly spaced rows."""
    X = X[np.linspace(0, len(X) - 1, min(len(X), most)).astype(int)]
    distances = as_numpy(_squared_distances(X, X))
    positive = distances[np.triu_indices(len(distances), 1)]
    positive = positive[positive > 1e-12 * positive.max(initial=0.0)]
    return float(np.median(positive if squared else np.sqrt(positive))) if positive.size else 1.0


def _relu(xy: Matrix, xx: Matrix, yy: Matrix) -> tuple[Matrix, Matrix]:
    """E[φφ] and E[φ′φ′] for φ = max(·, 0) and a Gaussian pair of covariance ((xx, xy), (xy, yy))."""
    xp = namespace(xy)
    norm = xp.sqrt(xx * yy)
    cosine = xp.clip(xy / xp.clip(norm, xp.finfo(norm.dtype).tiny, None), -1.0, 1.0)
    angle = xp.arccos(cosine)
    left = np.pi - angle
    return norm * (xp.sqrt(xp.clip(1 - cosine * cosine, 0, None)) + left * cosine) / (2 * np.pi), left / (2 * np.pi)


def _erf(xy: Matrix, xx: Matrix, yy: Matrix) -> tuple[Matrix, Matrix]:
    """E[φφ] and E[φ′φ′] for φ = erf."""
    xp = namespace(xy)
    norm2 = (1 + 2 * xx) * (1 + 2 * yy)
    value = xp.arcsin(xp.clip(2 * xy / xp.sqrt(norm2), -1.0, 1.0)) * (2 / np.pi)
    # norm2 − 4 xy², without cancelling large numbers
    spread = 1 + 2 * xx + 2 * yy + 4 * xp.clip(xx * yy - xy * xy, 0, None)
    return value, (4 / np.pi) / xp.sqrt(spread)
