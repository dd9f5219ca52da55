"""Compute spectra from accumulated moments, with numpy on the CPU."""

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
        directions: of E[uuᵀ] with u = z/‖z‖, not centred, (d,); their sum is 1.
        positive, negative: mean cosine of the two views of a sample, and of views of different samples.
        batch: number of pairs in the last batch, of all processes together.
        leading: both views of some pairs of the last batch, projected onto their two leading modes, (2, pairs, 2).
        skipped: number of batches left out so far because they were not finite.
        first_skipped: number of the first such batch, counted from 1; 0 if there is none.
    """

    samples: int
    eigenvalues: Floats
    covariance: Floats
    normalized: Floats | None = None
    hidden: Floats | None = None
    mean_square: float = 0.0
    directions: Floats | None = None
    positive: float | None = None
    negative: float | None = None
    batch: int | None = None
    leading: Floats | None = None
    skipped: int = 0
    first_skipped: int = 0


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
        *_similarities(sums.get("uu")),
        int(sums["batch"][0]) if "batch" in sums else None,
        _leading(sums["sample"]) if "sample" in sums else None,
        int(skipped),
        int(first_skipped),
    )


def decompose_on_one_core(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """Run `decompose` on one core, so that it does not slow down a training loop in another thread.

    This limits the BLAS of numpy only, not the threads of torch.
    """
    with BLAS_LOCK, _openblas().limit(limits=1):
        return decompose(sums, normalized)


@cache
def _openblas() -> Any:
    return ThreadpoolController().select(internal_api="openblas")  # cached: scans all loaded libraries


def _hidden(sums: Floats) -> Floats:
    m = float(sums[-1, -1])
    return _descending(_covariance(sums[:-ONES, :-ONES] / m, sums[-1, :-ONES] / m, m))


def _similarities(sums: Floats | None) -> tuple[Floats | None, float | None, float | None]:
    """Spectrum of the directions, and mean cosines of positive and negative pairs, from sums over 2N unit vectors."""
    if sums is None or sums[-1, -1] < 4:
        return None, None, None
    d, m = len(sums) - ONES, float(sums[-1, -1])
    same = float(sums[-1, d])  # Σ cos over both orders of each pair
    square, length = float((sums[-1, :d] ** 2).sum()), float(np.trace(sums[:d, :d]))
    return _descending(sums[:d, :d] / m), same / m, (square - length - same) / (m * (m - 2))


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
