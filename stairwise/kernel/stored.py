"""Read files of `KernelSSL` and check all shapes, types and values, because a file may be damaged or forged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from stairwise.archives import load_arrays
from stairwise.checks import InputError, flag, number, one_of, positive_int
from stairwise.kernel.convnet import ConvNet
from stairwise.kernel.kernels import ACTIVATIONS, KERNELS, AbstractKernel
from stairwise.kernel.solvers import SOLVERS

FORMAT = 1  # version of the files
DEEPEST = 10_000  # layers of a wide network, or degree of a polynomial, beyond which a file was not written by us
MOST_MEMORY = 1 << 50  # bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """What a file holds; `kernels` is empty for a precomputed kernel, of which `more` has the spare modes."""

    facts: dict[str, Any]
    kernels: tuple[AbstractKernel, ...]
    eigenvalues: np.ndarray
    coefficients: np.ndarray
    parts: tuple[np.ndarray, ...]
    more: tuple[np.ndarray, np.ndarray] | None


def read(path: str | Path, largest: int) -> Stored:
    """Read a file written by `KernelSSL.save`; the error says what is wrong with it."""
    arrays = load_arrays(path, largest)
    try:
        facts = json.loads(str(_array(arrays, "facts", "U", ())))
        if not isinstance(facts, dict):
            raise InputError("facts", "must be a JSON object", type(facts).__name__)
        if facts["format"] != FORMAT:
            raise InputError("format", f"must be {FORMAT}", facts["format"], "load it with the version that wrote it")
        return _checked(facts, arrays)
    except KeyError as error:
        reason = f"it lacks {error.args[0]}"
    except (ValueError, TypeError, RecursionError) as error:  # InputError is a ValueError
        reason = str(error)
    raise InputError(str(path), "must be a file written by KernelSSL.save", reason)


def _checked(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Stored:
    d = positive_int(facts["n_components"], "n_components")
    features = positive_int(facts["n_features_in"], "n_features_in")
    positive_int(facts["memory"], "memory", MOST_MEMORY)
    one_of(facts["dtype"], "dtype", ("float64", "float32"))
    one_of(facts["solver"], "solver", ("auto", *SOLVERS))
    swaps, shared = flag(facts["swaps"], "swaps"), flag(facts["shared"], "shared")
    _check_solution(facts["solution"])
    eigenvalues = _spectrum(arrays, "eigenvalues", d)
    coefficients = _array(arrays, "dual_coef", "f", (None, d))
    points = len(coefficients)
    if points < d or (swaps and points % 2):
        raise InputError("dual_coef", f"must have a row per point, at least {d}, two per pair", points)
    if facts["kernels"] == "precomputed":
        if not (swaps and shared and features == points):
            raise InputError("n_features_in", f"must be {points}, the number of points", features)
        more = _spectrum(arrays, "more_eigenvalues", None)
        if len(more) < d:
            raise InputError("more_eigenvalues", f"must be at least {d}", len(more))
        spare = more, _array(arrays, "more_coef", "f", (points, len(more)))
        return Stored(facts, (), eigenvalues, coefficients, (), spare)
    kernels = _kernels(facts["kernels"], 2 if swaps else 1, shared)
    rows, other = points // len(kernels), features if shared else None
    parts = tuple(_array(arrays, f"part{i}", "f", (rows, features if i == 0 else other)) for i in range(len(kernels)))
    return Stored(facts, kernels, eigenvalues, coefficients, parts, None)


def _array(arrays: dict[str, np.ndarray], name: str, kind: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """An array of this kind and shape (None: any length but 0), whose numbers are finite."""
    x = arrays[name]
    fits = x.ndim == len(shape) and all(n == (m or n) > 0 for n, m in zip(x.shape, shape, strict=True))
    if x.dtype.kind != kind or (kind == "f" and x.itemsize not in (4, 8)) or not fits:
        wanted = str(shape).replace("None", "any")
        text = "text" if kind == "U" else f"float64 or float32 of shape {wanted}"
        raise InputError(name, f"must be {text}", f"{x.dtype} of shape {x.shape}")
    if kind == "f" and not np.isfinite(x).all():
        raise InputError(name, "must be finite", x[~np.isfinite(x)][0])
    return x


def _spectrum(arrays: dict[str, np.ndarray], name: str, length: int | None) -> np.ndarray:
    values = _array(arrays, name, "f", (length,))
    if values[-1] <= 0 or (np.diff(values) > 1e-6 * values[0]).any():
        raise InputError(name, "must be positive and descend", values[:4])
    return values


def _check_solution(solution: Any) -> None:
    if not isinstance(solution, list) or len(solution) != 4:
        raise InputError("solution", "must have four entries", solution)
    residual, products, solver, precision = solution
    number(residual, "residual", least=0)
    number(precision, "precision", least=0)
    one_of(solver, "solver of the solution", SOLVERS)
    if isinstance(products, bool) or not isinstance(products, int) or products < 0:
        raise InputError("products", "must be a whole number of at least 0", products)


def _kernels(described: Any, count: int, shared: bool) -> tuple[AbstractKernel, ...]:
    if not isinstance(described, list) or len(described) != count:
        raise InputError("kernels", f"must be a list of {count}, one per view", described)
    kernels = tuple(_kernel(entry) for entry in described)
    if shared and len(set(kernels)) > 1:
        raise InputError("kernels", "must be equal, if both views share one", described)
    if not shared and count == 1:
        raise InputError("shared", "must be true for a single view", shared)
    return kernels


def _kernel(entry: Any) -> AbstractKernel:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], dict):
        raise InputError("kernels", "must be names with settings", entry)
    kind = KERNELS[one_of(entry[0], "kernels", KERNELS)]
    known = {field.name for field in dataclasses.fields(kind)}
    for name, value in entry[1].items():
        one_of(name, f"setting of {entry[0]}", known)
        if name in ("degree", "depth"):
            positive_int(value, name, DEEPEST)
        elif name == "activation":
            one_of(value, name, ACTIVATIONS)
        elif not issubclass(kind, ConvNet) and (name != "gamma" or value is not None):  # a ConvNet checks its own
            number(value, name)
    return kind(**entry[1])
