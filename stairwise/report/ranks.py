"""Ranks of recorded spectra, exact or between bounds, and the scores of other libraries."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stairwise.runs.record import Record
from stairwise.table import Table
from stairwise.theory.spectra import (
    effective_rank,
    effective_rank_bounds,
    participation_ratio,
    participation_ratio_bounds,
)

Floats = NDArray[np.float64]
Bounds = tuple[Floats, Floats]
MEASURES = {
    "effective rank": (effective_rank, effective_rank_bounds),
    "participation ratio": (participation_ratio, participation_ratio_bounds),
}
SCORES = {
    "rankme": ("RankMe of z", "exp of the entropy of σ/Σσ, σ the singular values of z, which is not centred"),
    "hidden_rankme": ("RankMe of h", "the same for the representations"),
    "lidar": (
        "LiDAR of z",
        "exp of the entropy of the eigenvalues of S_w^−½ S_b S_w^−½, scatter between and within pairs",
    ),
    "std_of_l2_normalized": (
        "std_of_l2_normalized",
        "lightly's: standard deviation of the coordinates of z/‖z‖, averaged; 1/√d if they are spread evenly, 0 if all "
        "z point the same way",
    ),
}


def rank_bounds(records: Sequence[Record], spectrum: str) -> dict[str, Bounds]:
    """Least and greatest values, (T,) each, of the ranks of spectra of equal length; equal if spectra are complete."""
    lam, d = np.array([record.spectrum(spectrum) for record in records]), records[0].size(spectrum)
    if lam.shape[1] == d:
        return {name: (exact(lam), exact(lam)) for name, (exact, _) in MEASURES.items()}
    least = np.array([record.total(spectrum) for record in records])
    most = np.array([_positive(record, spectrum) for record in records])
    return {name: (bounds(lam, least, d)[0], bounds(lam, most, d)[1]) for name, (_, bounds) in MEASURES.items()}


def _positive(record: Record, spectrum: str) -> float:
    """Upper bound of the sum of the positive eigenvalues: the total, unless there may be negative ones.

    With u = z_a + z_b and v = z_a − z_b, C is the mean of (uuᵀ − vvᵀ)/4, and tr Σ + ‖mean of z‖² that of
    (‖u‖² + ‖v‖²)/4. The positive eigenvalues of C therefore have at most the sum (tr C + tr Σ + ‖mean of z‖²)/2.
    """
    total = record.total(spectrum)
    if spectrum != "eigenvalues" or record.variance is None or record.mean_square is None:
        return total
    return max(total, (total + record.variance + record.mean_square) / 2)


def interval(low: Floats, high: Floats) -> str:
    """A rank, or its bounds, at the last record.

    >>> interval(np.array([2.0, 3.12]), np.array([2.0, 3.12])), interval(np.array([3.0]), np.array([4.5]))
    ('3.1', '3.0 to 4.5')
    """
    ends = [f"{float(value[-1]):.1f}" for value in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def scores_table(records: Sequence[Record]) -> Table:
    """The scores of other libraries at the last record that has them."""
    rows = []
    for name, (label, meaning) in SCORES.items():
        known = [value for record in records if (value := record.value(name)) is not None]
        if known:
            rows.append([label, f"{known[-1]:.4g}", meaning])
    return Table("Scores of other libraries", ["score", "value", "what it is"], rows)
