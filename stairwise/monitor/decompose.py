"""Compute spectra from accumulated moments, with numpy on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from stairwise.checks import InputError

Floats = NDArray[np.float64]

# sums over pairs of views: number of batches and of pairs, Σ ‖a‖²‖b‖², Σ (a·b)², Σ Σ_i a_i²b_i², and of each view
# centred in its batch Σ ‖z‖⁴ and Σ Σ_i z_i⁴
PAIRS = ("batches", "pairs", "norms", "dots", "entries", "fourth", "fourth_entries")
ONES = 8  # columns of ones next to the data; one is enough, but eight keep rows aligned, which is faster on GPUs
BLAS_LOCK = Lock()  # the number of BLAS threads is a setting of the whole process


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Spectra of embeddings; all eigenvalues in descending order.

    Attributes:
        samples: number of pairs that were accumulated.
        eigenvalues: of C = Σ (z_a z_bᵀ + z_b z_aᵀ)/2N (Eq. 3), (d,); they can be negative.
        covariance: of the centred covariance of both views together (divided by 2N − 1), (d,). Variances smaller than
            about 1e-10 times the squared mean lose digits.
        normalized: of C after standardizing each dimension of each view (Barlow Twins' batch norm), (d,), if requested.
        hidden: of the centred covariance of the representations, (features,); None if not given.
        mean_square: ‖mean of z‖²; much larger than the covariance if all embeddings are nearly the same point.
        positive, negative: mean cosine of the two views of a sample, and of views of different samples.
        leading: both views of some pairs of the last batch, projected onto their two leading modes, (2, pairs, 2).
        skipped: number of batches left out so far because they were not finite.
        first_skipped: number of the first such batch, counted from 1; 0 if there is none.
        correlations: of the two views, mode by mode, centred: eigenvalues of C relative to the covariance, (d,), with
            the spread that comes from few samples taken off; None if there are fewer than 4 d pairs.
        batch: mean number of pairs per batch, over all processes.
        scatter_diagonal, scatter_symmetric, scatter_plain: how much one pair's contribution to C varies, summed over
            the diagonal entries, and over the others with C symmetric or z_a z_bᵀ. Divided by the batch, it is
            sampling noise (`theory.batch_noise`).
        scatter_covariance: the same for the off-diagonal entries of the covariance of one view.
    """

    samples: int
    eigenvalues: Floats
    covariance: Floats
    normalized: Floats | None = None
    hidden: Floats | None = None
    mean_square: float = 0.0
    positive: float | None = None
    negative: float | None = None
    leading: Floats | None = None
    skipped: int = 0
    first_skipped: int = 0
    correlations: Floats | None = None
    batch: int | None = None
    scatter_diagonal: float | None = None
    scatter_symmetric: float | None = None
    scatter_plain: float | None = None
    scatter_covariance: float | None = None


