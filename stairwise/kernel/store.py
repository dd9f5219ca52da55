"""`KernelSSL` on disk: one .npz file, without pickled objects."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stairwise.checks import InputError
from stairwise.files import load_arrays, plain, save_arrays
from stairwise.kernel.arrays import as_numpy
from stairwise.kernel.kernels import KERNELS, describe
from stairwise.kernel.maps import restore_map
from stairwise.kernel.models import AbstractModel, Exact, Given, Stream
from stairwise.kernel.operators import Blocks
from stairwise.kernel.routes import Route
from stairwise.kernel.solvers import Solution
from stairwise.kernel.sums import PairSums

if TYPE_CHECKING:
    from stairwise.kernel.estimator import KernelSSL

FORMATS = (1, 2)  # of the exact models and of the streams
PARAMETERS = ("n_components", "method", "solver", "dtype", "memory", "n_features", "landmarks", "random_state")


def save(est: "KernelSSL", path: str | Path) -> None:
    model = est._model
    shape = _stream(model) if isinstance(model, Stream) else _exact(est, model)
    facts, arrays = shape
    facts |= {name: getattr(est, name) for name in PARAMETERS} | {"n_features_in": est.n_features_in_}
    save_arrays(path, {"facts": np.array(json.dumps(plain(facts))), **arrays})


def _exact(est: "KernelSSL", model: AbstractModel) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    solution = est.solution_
    facts: dict[str, Any] = {"format": 1, "solution": _accuracy(solution)}
    arrays = {"eigenvalues": solution.eigenvalues, "dual_coef": as_numpy(solution.coefficients)}
    if isinstance(model, Given):
        facts |= {"kernels": "precomputed", "shared": True, "swaps": True}
        more = {"more_eigenvalues": model.more.eigenvalues, "more_coef": as_numpy(model.more.coefficients)}
        return facts, arrays | more
    assert isinstance(model, Exact)
    kernels = [describe(kernel) for kernel in model.blocks.kernels]
    facts |= {"kernels": kernels, "shared": model.blocks.shared, "swaps": model.swaps}
    return facts, arrays | {f"part{i}": as_numpy(part) for i, part in enumerate(model.blocks.parts)}


def _stream(model: Stream) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Maps and sums, so that pairs can be added later."""
    kernels = [describe(one.kernel) for one in model.maps]
    names = [type(one).__name__ for one in model.maps]
    facts: dict[str, Any] = {
        "format": 2,
        "kernels": kernels,
        "maps": names,
        "route": model.method,
        "shared": len(kernels) == 1,
    }
    facts["features_b"] = model.features_b
    arrays = {f"map{i}_{j}": as_numpy(x) for i, one in enumerate(model.maps) for j, x in enumerate(one.arrays())}
    if model.sums is not None:
        arrays |= {"cross": as_numpy(model.sums.cross), "pairs": np.array(model.sums.pairs)}
    return facts, arrays


def load(kind: type["KernelSSL"], path: str | Path) -> "KernelSSL":
    stored = load_arrays(path)
    try:
        facts = json.loads(str(stored["facts"]))
        if facts["format"] not in FORMATS:
            raise InputError(
                str(path), "must have format 1 or 2", facts["format"], "load it with the version that wrote it"
            )
        return _restored(kind, stored, facts)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(str(path), "must be a file written by KernelSSL.save", repr(error)) from error


def _restored(kind: type["KernelSSL"], stored: dict[str, np.ndarray], facts: dict[str, Any]) -> "KernelSSL":
    precomputed = facts["kernels"] == "precomputed"
    kernels = () if precomputed else tuple(KERNELS[name](**values) for name, values in facts["kernels"])
    kernel = "precomputed" if precomputed else kernels[0] if facts["shared"] else kernels
    est = kind(kernel=kernel, **{name: facts[name] for name in PARAMETERS if name in facts})
    est.precomputed_, est.n_features_in_, est._n_features_out = precomputed, facts["n_features_in"], est.n_components
    est._to_numpy, est._more, est._solution = True, None, None
    if not precomputed:
        est.kernel_ = kernel
    if facts["format"] == 2:
        est._model, est.route_ = (
            _restored_stream(stored, facts, kernels),
            Route(facts["route"], "loaded from a file", 0),
        )
        return est
    est.route_ = Route("exact", "loaded from a file", 0)
    est._solution = Solution(stored["eigenvalues"], stored["dual_coef"], *facts["solution"])
    if precomputed:
        more = Solution(stored["more_eigenvalues"], stored["more_coef"], *facts["solution"])
        est._model = Given(est._solution, more, est.dtype)
    else:
        parts = tuple(stored[f"part{i}"] for i in range(len(kernels)))
        blocks = Blocks(parts, kernels, facts["shared"], facts["dtype"])
        est._model = Exact(blocks, facts["swaps"], est.solver, est.memory)
    return est


def _restored_stream(stored: dict[str, np.ndarray], facts: dict[str, Any], kernels: tuple) -> Stream:
    maps = []
    for i, (name, kernel) in enumerate(zip(facts["maps"], kernels, strict=True)):
        arrays = [stored[key] for key in sorted(key for key in stored if key.startswith(f"map{i}_"))]
        maps.append(restore_map(name, kernel, facts["dtype"], arrays))
    sums = PairSums(stored["cross"], int(stored["pairs"])) if "cross" in stored else None
    return Stream(facts["route"], tuple(maps), facts["features_b"], sums)


def _accuracy(solution: Solution) -> list[Any]:
    return [solution.residual, solution.products, solution.solver, solution.precision]
