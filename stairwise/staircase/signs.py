"""Signs of health that the followed spectrum does not show: loss, similarities, total variance, lost batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stairwise.runs.record import Record

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Signs:
    """Measurements next to the followed spectrum, one per record, (T,); NaN where not measured.

    Attributes:
        loss: mean since the previous record.
        variance: tr Σ, the total variance of z.
        correlation: tr C_c, the part of the variance that both views share; 1 = consistent when divided by `variance`.
        mean_square: ‖mean of z‖².
        positive: mean cosine of the two views of one sample.
        negative: mean cosine of views of different samples.
        top: share of the largest eigenvalue of E[uuᵀ], with u = z/‖z‖; near 1: all embeddings share one direction.
        batch: pairs per batch.
        skipped: number of batches left out so far because they were not finite.
    """

    loss: Floats
    variance: Floats
    correlation: Floats
    mean_square: Floats
    positive: Floats
    negative: Floats
    top: Floats
    batch: Floats
    skipped: Floats

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Signs":
        """The signs in the records of a run."""

        def column(name: str) -> Floats:
            return np.array([record.value(name) for record in records], dtype=np.float64)  # None becomes NaN

        def total(name: str) -> Floats:
            spectra = [record.spectrum(name) for record in records]
            return np.array([np.nan if values is None else values.sum() for values in spectra])

        def top(name: str) -> Floats:
            spectra = [record.spectrum(name) for record in records]
            return np.array([np.nan if values is None else values[0] / max(values.sum(), 1e-300) for values in spectra])

        mean_square = column("mean_square")
        return cls(
            column("loss"),
            total("covariance"),
            total("eigenvalues") - mean_square,
            mean_square,
            column("positive"),
            column("negative"),
            top("directions"),
            column("batch"),
            column("skipped"),
        )

    def until(self, end: int) -> "Signs":
        """The signs of the first `end` records."""
        return Signs(*(values[:end] for values in vars(self).values()))