def decompose(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """Compute the spectra of accumulated sums."""
    n = float(sums["zz"][-1, -1]) if "zz" in sums else 0.0
    if n < 2:
        raise InputError("monitor", "must have seen at least two pairs", int(n), "update() it first")
    d = (len(sums["zz"]) - ONES) // 2
    a, b = slice(0, d), slice(d, 2 * d)
    z, mean = sums["zz"] / n, sums["zz"][-1] / n
    _, skipped, first_skipped = sums.get("flaws", np.zeros(3))
    return Spectrum(
        round(n),
        _descending(z[a, b]),
        _descending(_covariance((z[a, a] + z[b, b]) / 2, (mean[a] + mean[b]) / 2, 2 * n)),
        _descending(_standardized(z, mean, d)) if normalized else None,
        _hidden(sums["hh"]) if "hh" in sums and sums["hh"][-1, -1] >= 2 else None,
        float((((mean[a] + mean[b]) / 2) ** 2).sum()),
        *_similarities(sums.get("u")),
        _leading(sums["sample"]) if "sample" in sums else None,
        int(skipped),
        int(first_skipped),
        _correlations(z, mean, d, n),
        **_scatter(sums["pairs"], z, mean, d) if "pairs" in sums else {},
    )


def decompose_on_one_core(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """Run `decompose` on one core, so that it does not slow down a training loop in another thread.

    This limits the BLAS of numpy only, not the threads of torch.
    """
    with one_core():
        return decompose(sums, normalized)


@contextmanager
def one_core() -> Iterator[None]:
    """Limit numpy's BLAS to one core."""
    with BLAS_LOCK, _openblas().limit(limits=1):
        yield


@cache
def _openblas() -> Any:
    return ThreadpoolController().select(internal_api="openblas")  # cached: scans all loaded libraries


def _correlations(z: Floats, mean: Floats, d: int, n: float) -> Floats | None:
    """Correlations ρ of the views, centred, as eigenvalues of C relative to the covariance.

    A finite sample spreads them by d (1 − ρ²)²/2n (variance, if all ρ were equal); the spread around their mean is
    reduced by as much.
    """
    if n < 4 * d:
        return None
    second = z[: 2 * d, : 2 * d] - np.outer(mean[: 2 * d], mean[: 2 * d])
    both = (second[:d, :d] + second[d:, d:]) / 2
    cross = (second[:d, d:] + second[d:, :d]) / 2
    floor = 1e-9 * np.trace(both) / d
    try:
        rho = scipy.linalg.eigh(cross, both + floor * np.eye(d), eigvals_only=True)[::-1]
    except (np.linalg.LinAlgError, ValueError):  # collapsed: there is nothing to correlate
        return None
    spread = d * ((1 - rho**2) ** 2).mean() / (2 * n)
    kept = np.sqrt(max(0.0, 1 - spread / max(rho.var(), 1e-300)))
    return np.asarray(np.clip(rho.mean() + kept * (rho - rho.mean()), -1, 1), dtype=np.float64)


def _scatter(sums: Floats, z: Floats, mean: Floats, d: int) -> dict[str, Any]:
    """Mean batch size and scatter of C and of the covariance: E‖x‖² − ‖E x‖² of one pair's contribution x."""
    of = dict(zip(PAIRS, sums.tolist(), strict=True))
    batches, pairs = of["batches"], of["pairs"]
    if pairs == 0 or batches == 0:
        return {}
    norms, dots, entries, fourth, fourth_entries = (of[name] / pairs for name in PAIRS[2:])
    C = z[:d, d : 2 * d]
    diagonal = entries - (np.diag(C) ** 2).sum()
    size = pairs / batches
    unbiased = size / (size - 1) if size > 1 else 1.0  # each batch was centred on its own mean
    redundant = 0.0
    for view in (slice(0, d), slice(d, 2 * d)):
        covariance = z[view, view] - np.outer(mean[view], mean[view])
        redundant += ((covariance**2).sum() - (np.diag(covariance) ** 2).sum()) / 2
    return {
        "batch": round(size),
        "scatter_diagonal": diagonal,
        "scatter_symmetric": (norms + dots) / 2 - (((C + C.T) / 2) ** 2).sum() - diagonal,
        "scatter_plain": norms - (C**2).sum() - diagonal,
        "scatter_covariance": (fourth - fourth_entries) * unbiased**2 - redundant,
    }


def _hidden(sums: Floats) -> Floats:
    m = float(sums[-1, -1])
    return _descending(_covariance(sums[:-ONES, :-ONES] / m, sums[-1, :-ONES] / m, m))


def _similarities(sums: Floats | None) -> tuple[float | None, float | None]:
    """Mean cosines of positive and of negative pairs, from sums over 2N unit vectors."""
    if sums is None or sums[-1] < 4:
        return None, None
    m, same, square = float(sums[-1]), float(sums[-2]), float((sums[:-2] ** 2).sum())
    return same / m, (square - m - same) / (m * (m - 2))


def _leading(sample: Floats) -> Floats | None:
    """Project pairs (2, K, d) onto their two leading modes, (2, K, 2); signs make the skewness positive."""
    views, pairs, d = sample.shape
    flat = np.asarray(sample, dtype=np.float64).reshape(-1, d)
    if not np.isfinite(flat).all() or min(pairs, d) < 2:
        return None
    try:
        U, scale, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    except np.linalg.LinAlgError:  # only a picture is lost
        return None
    projected = U[:, :2] * scale[:2]
    projected = projected * np.where((projected**3).sum(axis=0) < 0, -1.0, 1.0)
    return np.asarray(projected.reshape(views, pairs, 2))


def _standardized(z: Floats, mean: Floats, d: int) -> Floats:
    """Cross-correlation of the standardized views; 0 for dimensions without variance."""
    variance = np.diag(z)[: 2 * d] - mean[: 2 * d] ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt(variance)
        normed = (z[:d, d : 2 * d] - np.outer(mean[:d], mean[d : 2 * d])) / np.outer(spread[:d], spread[d:])
    return np.nan_to_num(normed, posinf=0, neginf=0)


def _covariance(second: Floats, mean: Floats, n: float) -> Floats:
    """Unbiased covariance from second moments and means over n samples."""
    out: Floats = (second - np.outer(mean, mean)) * (n / (n - 1))
    return out


def _descending(matrix: Floats) -> Floats:
    """Eigenvalues of the symmetric part, in descending order."""
    symmetric = (matrix + matrix.T) / 2
    try:
        values = np.linalg.eigvalsh(symmetric)
    except np.linalg.LinAlgError:  # no convergence: try another algorithm
        values = scipy.linalg.eigh(symmetric, eigvals_only=True, driver="ev")
    return np.asarray(values[::-1], dtype=np.float64)
