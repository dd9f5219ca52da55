"""Compute spectra from accumulated moments, or from small matrices made of them, with numpy on the CPU."""

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
from stairwise.monitor.moments import KEPT, ONES

Floats = NDArray[np.float64]

# sums over pairs of views: number of batches and of pairs, Σ ‖a‖²‖b‖², Σ (a·b)², Σ Σ_i a_i²b_i², and of each view
# centred in its batch Σ ‖z‖⁴ and Σ Σ_i z_i⁴
PAIRS = ("batches", "pairs", "norms", "dots", "entries", "fourth", "fourth_entries")
EPSILON = 1e-7  # added to the shares of the singular values in RankMe, as published; stable-pretraining has 1e-5
DELTA, SMALL = 1e-4, 1e-8  # LiDAR: added to the covariance within samples, and to the eigenvalues
BLAS_LOCK = Lock()  # the number of BLAS threads is a setting of the whole process


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Spectra of embeddings; eigenvalues in descending order: all of them, or the leading ones of large embeddings.

    Attributes:
        samples: number of pairs that were accumulated.
        dimensions, hidden_dimensions: number of dimensions of z and h; a shorter spectrum holds the leading values.
        trace, variance, hidden_variance: sum of all eigenvalues of C, of the covariance and of `hidden`.
        normalized_trace: the same of `normalized`, if that holds the leading values only.
        eigenvalues: of C = Σ (z_a z_bᵀ + z_b z_aᵀ)/2N (Eq. 3), (d,); they can be negative. C is not centred:
            if the mean of z is large, the first eigenvalue is the mean's, about `mean_square`.
        covariance: of the centred covariance of both views together (divided by 2N − 1), (d,). Variances smaller than
            about 1e-10 times the squared mean lose digits.
        normalized: of C after standardizing each dimension of each view (Barlow Twins' batch norm), (d,), if requested.
        hidden: of the centred covariance of the representations, (features,); None if not given.
        mean_square: ‖mean of z‖²; much larger than the covariance if all embeddings are nearly the same point.
        positive, negative: mean cosine of the two views of a sample, and of views of different samples.
        leading: both views of some pairs of the last batch, projected onto their two leading modes, (2, pairs, 2).
        skipped: number of batches left out so far because they were not finite, or grew too much since the last record
            (`frames.Frames.usable`).
        first_skipped: number of the first such batch, counted from 1; 0 if there is none.
        correlations: of the two views, mode by mode, centred: eigenvalues of C relative to the covariance, (d,), with
            the spread that comes from few samples taken off; None if there are fewer than 4 d pairs.
        batch: mean number of pairs per batch, over all processes.
        scatter_diagonal, scatter_symmetric, scatter_plain: how much one pair's contribution to C varies, summed over
            the diagonal entries, and over the others with C symmetric or z_a z_bᵀ. Divided by the batch, it is
            sampling noise (`theory.batch_noise`).
            Whatever differs between the views, as if their roles had been swapped, counts as scatter.
        scatter_covariance: the same for the off-diagonal entries of the covariance of one view.
        rankme, hidden_rankme: RankMe as published: exp of the entropy of σ_j / Σ σ + 1e-7, where σ are the singular
            values of the embeddings, not centred; None if only the leading ones are known.
        lidar: LiDAR with two views per sample: exp of the entropy of the eigenvalues of the covariance between samples
            relative to that within samples; None likewise.
        std_of_l2_normalized: lightly's measure of collapse: standard deviation of z/‖z‖, mean over dimensions; 1/√d if
            directions are uniform, 0 if all are the same.
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
    dimensions: int | None = None
    hidden_dimensions: int | None = None
    trace: float | None = None
    variance: float | None = None
    normalized_trace: float | None = None
    hidden_variance: float | None = None
    rankme: float | None = None
    hidden_rankme: float | None = None
    lidar: float | None = None
    std_of_l2_normalized: float | None = None


def decompose(sums: dict[str, Floats], normalized: bool = False) -> Spectrum:
    """Compute the spectra of accumulated sums."""
    n = pairs_in(sums)
    _, skipped, first_skipped = sums.get("flaws", np.zeros(3))
    if n < 2:
        remedy = f"{skipped:.0f} batches were not finite" if skipped else "update() it first"
        raise InputError("monitor", "must have seen at least two pairs", round(n), remedy)
    return Spectrum(
        samples=round(n),
        **(_all_of_z(sums, n, normalized) if "uu" in sums else _leading_of_z(sums, n)),
        **_of_h(sums),
        **_directions(sums.get("directions")),
        leading=_picture(sums["sample"]) if "sample" in sums else None,
        skipped=int(skipped),
        first_skipped=int(first_skipped),
    )


def pairs_in(sums: dict[str, Floats]) -> float:
    """Number of pairs that were summed."""
    return float(sums["uu"][-1, -1]) if "uu" in sums else float(sums["z.facts"][0, 2, 0]) if "z.facts" in sums else 0.0


def _all_of_z(sums: dict[str, Floats], n: float, normalized: bool) -> dict[str, Any]:
    """All eigenvalues, from the second moments of u = z_a + z_b and v = z_a − z_b.

    C = (Σ u uᵀ − Σ v vᵀ) / 4n, and Σ (z_a z_aᵀ + z_b z_bᵀ) / 2n = (Σ u uᵀ + Σ v vᵀ) / 4n.
    """
    U, V = (sums[name][:-ONES, :-ONES] / n for name in ("uu", "vv"))
    mean_u, mean_v = (sums[name][-1, :-ONES] / n for name in ("uu", "vv"))
    C, second, mean = (U - V) / 4, (U + V) / 4, mean_u / 2
    covariance = _covariance(second, mean, 2 * n)
    return {
        "eigenvalues": _descending(C),
        "covariance": _descending(covariance),
        "normalized": _descending(_standardized(sums["ab"], mean_u, mean_v, n)) if normalized else None,
        "mean_square": float(mean @ mean),
        "dimensions": len(C),
        "trace": float(np.trace(C)),
        "variance": float(np.trace(covariance)),
        "correlations": _correlations(U - np.outer(mean_u, mean_u), V - np.outer(mean_v, mean_v), n),
        "rankme": _rankme(_descending(second), 2 * n),
        "lidar": _lidar(_covariance(U, mean_u, n) / 4, V / 2),
        **_scatter(sums.get("pairs"), C, second, mean),
    }


def _leading_of_z(sums: dict[str, Floats], n: float) -> dict[str, Any]:
    """The leading eigenvalues, and exact sums of all."""
    (squares_u, sum_u, _), (squares_v, _, _) = np.asarray(sums["z.facts"], dtype=np.float64)
    mean, centre = sum_u / (2 * n), np.asarray(sums["z.centre"], dtype=np.float64)  # the mean of z − centre
    unbiased = 2 * n / (2 * n - 1)
    trace, second = (float((squares_u + sign * squares_v).sum()) / (4 * n) for sign in (-1, 1))
    return {
        "eigenvalues": _leading(sums, "C"),
        "covariance": _leading(sums, "covariance") * unbiased,
        **_standardized_leading(sums, n),
        "mean_square": float((mean + centre) @ (mean + centre)),
        "dimensions": len(mean),
        "trace": trace + float((2 * mean + centre) @ centre),
        "variance": (second - float(mean @ mean)) * unbiased,
        "batch": round(float(sums["pairs"][1] / max(sums["pairs"][0], 1e-300))),
    }


def _standardized_leading(sums: dict[str, Floats], n: float) -> dict[str, Any]:
    """Leading eigenvalues and trace of C of standardized embeddings, if they were asked for."""
    if "ritz.normalized" not in sums:
        return {}
    (squares_u, sum_u, _), (squares_v, sum_v, _) = np.asarray(sums["z.facts"], dtype=np.float64)
    own, shared = (squares_u + squares_v) / (4 * n), (squares_u - squares_v) / (4 * n)
    means = np.stack([sum_u, sum_v]) / (2 * n)
    variance = own - (means**2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = (shared - means[0] ** 2 + means[1] ** 2) / variance
    trace = float(np.where(variance > 0, correlation, 0.0).sum())
    return {"normalized": _leading(sums, "normalized"), "normalized_trace": trace}


def _of_h(sums: dict[str, Floats]) -> dict[str, Any]:
    """Eigenvalues of the covariance of h, all or the leading ones."""
    if "hh" in sums and sums["hh"][-1, -1] >= 2:
        m = float(sums["hh"][-1, -1])
        second, mean = sums["hh"][:-ONES, :-ONES] / m, sums["hh"][-1, :-ONES] / m
        values = _descending(_covariance(second, mean, m))
        return {
            "hidden": values,
            "hidden_dimensions": len(values),
            "hidden_variance": float(values.sum()),
            "hidden_rankme": _rankme(_descending(second), m),
        }
    if "h.facts" in sums and sums["h.facts"][2, 0] >= 2:
        squares, total, rows = np.asarray(sums["h.facts"], dtype=np.float64)
        m, mean = rows[0], total / rows[0]
        values = _leading(sums, "hidden") * m / (m - 1)
        variance = float(squares.sum() / m - mean @ mean) * m / (m - 1)
        return {"hidden": values, "hidden_dimensions": len(mean), "hidden_variance": variance}
    return {}


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


def _correlations(U: Floats, V: Floats, n: float) -> Floats | None:
    """Correlations ρ of the views, from centred moments of u and v, as eigenvalues of C relative to the covariance.

    A finite sample spreads them by d (1 − ρ²)²/2n (variance, if all ρ were equal); the spread around their mean is
    reduced by as much.
    """
    d = len(U)
    if n < 4 * d:
        return None
    both, cross = (U + V) / 4, (U - V) / 4
    floor = 1e-9 * np.trace(both) / d
    try:
        rho = scipy.linalg.eigh(cross, both + floor * np.eye(d), eigvals_only=True)[::-1]
    except (np.linalg.LinAlgError, ValueError):  # collapsed: there is nothing to correlate
        return None
    spread = d * ((1 - rho**2) ** 2).mean() / (2 * n)
    kept = np.sqrt(max(0.0, 1 - spread / max(rho.var(), 1e-300)))
    return np.asarray(np.clip(rho.mean() + kept * (rho - rho.mean()), -1, 1), dtype=np.float64)


def _scatter(sums: Floats | None, C: Floats, second: Floats, mean: Floats) -> dict[str, Any]:
    """Mean batch size and scatter of C and of the covariance: E‖x‖² − ‖E x‖² of one pair's contribution x."""
    if sums is None or not sums[:2].all():
        return {}
    of = dict(zip(PAIRS, sums.tolist(), strict=True))
    norms, dots, entries, fourth, fourth_entries = (of[name] / of["pairs"] for name in PAIRS[2:])
    diagonal = entries - (np.diag(C) ** 2).sum()
    covariance = second - np.outer(mean, mean)
    redundant = (covariance**2).sum() - (np.diag(covariance) ** 2).sum()
    return {
        "batch": round(of["pairs"] / of["batches"]),
        "scatter_diagonal": diagonal,
        "scatter_symmetric": (norms + dots) / 2 - (C**2).sum() - diagonal,
        "scatter_plain": norms - (C**2).sum() - diagonal,
        "scatter_covariance": fourth - fourth_entries - redundant,
    }


def _rankme(eigenvalues: Floats, rows: float) -> float | None:
    """RankMe (Garrido et al. 2023) from the eigenvalues of the second moments of so many rows, not centred."""
    sigma = np.sqrt(np.maximum(eigenvalues[: round(rows)], 0.0))
    if not sigma.any():
        return None
    p = sigma / sigma.sum() + EPSILON
    return float(np.exp(-(p * np.log(p)).sum()))


def _lidar(between: Floats, within: Floats) -> float | None:
    """LiDAR (Thilak et al. 2023) from the covariances between and within samples, each a pair of views."""
    try:
        values = scipy.linalg.eigh(between, within + DELTA * np.eye(len(within)), eigvals_only=True)
    except (np.linalg.LinAlgError, ValueError):
        return None
    p = np.maximum(values, 0.0) + SMALL
    p /= p.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


def _directions(sums: Floats | None) -> dict[str, Any]:
    """Mean cosines of positive and of negative pairs and the spread of directions, from sums over 2n unit vectors."""
    if sums is None or sums[-1] < 4:
        return {}
    m, same, d = float(sums[-1]), float(sums[-2]), (len(sums) - 2) // 2
    total, squares = sums[:d], sums[d : 2 * d]
    variance = np.maximum(squares - total**2 / m, 0.0) / (m - 1)
    return {
        "positive": same / m,
        "negative": (float((total**2).sum()) - m - same) / (m * (m - 2)),
        "std_of_l2_normalized": float(np.sqrt(variance).mean()),
    }


def _picture(sample: Floats) -> Floats | None:
    """Project pairs (2, K, d) onto their two leading modes, (2, K, 2); signs make the skewness positive."""
    views, pairs, d = sample.shape
    flat = np.asarray(sample, dtype=np.float64).reshape(-1, d)
    if not np.isfinite(flat).all() or min(pairs, d) < 2:
        return None
    flat = flat - flat.mean(axis=0)
    try:  # by the smaller of the two products
        if d <= len(flat):
            projected = flat @ np.linalg.eigh(flat.T @ flat)[1][:, :-3:-1]
        else:
            square, U = np.linalg.eigh(flat @ flat.T)
            projected = U[:, :-3:-1] * np.sqrt(np.maximum(square[:-3:-1], 0.0))
    except np.linalg.LinAlgError:  # only a picture is lost
        return None
    projected = projected * np.where((projected**3).sum(axis=0) < 0, -1.0, 1.0)
    return np.asarray(projected.reshape(views, pairs, 2))


def _standardized(sums: Floats, mean_u: Floats, mean_v: Floats, n: float) -> Floats:
    """Cross-correlation of the standardized views, from Σ a bᵀ and Σ a², Σ b²; 0 for dimensions without variance."""
    mean_a, mean_b = (mean_u + mean_v) / 2, (mean_u - mean_v) / 2
    squares = sums[:, -2:].T / n
    with np.errstate(divide="ignore", invalid="ignore"):
        spread_a, spread_b = np.sqrt(squares - np.stack([mean_a, mean_b]) ** 2)
        normed = (sums[:, :-2] / n - np.outer(mean_a, mean_b)) / np.outer(spread_a, spread_b)
    return np.nan_to_num(normed, posinf=0, neginf=0)


def _leading(sums: dict[str, Floats], name: str) -> Floats:
    """The leading eigenvalues, from small matrices (`digest.condensed`)."""
    if f"ritz.{name}" in sums:
        overlaps, core = sums[f"ritz.{name}"]
        factor = _inverse_root(overlaps, least=1e-3)  # columns that are not zero are almost orthonormal
        return _padded(_descending(factor.T @ core @ factor))
    matrices = np.asarray(sums[f"nystroem.{name}"], dtype=np.float64)
    return _padded(_nystroem_difference(*matrices) if name == "C" else _nystroem(*matrices))


def _nystroem(core: Floats, square: Floats) -> Floats:
    """Eigenvalues of Nyström's approximation of A, from Qᵀ A Q and (A Q)ᵀ A Q."""
    factor = _inverse_root(core)
    return _descending(factor.T @ square @ factor)


def _nystroem_difference(core_u: Floats, uu: Floats, core_v: Floats, vv: Floats, uv: Floats) -> Floats:
    """Eigenvalues of A_u − A_v, each in Nyström's approximation F Fᵀ, F = A Q (Qᵀ A Q)^(−½)."""
    of_u, of_v = _inverse_root(core_u), _inverse_root(core_v)
    cross = of_u.T @ uv @ of_v
    gram = np.block([[of_u.T @ uu @ of_u, cross], [cross.T, of_v.T @ vv @ of_v]])
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    signs = np.repeat([1.0, -1.0], [of_u.shape[1], of_v.shape[1]])
    return _descending(root.T @ (signs[:, None] * root))


def _padded(values: Floats) -> Floats:
    """The leading values; few rows have fewer, and the others are zero."""
    return np.pad(values, (0, max(0, KEPT - len(values))))[:KEPT]


def _inverse_root(core: Floats, least: float = 1e-10) -> Floats:
    """A factor X with X Xᵀ the inverse of a positive matrix, without the directions that are lost in rounding."""
    values, vectors = np.linalg.eigh((core + core.T) / 2)
    kept = values > least * values[-1]
    return np.asarray(vectors[:, kept] / np.sqrt(values[kept]))


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
