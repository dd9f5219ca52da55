"""From accumulated moments to spectra: numpy, on the CPU."""

from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from stairwise.checks import InputError

__all__ = ["ONES", "Spectrum", "decompose", "decompose_on_one_core"]

Floats = NDArray[np.float64]

ONES = 8  # columns of ones next to the data; one would do, eight keep rows aligned, which GPUs multiply faster
ONE_AT_A_TIME = Lock()  # the number of BLAS threads is one for the whole process


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues, descending.

    Attributes:
        samples: pairs behind them.
        eigenvalues: of C = Σ (z_a z_bᵀ + z_b z_aᵀ)/2N (Eq. 3), (d,); can be negative.
        covariance: of the centred covariance of both views together (divided by 2N − 1), (d,). Variances below about
            1e-10 of the mean's square lose digits.
        normalized: of C after each dimension of each view is standardized (Barlow Twins' batch norm), (d,), if asked.
        hidden: of the centred covariance of the representations, (features,), where they were given.
        mean_square: ‖mean of z‖²; far above the covariance where all embeddings are nearly one point.
        leading: both views of some pairs of the last batch in their two leading modes, (2, pairs, 2).
        skipped: batches left out so far because they were not finite.
        first_skipped: number of the first of them, counted from 1; 0: none.
    """

    samples: int
    eigenvalues: Floats
    covariance: Floats
    normalized: Floats | None = None
    hidden: Floats | None = None
    mean_square: float = 0.0
    leading: Floats | None = None
    skipped: int = 0
    first_skipped: int = 0


def decompose(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """Spectra of accumulated sums."""
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
        _leading(sums["sample"]) if "sample" in sums else None,
        int(skipped),
        int(first_skipped),
    )


def decompose_on_one_core(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """`decompose` on one core, for a thread beside a training loop, which needs the others.

    Only numpy's own BLAS is held back; torch's threads are its own.
    """
    with ONE_AT_A_TIME, _openblas().limit(limits=1):
        return decompose(sums, normalized)


@cache
def _openblas() -> Any:
    return ThreadpoolController().select(internal_api="openblas")  # looks at all libraries of the process


def _hidden(sums: Floats) -> Floats:
    m = float(sums[-1, -1])
    return _descending(_covariance(sums[:-ONES, :-ONES] / m, sums[-1, :-ONES] / m, m))


def _leading(sample: Floats) -> Floats | None:
    """Pairs (2, K, d) in the two leading modes of their covariance, (2, K, 2); the larger tail points to the right."""
    views, pairs, d = sample.shape
    flat = np.asarray(sample, dtype=np.float64).reshape(-1, d)
    if not np.isfinite(flat).all() or min(pairs, d) < 2:
        return None
    try:
        U, scale, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    except np.linalg.LinAlgError:  # a picture can be missed
        return None
    found = U[:, :2] * scale[:2]
    found = found * np.where((found**3).sum(axis=0) < 0, -1.0, 1.0)
    return np.asarray(found.reshape(views, pairs, 2))


def _standardized(z: Floats, mean: Floats, d: int) -> Floats:
    """The correlation of standardized views; 0 for dimensions without variance."""
    variance = np.diag(z)[: 2 * d] - mean[: 2 * d] ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sqrt(variance)
        normed = (z[:d, d : 2 * d] - np.outer(mean[:d], mean[d : 2 * d])) / np.outer(spread[:d], spread[d:])
    return np.nan_to_num(normed, posinf=0, neginf=0)


def _covariance(second: Floats, mean: Floats, n: float) -> Floats:
    """Unbiased, from the means of squares and of values over n samples."""
    out: Floats = (second - np.outer(mean, mean)) * (n / (n - 1))
    return out


def _descending(matrix: Floats) -> Floats:
    """Eigenvalues of the symmetric part."""
    symmetric = (matrix + matrix.T) / 2
    try:
        values = np.linalg.eigvalsh(symmetric)
    except np.linalg.LinAlgError:  # did not converge: another algorithm
        values = scipy.linalg.eigh(symmetric, eigvals_only=True, driver="ev")
    return np.asarray(values[::-1], dtype=np.float64)
