"""Files of `KernelSSL`: one .npz without pickled objects.

A file may be damaged or forged, so `read` checks all shapes, types and values.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError, as_numpy, flag, number, one_of, positive_int, seed
from stairwise.files import plain
from stairwise.kernel.convnet import ConvNet
from stairwise.kernel.kernels import ACTIVATIONS, KERNELS, AbstractKernel, describe
from stairwise.kernel.landmarks import CHOICES
from stairwise.kernel.maps import MAPS, AbstractMap, Landmarks, restore_map, width
from stairwise.kernel.models import Exact, Given, Stream
from stairwise.kernel.operators import Blocks
from stairwise.kernel.routes import METHODS, MOST_FEATURES, MOST_MEMORY, Route
from stairwise.kernel.solution import Solution
from stairwise.kernel.solvers import SOLVERS
from stairwise.kernel.sums import PairSums

if TYPE_CHECKING:
    from stairwise.kernel.estimator import KernelSSL

EXACT, STREAM = FORMATS = (1, 2)  # of a model of all points; of finite features and their sums over pairs
PARAMETERS = ("n_components", "solver", "dtype", "memory", "method", "n_features", "landmarks", "random_state")
DEEPEST = 10_000  # layers of a wide network, or degree of a polynomial, beyond which a file was not written by us
MOST_WEIGHT = 1e150  # of random features: products with points are then finite
MOST_PAIRS = 1 << 53  # whole numbers up to here are exact in float64


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """What a file holds; `kernels` is empty for a precomputed kernel, `solution` is None for a stream."""

    facts: dict[str, Any]
    kernels: tuple[AbstractKernel, ...]
    model: Exact | Given | Stream
    solution: Solution | None


# --- writing


def save(est: "KernelSSL", path: str | Path) -> None:
    model = est._model
    facts, arrays = _described_stream(model) if isinstance(model, Stream) else _described(est.solution_, model)
    facts |= {name: getattr(est, name) for name in PARAMETERS} | {"n_features_in": est.n_features_in_}
    save_arrays(path, {"facts": np.array(json.dumps(plain(facts))), **arrays})


def _described(solution: Solution, model: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Facts and arrays of an `Exact` or a `Given`."""
    accuracy = [solution.residual, solution.products, solution.solver, solution.precision]
    facts: dict[str, Any] = {"format": EXACT, "solution": accuracy}
    arrays = {"eigenvalues": solution.eigenvalues, "dual_coef": as_numpy(solution.coefficients)}
    if isinstance(model, Given):
        facts |= {"kernels": "precomputed", "shared": True, "swaps": True}
        return facts, arrays | _described_more(model.more)
    if solution.more is not None:
        arrays |= _described_more(solution.more)
    kernels = [describe(kernel) for kernel in model.blocks.kernels]
    facts |= {"kernels": kernels, "shared": model.blocks.shared, "swaps": model.swaps}
    return facts, arrays | {f"part{i}": as_numpy(part) for i, part in enumerate(model.blocks.parts)}


def _described_more(more: Solution) -> dict[str, np.ndarray]:
    return {"more_eigenvalues": more.eigenvalues, "more_coef": as_numpy(more.coefficients)}


