"""Functions that accept numpy arrays or torch tensors and return the same kind, on the same device."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from stairwise.checks import InputError, as_numpy, is_tensor, matrix, real

Matrix = Any  # a numpy array or a torch tensor


def namespace(x: object) -> ModuleType:
    """The module, numpy or torch, whose functions accept `x`."""
    return sys.modules["torch"] if is_tensor(x) else np


def on_gpu(x: object) -> bool:
    return is_tensor(x) and bool(x.is_cuda)  # type: ignore[attr-defined]


def stack(parts: list[Matrix]) -> Matrix:
    """Concatenate the rows of all parts."""
    return namespace(parts[0]).concatenate(parts)


def cast(x: Matrix, dtype: str) -> Matrix:
    """`x` as float32 or float64; not copied if it already has this dtype."""
    if is_tensor(x):
        return x.detach().to(getattr(namespace(x), dtype))
    return np.asarray(x, dtype=dtype)


def checked(x: Any, dtype: str, name: str) -> Matrix:
    """Return `x` as a finite matrix of floats; otherwise raise InputError."""
    if not is_tensor(x):
        return np.asarray(matrix(x, name), dtype=dtype)
    out = cast(unread(x, name), dtype)
    if not finite(out):
        raise InputError(name, "must be finite", None, "drop or impute such rows")
    return out


def unread(x: Any, name: str) -> Matrix:
    """`x` as an array or a dense tensor of rows, neither copied nor read, because it may be a large file."""
    if is_tensor(x) and (x.layout != namespace(x).strided or x.is_meta or x.is_complex()):
        raise InputError(name, "must be a dense tensor of real numbers", f"{x.dtype}, {x.layout}, {x.device}")
    out = x if is_tensor(x) else real(x, name)
    if out.ndim != 2 or 0 in out.shape:
        raise InputError(name, "must be 2-D and must not be empty", f"shape {tuple(out.shape)}")
    return out


def finite(x: Matrix) -> bool:
    """Whether all numbers are finite: their sum is, or, if it overflows, each of them."""
    xp = namespace(x)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(x.sum())) or bool(xp.isfinite(x).all())


class InputTypeError(InputError, TypeError):
    """An InputError that is a TypeError too, as scikit-learn's conventions ask for objects that are no numbers."""


def validated(est: Any, X: Any, reset: bool) -> Matrix:
    """X as a finite matrix of floats with the features of the fit; `reset`: this is the fit.

    Arrays get scikit-learn's checks, with an InputError that holds its words.
    """
    if is_tensor(X):
        points = checked(X, est.dtype, "X")
        if reset:
            est.n_features_in_ = points.shape[1]
        elif points.shape[1] != est.n_features_in_:
            raise InputError("X", f"must have {est.n_features_in_} features", points.shape[1])
        return points
    if isinstance(X, np.ndarray) and X.dtype.kind == "c":
        raise InputError("X", "must hold real numbers", "Complex data not supported", "give its real part or modulus")
    try:
        out: np.ndarray = validate_data(est, X, reset=reset, dtype=np.dtype(est.dtype))
    except Exception as error:  # TypeError, OverflowError, and whatever X raises
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind("X", "must be a finite matrix of real numbers", error) from error
    return out


def refuse_second_view(X: Any, y: Any) -> None:
    """Raise InputError if y, which is ignored as scikit-learn wants it, has the shape of X and holds no labels."""
    shape = _shape(y)
    if len(shape) != 2 or shape[1] < 2 or shape != _shape(X):
        return
    values = as_numpy(y) if is_tensor(y) else np.asarray(y)
    if values.dtype.kind == "f" and not np.isin(values, (0, 1)).all():
        raise InputError("y", "is ignored, and must not be a second view", f"shape {shape}, as X", "give it as X_b=")


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an array, a tensor or a list; () if there is none."""
    try:
        return tuple(np.shape(x)) if isinstance(x, list | tuple) else tuple(getattr(x, "shape", ()))
    except ValueError:  # ragged
        return ()


def check_parameters(est: BaseEstimator) -> None:
    """scikit-learn's checks of an estimator's parameters, with an InputError that holds its words."""
    try:
        est._validate_params()
    except Exception as error:  # also that of a value that has no text
        raise InputError(type(est).__name__, "must have valid parameters", None, str(error)) from error
    for name, value in est.get_params(deep=False).items():
        if isinstance(value, bool):  # scikit-learn takes True for 1
            raise InputError(name, "must not be a truth value", value)


def like(values: np.ndarray, x: Matrix) -> Matrix:
    """float64 numpy values, converted to the array type and device of `x`."""
    if is_tensor(x):
        own = np.ascontiguousarray(values)
        return namespace(x).as_tensor(own if own.flags.writeable else own.copy(), device=x.device)
    return values


def alike(x: Matrix, like_this: Matrix, dtype: str) -> Matrix:
    """`x` with the array type and device of `like_this`, as `dtype`."""
    if not is_tensor(like_this):
        return np.asarray(as_numpy(x), dtype=dtype)
    torch = namespace(like_this)
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        x = np.array(x)  # torch shares memory, and warns if it must not write there
    return torch.as_tensor(x, dtype=getattr(torch, dtype), device=like_this.device)
