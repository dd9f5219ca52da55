"""From a user's arrays to a model: checks, devices, and the three ways in which `KernelSSL` is fitted."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import validate_data

from stairwise.checks import InputError, is_tensor, positive_int
from stairwise.kernel.arrays import Matrix, alike, checked, namespace, stack, unread, validated
from stairwise.kernel.kernels import Kernel, linear, resolve
from stairwise.kernel.landmarks import candidates
from stairwise.kernel.maps import width
from stairwise.kernel.models import Exact, Given, Stream, shared_maps, start_stream, stream_over
from stairwise.kernel.operators import Blocks, DensePairs
from stairwise.kernel.processes import place, require_same
from stairwise.kernel.routes import SPARE, Route, Size, choose_route
from stairwise.kernel.solvers import solve
from stairwise.progress import Progress

if TYPE_CHECKING:
    from stairwise.kernel.estimator import KernelSSL

SAMPLE = 1000  # points from which a kernel's scale is estimated


def planned(est: "KernelSSL", X: Any, X_b: object) -> Route:
    """The route of `fit`, from the shapes of X and X_b alone."""
    n, m = _shape(X, "X")
    modalities = 2 if two_modalities(est) else 1
    if X_b is not None and not is_precomputed(est):
        rows_b, m_b = _shape(X_b, "X_b")
        m = m + m_b if modalities == 2 and is_linear(est) else m
        require_as_many(n, rows_b or n)  # the fit refuses empty ones
    require_kernels(est, X_b)
    points = max(1, n if X_b is None else 2 * n)
    modes = min(est.n_components, points)
    size = Size(points, m, modes, est.n_features, est.dtype, est.memory, place()[1], modalities)
    return choose_route(est.method, size, est.solver, is_linear(est), is_precomputed(est))


def _shape(X: Any, name: str) -> tuple[int, int]:
    """Of anything that has one; the fit reads and checks it."""
    known = getattr(X, "shape", None)
    rows, columns = known if isinstance(known, tuple) and len(known) == 2 else unread(X, name).shape
    return int(rows), int(columns)


def is_precomputed(est: "KernelSSL") -> bool:
    return isinstance(est.kernel, str) and est.kernel == "precomputed"


def is_linear(est: "KernelSSL") -> bool:
    """Whether all kernels are linear, so that finite features are exact."""
    kernels = est.kernel if two_modalities(est) else [est.kernel]
    return all(isinstance(kernel, linear) or (isinstance(kernel, str) and kernel == "linear") for kernel in kernels)


def placed(est: "KernelSSL", X: Matrix, name: str) -> Matrix:
    """Rows as a finite matrix of floats on the device."""
    if est.device is None:
        return checked(X, est.dtype, name)
    import torch

    from stairwise.distributed import choose_device

    device = choose_device(est.device)
    return checked(alike(X, torch.empty(0, device=device), est.dtype), est.dtype, name)


def require_pairs(est: "KernelSSL", a: Any, b: Any) -> None:
    """Raise an error unless rows of a and b can be pairs."""
    if is_tensor(a) != is_tensor(b) or (is_tensor(a) and a.device != b.device):
        raise InputError("X and X_b", "must both be numpy arrays, or torch tensors on one device")
    require_as_many(len(a), len(b))
    if not two_modalities(est) and a.shape[1] != b.shape[1]:
        rule = "must have the same number of features for one kernel"
        raise InputError("X and X_b", rule, f"{a.shape[1]} and {b.shape[1]}", "give a pair of kernels")


def require_as_many(rows_a: int, rows_b: int) -> None:
    if rows_a != rows_b:
        raise InputError("X and X_b", "must have the same number of rows", f"{rows_a} and {rows_b}")


def two_modalities(est: "KernelSSL") -> bool:
    return isinstance(est.kernel, tuple | list)


def require_kernels(est: "KernelSSL", X_b: object) -> None:
    if two_modalities(est) and (len(est.kernel) != 2 or X_b is None):
        raise InputError("kernel", "as a pair needs two kernels and X_b", est.kernel, "or one kernel for both views")


def fit_precomputed(est: "KernelSSL", X: ArrayLike, X_b: ArrayLike | None) -> Given:
    if X_b is not None:
        raise InputError("X_b", 'must be None for kernel="precomputed"', None, "X is already K̃ of both views")
    given = str(getattr(X, "dtype", "float64"))
    K = validated(est, X, reset=True)
    xp = namespace(K)
    if K.shape[0] != K.shape[1]:
        raise InputError("X", "must be a square kernel matrix", f"shape {tuple(K.shape)}", "or choose a kernel=")
    if K.shape[0] % 2:
        raise InputError("X", "must have an even number of rows: K̃ of x_1 … x_n, x'_1 … x'_n", K.shape[0])
    scale = float(abs(K).max())
    if float(abs(K - K.T).max()) > 1e-8 * scale + 100 * float(xp.finfo(K.dtype).eps) * scale:
        raise InputError("X", "must be a symmetric kernel matrix", None, "symmetrize it: (K + K.T) / 2")
    single = given.endswith(("float32", "float16"))
    pairs = DensePairs((K + K.T) / 2, swaps=True, precision=float(np.finfo(np.float32).eps) if single else 0.0)
    if pairs.size <= 5000:  # beyond, the solver notices
        pairs.refuse_indefinite("X")
    found = solve(pairs, est.n_components, est.solver, spare=SPARE)
    more = found.more or solve(pairs, min(est.n_components + SPARE, pairs.size), est.solver, at_most=True)
    return Given(found, more, est.dtype)


def fit_exact(est: "KernelSSL", X: ArrayLike, X_b: ArrayLike | None) -> Exact:
    a = validated(est, X, reset=True)
    require_kernels(est, X_b)
    if X_b is not None:
        b = checked(X_b, est.dtype, "X_b")
        require_pairs(est, a, b)
    parts = (placed(est, a, "X"),) if X_b is None else (placed(est, a, "X"), placed(est, b, "X_b"))
    if two_modalities(est):
        kernels = tuple(resolve(kernel, part) for kernel, part in zip(est.kernel, parts, strict=True))
        est.kernel_ = kernels
    else:
        est.kernel_ = resolve(est.kernel, parts[0] if X_b is None else stack(list(parts)))
        kernels = (est.kernel_,) * len(parts)
    _require_same_data(parts[0], parts[-1])
    return Exact(Blocks(parts, kernels, not two_modalities(est), est.dtype), X_b is not None, est.solver, est.memory)


def fit_stream(est: "KernelSSL", X: ArrayLike, X_b: ArrayLike | None, progress: Progress) -> Stream:
    """Maps from a sample of all points, then sums over all pairs, chunk by chunk."""
    a = unread(X, "X")
    if not is_tensor(X):
        validate_data(est, X, skip_check_array=True)  # names of columns
    est.n_features_in_ = a.shape[1]
    b = a if X_b is None else unread(X_b, "X_b")
    require_pairs(est, a, b)
    model = started(est, est.route_.method, a, b)
    _require_same_data(*(x for one in model.maps for x in one.arrays()), placed(est, a[:SAMPLE], "X"))
    stream_over(model, a, b, lambda rows, name: placed(est, rows, name), progress)
    return model


def batch(est: "KernelSSL", X: ArrayLike, X_b: ArrayLike | None, first: bool) -> tuple[Matrix, Matrix]:
    """Pairs for `partial_fit`, checked and on the device."""
    if is_precomputed(est) or (est.method == "exact" and not is_linear(est)):
        raise InputError("method", "must not be exact for partial_fit", est.method, 'use "nystroem" or "features"')
    a = validated(est, X, reset=first)
    require_kernels(est, X_b)
    if X_b is None:
        same = placed(est, a, "X")
        return same, same
    b = checked(X_b, est.dtype, "X_b")
    require_pairs(est, a, b)
    return placed(est, a, "X"), placed(est, b, "X_b")


def first_stream(est: "KernelSSL", a: Matrix, b: Matrix) -> Stream:
    """Maps of the first batch, the same in all processes."""
    return shared_maps(started(est, "nystroem" if est.method in ("auto", "exact") else est.method, a, b))


def started(est: "KernelSSL", method: str, a: Matrix, b: Matrix) -> Stream:
    """Maps without sums. Points of one map come from both views."""
    views = [[a], [b]] if two_modalities(est) else [[a] if b is a else [a, b]]
    given = est.kernel if two_modalities(est) else [est.kernel]
    count, rng = est.n_features, np.random.default_rng(est.random_state)
    kernels: list[Kernel] = []
    pools = []
    for kernel, parts in zip(given, views, strict=True):
        points = sum(len(part) for part in parts)
        spaced = np.linspace(0, points - 1, min(points, SAMPLE)).astype(int)
        sample = placed(est, _rows(parts, spaced), "X")
        kernels.append(resolve(kernel, sample))
        wanted = min(points, candidates(est.landmarks, count))
        chosen = np.sort(rng.choice(points, wanted, replace=False))
        pools.append(placed(est, _rows(parts, chosen), "X") if method == "nystroem" else sample)
    est.kernel_ = tuple(kernels) if two_modalities(est) else kernels[0]
    how = "uniform" if method == "features" else est.landmarks
    model = start_stream(
        method, tuple(kernels), pools, count=count, dtype=est.dtype, how=how, seed=int(est.random_state)
    )
    most = min(width(one, pool.shape[1]) for one, pool in zip(model.maps, pools, strict=True))
    positive_int(est.n_components, "n_components", most, f"there are {most} landmarks or features")
    return model


def _rows(parts: list[Matrix], rows: np.ndarray) -> Matrix:
    """Rows of all parts together, by increasing numbers."""
    first = len(parts[0])
    if len(parts) == 1:
        return parts[0][rows]
    return stack([parts[0][rows[rows < first]], parts[1][rows[rows >= first] - first]])


def _require_same_data(*parts: Matrix) -> None:
    sizes = np.array([float(abs(part[:SAMPLE]).sum()) + len(part) for part in parts])
    require_same(sizes, "X and X_b", "must be the same in all processes", parts[0])