def _described_stream(model: Stream) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Maps and sums, so that pairs can be added later."""
    kernels = [describe(one.kernel) for one in model.maps]
    facts: dict[str, Any] = {
        "format": STREAM,
        "kernels": kernels,
        "maps": [type(one).__name__ for one in model.maps],
        "route": model.method,
        "shared": len(kernels) == 1,
        "features_b": model.features_b,
    }
    arrays = {f"map{i}_{j}": as_numpy(x) for i, one in enumerate(model.maps) for j, x in enumerate(one.arrays())}
    if model.sums is not None:
        arrays |= {"cross": as_numpy(model.sums.cross), "pairs": np.array(model.sums.pairs)}
        arrays["batches"] = np.array(sorted(model.batches), dtype=np.int64)
    return facts, arrays


# --- reading


def load(kind: type["KernelSSL"], path: str | Path, largest: int) -> "KernelSSL":
    stored = read(path, largest)
    facts, precomputed = stored.facts, not stored.kernels
    kernel = "precomputed" if precomputed else stored.kernels[0] if facts["shared"] else stored.kernels
    est = kind(kernel=kernel, **{name: facts[name] for name in PARAMETERS if name in facts})
    est.precomputed_, est.n_features_in_, est._n_features_out = precomputed, facts["n_features_in"], est.n_components
    est._to_numpy, est._more = True, None
    est._model, est._solution = stored.model, stored.solution
    est.route_ = Route(facts["route"] if isinstance(stored.model, Stream) else "exact", "loaded from a file")
    if not precomputed:
        est.kernel_ = kernel
    return est


def read(path: str | Path, largest: int) -> Stored:
    """Read a file written by `KernelSSL.save`; the error says what is wrong with it."""
    arrays = load_arrays(path, largest)
    try:
        facts = json.loads(str(_array(arrays, "facts", "U", ())))
        if not isinstance(facts, dict):
            raise InputError("facts", "must be a JSON object", type(facts).__name__)
        if facts["format"] not in FORMATS or isinstance(facts["format"], bool):
            raise InputError("format", "must be 1 or 2", facts["format"], "load it with the version that wrote it")
        _check_parameters(facts)
        return _stream(facts, arrays) if facts["format"] == STREAM else _exact(facts, arrays)
    except KeyError as error:
        reason = f"it lacks {error.args[0]}"
    except (ValueError, TypeError, RecursionError) as error:  # InputError is a ValueError
        reason = str(error)
    raise InputError(str(path), "must be a file written by KernelSSL.save", reason)


def _check_parameters(facts: dict[str, Any]) -> None:
    positive_int(facts["n_components"], "n_components")
    positive_int(facts["n_features_in"], "n_features_in")
    positive_int(facts["memory"], "memory", MOST_MEMORY)
    one_of(facts["dtype"], "dtype", ("float64", "float32"))
    one_of(facts["solver"], "solver", ("auto", *SOLVERS))
    flag(facts["shared"], "shared")
    newer: dict[str, Callable[[Any], object]] = {
        "method": lambda x: one_of(x, "method", METHODS),
        "n_features": lambda x: positive_int(x, "n_features", MOST_FEATURES),
        "landmarks": lambda x: one_of(x, "landmarks", CHOICES),
        "random_state": lambda x: seed(x, "random_state"),
    }
    for name, check in newer.items():
        if facts["format"] == STREAM or name in facts:  # models of all points were saved before there were others
            check(facts[name])


def _exact(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Stored:
    d, features, shared = facts["n_components"], facts["n_features_in"], facts["shared"]
    swaps = flag(facts["swaps"], "swaps")
    _check_solution(facts["solution"])
    eigenvalues = _spectrum(arrays, "eigenvalues", d)
    coefficients = _array(arrays, "dual_coef", "f", (None, d))
    solution = Solution(eigenvalues, coefficients, *facts["solution"])
    points = len(coefficients)
    if points < d or (swaps and points % 2):
        raise InputError("dual_coef", f"must have a row per point, at least {d}, two per pair", points)
    if facts["kernels"] == "precomputed":
        if not (swaps and shared and features == points):
            raise InputError("n_features_in", f"must be {points}, the number of points", features)
        return Stored(facts, (), Given(solution, _more(facts, arrays, points), facts["dtype"]), solution)
    kernels = _kernels(facts["kernels"], 2 if swaps else 1, shared)
    rows, other = points // len(kernels), features if shared else None
    parts = tuple(_array(arrays, f"part{i}", "f", (rows, features if i == 0 else other)) for i in range(len(kernels)))
    if "more_eigenvalues" in arrays:
        solution = dataclasses.replace(solution, more=_more(facts, arrays, points))
    blocks = Blocks(parts, kernels, shared, facts["dtype"])
    return Stored(facts, kernels, Exact(blocks, swaps, facts["solver"], facts["memory"]), solution)


def _more(facts: dict[str, Any], arrays: dict[str, np.ndarray], points: int) -> Solution:
    gamma = _spectrum(arrays, "more_eigenvalues", None)
    if len(gamma) < facts["n_components"]:
        raise InputError("more_eigenvalues", f"must be at least {facts['n_components']}", len(gamma))
    return Solution(gamma, _array(arrays, "more_coef", "f", (points, len(gamma))), *facts["solution"])


def _stream(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> Stored:
    one_of(facts["route"], "route", METHODS[1:])
    shared, features_b = facts["shared"], facts["features_b"]
    kernels = _kernels(facts["kernels"], 1 if shared else 2, shared)
    names = facts["maps"]
    if not isinstance(names, list) or len(names) != len(kernels):
        raise InputError("maps", f"must be a list of {len(kernels)}, one per kernel", names)
    if (features_b is None) != shared:
        raise InputError("features_b", "must be given for two modalities, and only for them", features_b)
    features = [facts["n_features_in"], *([] if shared else [positive_int(features_b, "features_b")])]
    maps = tuple(
        _map(names[i], kernel, arrays, f"map{i}", features[i], facts["dtype"]) for i, kernel in enumerate(kernels)
    )
    widths = [width(one, n) for one, n in zip(maps, features, strict=True)]
    positive_int(facts["n_components"], "n_components", min(widths), "as many as features")
    sums = _sums(arrays, widths)
    batches = set() if sums is None else set(_array(arrays, "batches", "i", (None,)).tolist())
    return Stored(facts, kernels, Stream(facts["route"], maps, features_b, sums, batches), None)


def _map(
    name: Any, kernel: AbstractKernel, arrays: dict[str, np.ndarray], stem: str, features: int, dtype: str
) -> AbstractMap:
    """A map, if its arrays have the right shapes and its kernel can have such features."""
    kind = MAPS[one_of(name, "maps", MAPS)]
    if not kind.suits(kernel):
        raise InputError("maps", f"must suit the kernel {type(kernel).__name__}", name)
    found: list[np.ndarray] = []
    for i, wanted in enumerate(kind.shapes(features)):
        shape = tuple(found[0].shape[-1] if n == -1 else n for n in wanted)
        found.append(_array(arrays, f"{stem}_{i}", "f", shape))
        if found[-1].dtype != np.dtype(dtype):
            raise InputError(f"{stem}_{i}", f"must be {dtype}", found[-1].dtype)
        if kind is not Landmarks and np.abs(found[-1]).max() > MOST_WEIGHT:
            raise InputError(f"{stem}_{i}", f"must be at most {MOST_WEIGHT:g} in magnitude", np.abs(found[-1]).max())
    one = restore_map(name, kernel, dtype, found)
    if isinstance(one, Landmarks):
        _ = one.whitening  # the kernel must be positive semidefinite on them
    return one


def _sums(arrays: dict[str, np.ndarray], widths: list[int]) -> PairSums | None:
    if "cross" not in arrays and "pairs" not in arrays:
        return None
    cross = _array(arrays, "cross", "f", (widths[0], widths[-1]))
    if cross.dtype != np.float64:
        raise InputError("cross", "must be float64", cross.dtype)
    return PairSums(cross, positive_int(_array(arrays, "pairs", "i", ())[()], "pairs", MOST_PAIRS))


def _array(arrays: dict[str, np.ndarray], name: str, kind: str, shape: tuple[int | None, ...]) -> np.ndarray:
    """An array of this kind and shape (None: any length but 0), whose numbers are finite."""
    x = arrays[name]
    fits = x.ndim == len(shape) and all(n == (m or n) > 0 for n, m in zip(x.shape, shape, strict=True))
    if x.dtype.kind != kind or (kind == "f" and x.itemsize not in (4, 8)) or not fits:
        wanted = str(shape).replace("None", "any")
        text = {"U": "text", "i": "a whole number" if shape == () else "whole numbers"}.get(
            kind, f"float64 or float32 of shape {wanted}"
        )
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
