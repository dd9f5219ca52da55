"""Signs of health that the followed spectrum does not show: loss, cosines, total variance and mean."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stairwise.runs.record import Record
from stairwise.staircase.growth import Rest

Floats = NDArray[np.float64]

RECENT, AT = 5, 2e-3  # a loss sits at a value if so many latest records are this close to it, relative to it


@dataclass(frozen=True, eq=False)
class Signs:
    """Measurements next to the followed spectrum, one per record, (T,); NaN where not measured.

    Attributes:
        loss: mean since the previous record.
        variance: tr Σ, the total variance of z.
        mean_square: ‖mean of z‖².
        positive: mean cosine of the two views of one sample.
        negative: mean cosine of views of different samples.
        batch: pairs per batch.
        trace: tr C, the mean of z_a·z_b.
        samples, wanted: number of pairs in the spectra, and how many they need, if there were fewer; empty if unknown.
    """

    loss: Floats
    variance: Floats
    mean_square: Floats
    positive: Floats
    negative: Floats
    batch: Floats
    trace: Floats
    samples: Floats = field(default_factory=lambda: np.zeros(0))
    wanted: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Signs":
        """The signs in the records of a run."""

        def column(name: str) -> Floats:
            return np.array([record.value(name) for record in records], dtype=np.float64)  # None becomes NaN

        variance, trace = (np.array([r.total(name) for r in records]) for name in ("covariance", "eigenvalues"))
        means, cosines = column("mean_square"), (column("positive"), column("negative"))
        pairs = {"batch": column("batch"), "samples": column("samples"), "wanted": column("wanted")}
        return cls(column("loss"), variance, means, *cosines, trace=trace, **pairs)

    @property
    def agreements(self) -> Floats:
        """How far the two views of a sample agree, relative to different samples: 1 if fully, NaN if not measured."""
        apart = 1 - self.negative
        return np.where(apart <= 0, 0.0, (self.positive - self.negative) / np.maximum(apart, 1e-300))

    @property
    def agreement(self) -> float:
        """How far the views agree at the last record."""
        return float(self.agreements[-1])

    @property
    def few(self) -> NDArray[np.bool_]:
        """Which records have fewer pairs than their spectra need, (T,)."""
        return np.isfinite(self.wanted) if len(self.wanted) else np.zeros(len(self.loss), bool)

    @classmethod
    def unknown(cls, lam: Floats, rest: Rest | None = None) -> "Signs":
        """The signs if nothing but the followed spectrum was measured, (T, d), and the rest below it."""
        none = np.full(len(lam), np.nan)
        variance = (rest if rest is not None else Rest.of(lam)).totals(lam)[:, 0]
        return cls(none, variance, none, none, none, none, none)

    def until(self, end: int) -> "Signs":
        """The signs of the first `end` records."""
        return self.where(slice(end))

    def where(self, kept: NDArray[np.bool_] | slice) -> "Signs":
        """The signs of some records."""
        return Signs(*(values[kept] if len(values) else values for values in vars(self).values()))


def telling_value(signs: Signs, d: int) -> tuple[str, str] | None:
    """Name and meaning of a special value at which the loss has sat for the latest records, if it does.

    Cross-entropy losses have the logarithm of the number of their classes when all embeddings are equal, and before the
    first dimension is learned; so do the others where nothing is learned.
    """
    loss = signs.loss[-RECENT:]
    if len(loss) < RECENT or not np.isfinite(loss).all():
        return None
    n = signs.batch[-1]
    values = {f"d = {d}": (float(d), "Barlow Twins has this value when nothing is learned")}
    values |= {"d − 1": (d - 1.0, "Barlow Twins has this value when it has learned the mean alone")}
    values |= {"25": (25.0, "VICReg with its usual weights has this value when the variance is zero")}
    if n > 1:
        equal = "a contrastive loss has this value when all embeddings are equal"
        values |= {f"ln {n:.0f}": (np.log(n), equal), f"ln(2·{n:.0f} − 1)": (np.log(2 * n - 1), equal)}
    for k in (d, *(2**j for j in range(10, 18)), 3000):
        values |= {f"ln {k}": (np.log(k), "a cross-entropy over so many prototypes has this value when none is chosen")}
    for name, (value, meaning) in values.items():
        if value > 0 and (np.abs(loss / value - 1) <= AT).all():
            return name, meaning
    return None
