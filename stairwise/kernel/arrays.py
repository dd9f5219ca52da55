"""Functions that accept numpy arrays or torch tensors and return the same kind, on the same device."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from stairwise.checks import InputError, is_tensor, matrix

Matrix = Any  # a numpy array or a torch tensor


def namespace(x: object) -> ModuleType:
    """The module, numpy or torch, whose functions accept `x`."""
    return sys.modules["torch"] if is_tensor(x) else np


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
    if x.layout != namespace(x).strided or x.is_meta or x.is_complex():
        raise InputError(name, "must be a dense tensor of real numbers", f"{x.dtype}, {x.layout}, {x.device}")
    out = cast(x, dtype)
    if out.ndim != 2 or 0 in out.shape:
        raise InputError(name, "must be 2-D and not empty", f"shape {tuple(out.shape)}")
    if not bool(namespace(out).isfinite(out).all()):
        raise InputError(name, "must be finite", None, "drop or impute such rows")
    return out


class InputTypeError(InputError, TypeError):
    """An InputError that is a TypeError too, as scikit-learn's conventions ask for objects that are no numbers."""


def validated(est: BaseEstimator, X: object, reset: bool, dtype: str) -> np.ndarray:
    """scikit-learn's checks of X, with an InputError that holds its words."""
    if isinstance(X, np.ndarray) and X.dtype.kind == "c":
        raise InputError("X", "must hold real numbers", "Complex data not supported", "give its real part or modulus")
    try:
        out: np.ndarray = validate_data(est, X, reset=reset, dtype=np.dtype(dtype))
    except Exception as error:  # TypeError, OverflowError, and whatever X raises
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind("X", "must be a finite matrix of real numbers", error) from error
    return out


def check_parameters(est: BaseEstimator) -> None:
    """scikit-learn's checks of an estimator's parameters, with an InputError that holds its words."""
    try:
        est._validate_params()
    except Exception as error:  # also that of a value that has no text
        raise InputError(type(est).__name__, "must have valid parameters", None, str(error)) from error


def like(values: np.ndarray, x: Matrix) -> Matrix:
    """float64 numpy values, converted to the array type and device of `x`."""
    if is_tensor(x):
        return namespace(x).as_tensor(np.ascontiguousarray(values), device=x.device)
    return values
