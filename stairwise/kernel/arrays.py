"""Functions that accept numpy arrays or torch tensors and return the same kind, on the same device."""

import sys
from types import ModuleType
from typing import Any

import numpy as np

from stairwise.checks import InputError, matrix

Matrix = Any  # a numpy array or a torch tensor


def is_tensor(x: object) -> bool:
    """Whether `x` is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def namespace(x: object) -> ModuleType:
    """The module, numpy or torch, whose functions accept `x`."""
    return sys.modules["torch"] if is_tensor(x) else np


def as_numpy(x: Matrix) -> np.ndarray:
    """A numpy array with the values of `x`."""
    if not is_tensor(x):
        return np.asarray(x)
    x = x.detach().cpu()
    return (x.float() if x.dtype == sys.modules["torch"].bfloat16 else x).numpy()  # numpy has no bfloat16


def stack(parts: list[Matrix]) -> Matrix:
    """Concatenate the rows of all parts."""
    return namespace(parts[0]).concatenate(parts)


def cast(x: Matrix, dtype: str) -> Matrix:
    """`x` as float32 or float64; not copied if it already has this dtype."""
    if is_tensor(x):
        return x.detach().to(getattr(namespace(x), dtype))
    return np.asarray(x, dtype=dtype)


def checked(x: object, dtype: str, name: str) -> Matrix:
    """Return `x` as a finite matrix of floats; otherwise raise InputError."""
    if not is_tensor(x):
        return np.asarray(matrix(np.asarray(x), name), dtype=dtype)
    out = cast(x, dtype)
    if out.ndim != 2 or 0 in out.shape:
        raise InputError(name, "must be 2-D and not empty", f"shape {tuple(out.shape)}")
    if not bool(namespace(out).isfinite(out).all()):
        raise InputError(name, "must be finite", None, "drop or impute such rows")
    return out


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
