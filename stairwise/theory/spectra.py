r"""Summaries of a spectrum: how many dimensions are in use.

All functions take eigenvalues λ_j of a covariance along the last axis. Negative ones are noise and count as zero.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, real

Floats = NDArray[np.float64]
WAITING = 1e-4  # fraction of the largest eigenvalue; smaller ones are treated as equal


def effective_rank(eigenvalues: ArrayLike) -> Floats:
    r"""exp of the entropy of p_j = σ_j / Σ σ, with σ = √λ the singular values of the embeddings (RankMe, 2023).

    >>> float(effective_rank([1.0, 1.0, 1.0, 0.0]).round(6))
    3.0
    """
    sigma = np.sqrt(_nonnegative(eigenvalues))
    p = sigma / _nonzero(sigma.sum(axis=-1, keepdims=True))
    return np.asarray(np.where(sigma.any(axis=-1), np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)), 0.0))


def participation_ratio(eigenvalues: ArrayLike) -> Floats:
    """(Σ λ)² / Σ λ²: the number of equal eigenvalues that would give the same ratio.

    >>> float(participation_ratio([2.0, 2.0, 0.0]))
    2.0
    """
    lam = _nonnegative(eigenvalues)
    lam = lam / _nonzero(lam.max(axis=-1, keepdims=True, initial=0.0))  # so that no square leaves the range of float64
    return np.asarray(lam.sum(axis=-1) ** 2 / _nonzero((lam**2).sum(axis=-1)))


def effective_rank_bounds(leading: ArrayLike, total: ArrayLike, dimensions: int) -> tuple[Floats, Floats]:
    r"""Least and greatest effective rank of spectra of which k leading eigenvalues and the sum of all are known.

    The rest R = total − Σ leading lies on d − k eigenvalues between 0 and the smallest leading one. To move some of it
    from the smallest positive eigenvalue to another one lowers the entropy, because p then falls where it is smallest
    and rises elsewhere. So the entropy is least if the rest is as large as the smallest leading one, on as few
    eigenvalues as possible, and greatest if all of the rest is equal. Rounding may leave R slightly outside: it is
    clipped.

    Arguments:
        leading: the k largest eigenvalues, (…, k).
        total: sum of all eigenvalues, (…).
        dimensions: d.

    >>> low, high = effective_rank_bounds([4.0, 1.0], 6.0, 5)  # between (2, 1, 1, 0, 0) and three of 1/√3
    >>> float(low.round(3)), float(high.round(3))
    (2.828, 4.317)
    """
    lam, few, even = _rests(leading, total, dimensions)
    return _entropy_rank(lam, *few), _entropy_rank(lam, *even)


def participation_ratio_bounds(leading: ArrayLike, total: ArrayLike, dimensions: int) -> tuple[Floats, Floats]:
    """Least and greatest participation ratio, likewise; Σλ is known, and Σλ² is least if the rest is equal.

    >>> low, high = participation_ratio_bounds([4.0, 1.0], 6.0, 5)
    >>> float(low.round(3)), float(high.round(3))
    (2.0, 2.077)
    """
    lam, few, even = _rests(leading, total, dimensions)
    bounds = []
    for values, counts in (few, even):
        sums = ((lam**power).sum(axis=-1) + (counts * values**power).sum(axis=-1) for power in (1, 2))
        bounds.append(np.asarray(next(sums) ** 2 / _nonzero(next(sums))))
    return bounds[0], bounds[1]


def alpha_req(eigenvalues: ArrayLike) -> float:
    """α of λ_j ∝ j^{-α}, fitted in log-log by least squares to the positive eigenvalues (α-ReQ, Agrawal et al. 2022).

    >>> round(alpha_req(np.arange(1, 50) ** -1.5), 6)
    1.5
    """
    lam = np.sort(_nonnegative(eigenvalues))[::-1]
    if lam.ndim != 1:
        raise InputError("eigenvalues", "must be one spectrum", f"shape {lam.shape}")
    lam = lam[lam > 0]
    if len(lam) < 2:
        raise InputError(
            "eigenvalues", "must hold at least two positive values", len(lam), "the embedding has collapsed"
        )
    x, y = np.log(np.arange(1, len(lam) + 1)), np.log(lam)
    return float(-np.polyfit(x, y, 1)[0])


def grown(eigenvalues: ArrayLike) -> tuple[int, float]:
    r"""Number of grown eigenvalues and the threshold below them, the paper's dashed lines (Figs. 3, 4).

    Otsu's method splits log λ into two groups with the least variance within them; the threshold is the middle of the
    widest gap between the medians of the groups. Eigenvalues below 1e-4 of the largest are treated as equal, because
    they are noise. All eigenvalues count as grown if the split explains less than half of the variance or if the groups
    are less than a factor of 10 apart. None count as grown if no eigenvalue is positive. Of leading eigenvalues alone,
    the small group is cut short, so that fewer or all may count as grown.

    >>> count, threshold = grown([1.0, 0.9, 0.8, 1e-4, 1e-5])
    >>> count, 1e-3 < threshold < 0.8
    (3, True)
    """
    y = _logarithms(eigenvalues)
    if len(y) == 0:
        return 0, 0.0
    cut = _cut(y)
    return (len(y), 0.0) if cut is None else (cut, float(np.exp((y[cut - 1] + y[cut]) / 2)))


def bimodality(eigenvalues: ArrayLike) -> float:
    r"""Depth of the valley at `grown`'s threshold: 1 − (modes near it) / (modes near the lower of the two peaks).

    "Near" means within a factor of 2. 1: no mode lies between the grown and the waiting ones. 0 or less, or no
    threshold: there are not two bands. With few modes it is unreliable: random spectra, log-uniform over five decades,
    reach 0.5 by chance in 70 % of the cases with 32 modes, in 19 % with 128, and in 0.1 % with 512.

    >>> bimodality([1.0, 0.9, 0.8, 0.7, 1e-3, 2e-3, 3e-3]), bimodality(np.exp(-np.linspace(0, 9, 999))) < 0.1
    (1.0, True)
    """
    lam = np.sort(_nonnegative(eigenvalues))[::-1]
    threshold = grown(lam)[1]
    if threshold == 0:
        return 0.0
    y, cut = np.log(lam[lam > 0]), np.log(threshold)

    def near(at: Floats) -> Floats:
        return np.asarray((np.abs(y - at[:, None]) < np.log(2)).sum(axis=1))

    peaks = min(near(side).max(initial=0) for side in (y[y > cut], y[y <= cut]))
    return float(1 - near(np.array([cut]))[0] / peaks) if peaks > 0 else 1.0


def _logarithms(eigenvalues: ArrayLike) -> Floats:
    """log λ, descending, clipped below at 1e-4 of the largest; empty if none is positive."""
    lam = np.sort(_nonnegative(eigenvalues))[::-1]
    if lam.ndim != 1:
        raise InputError("eigenvalues", "must be one spectrum", f"shape {lam.shape}")
    return np.log(np.maximum(lam, WAITING * lam[0])) if lam[0] > 0 else np.zeros(0)


def _cut(y: Floats) -> int | None:
    """Number of entries of y (descending) above the threshold of `grown`; None if there are not two groups."""
    n = len(y)
    if n < 2 or y[0] == y[-1]:
        return None
    centred, k = y - y.mean(), np.arange(1, n)
    apart = np.cumsum(centred)[:-1] / k * n / (n - k)  # difference of the means of the two groups, for each cut
    between = k * (n - k) / n * apart**2  # part of the sum of squares that the cut explains
    best = int(np.argmax(between))
    if between[best] < (centred**2).sum() / 2 or apart[best] < np.log(10):
        return None
    # Otsu's cut may fall into the tail of a large group, so take the widest gap between the two medians
    first, last = (best + 1) // 2, (best + 1 + n) // 2
    return first + 1 + int(np.argmax(y[first:last] - y[first + 1 : last + 1]))


def subspace_alignment(F: ArrayLike, G: ArrayLike) -> float:
    r"""a = ‖P Pʹᵀ‖_F² / d for two embeddings of the same points, (N, d) each: how much their spans overlap (App. E).

    P and Pʹ are orthonormal bases of the column spans. 1: the same span; d/N: chance. If the numbers of columns differ,
    d is the smaller one. An embedding that has collapsed to fewer dimensions than columns cannot reach 1.

    >>> F = np.eye(5)[:, :2]
    >>> round(subspace_alignment(F, F @ [[2.0, 1.0], [0.0, 1.0]]), 12), subspace_alignment(F, np.eye(5)[:, 1:3])
    (1.0, 0.5)
    """
    P, Q = (_basis(x, name) for x, name in ((F, "F"), (G, "G")))
    if len(P) != len(Q):
        raise InputError("F and G", "must have the same points as rows", f"{len(P)} and {len(Q)}")
    return float(np.linalg.norm(P.T @ Q) ** 2 / min(np.shape(F)[1], np.shape(G)[1]))


def chance_alignment(points: int, d: int, draws: int = 100, seed: int = 0) -> tuple[float, float]:
    """Mean and standard deviation of the alignment of random spans. The mean tends to d/points."""
    rng = np.random.default_rng(seed)
    fixed = np.eye(points)[:, :d]
    alignments = [subspace_alignment(fixed, rng.standard_normal((points, d))) for _ in range(draws)]
    return float(np.mean(alignments)), float(np.std(alignments))


def _basis(x: ArrayLike, name: str) -> Floats:
    columns = np.asarray(real(x, name), dtype=np.float64)
    if columns.ndim != 2 or not 0 < columns.shape[1] <= len(columns) or not np.isfinite(columns).all():
        rule = "must be finite, (points, d), with at most as many dimensions as points"
        raise InputError(name, rule, f"shape {columns.shape}")
    U, scale, _ = np.linalg.svd(columns, full_matrices=False)
    kept = scale > scale[0] * 1e-10
    if not kept.any() or scale[0] == 0:
        raise InputError(name, "must not be all zero", None, "the embedding has collapsed")
    return np.asarray(U[:, kept])


Rest = tuple[Floats, Floats]  # values, and how often each occurs, (…, n)


def _rests(leading: ArrayLike, total: ArrayLike, dimensions: int) -> tuple[Floats, Rest, Rest]:
    """The leading eigenvalues, and the rest on as few eigenvalues as possible, and on all of them equally."""
    lam, every = _nonnegative(leading), np.asarray(total, dtype=np.float64)
    unseen = dimensions - lam.shape[-1]
    if unseen < 0:
        raise InputError("dimensions", f"must be at least {lam.shape[-1]}, the number of eigenvalues", dimensions)
    if every.shape != lam.shape[:-1] or not np.isfinite(every).all():
        raise InputError("total", f"must be finite, of shape {lam.shape[:-1]}", f"shape {every.shape}")
    most = lam.min(axis=-1)
    rest = np.clip(every - lam.sum(axis=-1), 0.0, unseen * most)
    full = np.minimum(np.floor(rest / _nonzero(most)), unseen)
    left = np.maximum(rest - full * most, 0.0)
    few = np.stack([most, left], axis=-1), np.stack([full, (left > 0) * 1.0], axis=-1)
    return lam, few, (rest[..., None] / max(unseen, 1), np.full((*rest.shape, 1), float(unseen)))


def _entropy_rank(lam: Floats, values: Floats, counts: Floats) -> Floats:
    """The effective rank of eigenvalues, and of others that occur several times."""
    sigma, times = np.sqrt(np.concatenate([lam, values], axis=-1)), np.concatenate([np.ones_like(lam), counts], axis=-1)
    p = sigma / _nonzero((times * sigma).sum(axis=-1, keepdims=True))
    entropy = -(times * p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    return np.asarray(np.where(sigma.any(axis=-1), np.exp(entropy), 0.0))


def _nonnegative(eigenvalues: ArrayLike) -> Floats:
    lam = np.asarray(eigenvalues, dtype=np.float64)
    if lam.ndim == 0 or lam.shape[-1] == 0 or not np.isfinite(lam).all():
        raise InputError("eigenvalues", "must be a nonempty array of finite numbers", f"shape {lam.shape}")
    return np.maximum(lam, 0.0)


def _nonzero(x: Floats) -> Floats:
    return np.asarray(np.where(x > 0, x, 1.0))
