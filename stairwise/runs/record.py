"""One measurement of a run: a line of metrics.jsonl, typed."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SPECTRA = (
    "eigenvalues",
    "covariance",
    "normalized",
    "hidden",
    "held_eigenvalues",
    "held_covariance",
    "held_hidden",
    "correlations",
)
SIZES = dict.fromkeys(("eigenvalues", "covariance", "normalized"), "dimensions") | {"hidden": "hidden_dimensions"}
TOTALS = {"eigenvalues": "trace", "covariance": "variance", "hidden": "hidden_variance"}
TOTALS["normalized"] = "normalized_trace"
CLOCKS = ("seconds", "views_per_second")  # the only values that differ between identical runs on a CPU
LARGEST = 1e300  # larger numbers indicate a damaged file
OF_CORRELATION = ("barlow_twins", "sharpened", "smoothed", "fourth_power", "hinged")  # losses that are functions of C


def spectrum_of_loss(loss: str, options: dict[str, Any] | None = None) -> str:
    """The spectrum in which a loss takes its steps: "eigenvalues" (of C) or "covariance".

    Losses of C alone take their steps in C, unless they standardize z first, which makes the scale of C arbitrary.

    >>> spectrum_of_loss("barlow_twins", {"batch_norm": False}), spectrum_of_loss("simclr")
    ('eigenvalues', 'covariance')
    """
    standardized = loss == "barlow_twins" and (options or {}).get("batch_norm", True)
    return "eigenvalues" if loss in OF_CORRELATION and not standardized else "covariance"


@dataclass(frozen=True, eq=False, kw_only=True)
class Record:
    """Measurements at one time; None if not measured.

    Attributes:
        step, t: number of updates, and the sum of their learning rates.
        seconds: wall-clock time since the run began.
        epoch, loss, gradient, lr, views_per_second: loss is the mean since the previous record.
        samples: number of pairs in the spectra.
        eigenvalues, covariance, normalized, hidden: spectra as in `monitor.spectrum.Spectrum`, descending: all
            eigenvalues, or as many of the leading ones as were followed.
        dimensions, hidden_dimensions: number of dimensions of z and h; a shorter spectrum holds the leading values.
        trace, variance, hidden_variance: sum of all eigenvalues of C, of the covariance and of h's covariance.
        wanted: number of pairs that these spectra need, if there were fewer; None if there were enough.
        rankme, hidden_rankme, lidar, std_of_l2_normalized: scores of other libraries, as in `Spectrum`.
        held_eigenvalues, held_covariance, held_hidden: the same for images that are not trained on.
        mean_square, positive, negative: as in `monitor.spectrum.Spectrum`.
        leading: embeddings in their two leading modes, (2, pairs, 2); written to a separate file.
        skipped, first_skipped: number of batches left out so far because they were not finite, and the first of them.
        correlations: of the two views, mode by mode, (d,).
        batch: number of pairs per batch, over all processes.
        scatter_diagonal, scatter_symmetric, scatter_plain, scatter_covariance: sampling noise times the batch, as in
            `Spectrum`.
        checkpoint: file of the measured checkpoint.
        planned_updates: number of updates of the whole run, if it was known.
        extra: other values by name: accuracies of probes, fields added by other programs.
    """

    step: int
    t: float
    seconds: float | None = None
    epoch: float | None = None
    loss: float | None = None
    gradient: float | None = None
    lr: float | None = None
    views_per_second: float | None = None
    samples: int | None = None
    eigenvalues: Floats | None = None
    covariance: Floats | None = None
    normalized: Floats | None = None
    hidden: Floats | None = None
    held_eigenvalues: Floats | None = None
    held_covariance: Floats | None = None
    held_hidden: Floats | None = None
    mean_square: float | None = None
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
    wanted: int | None = None
    rankme: float | None = None
    hidden_rankme: float | None = None
    lidar: float | None = None
    std_of_l2_normalized: float | None = None
    checkpoint: str | None = None
    planned_updates: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A field or an extra value by name; None if not measured."""
        return getattr(self, name) if name in FIELDS else self.extra.get(name)

    def spectrum(self, name: str) -> Floats | None:
        """A spectrum by name; None if it was not measured or is not finite."""
        values = self.value(name)
        if not isinstance(values, np.ndarray) or values.ndim != 1 or not values.size:
            return None
        return values if (np.abs(values) < LARGEST).all() else None

    def size(self, name: str) -> int:
        """Number of all eigenvalues of a spectrum, of which the leading ones may be all that was recorded; 0 if none.

        >>> record = Record(step=0, t=0.0, covariance=np.array([3.0, 1.0]), dimensions=8, variance=4.5)
        >>> record.size("covariance"), record.total("covariance"), record.size("eigenvalues")
        (8, 4.5, 0)
        """
        values, known = self.spectrum(name), self.value(SIZES[name]) if name in SIZES else None
        return 0 if values is None else max(len(values), known or 0)

    def total(self, name: str) -> float:
        """Sum of all eigenvalues of a spectrum, negative ones included, also of those not recorded; NaN if unknown."""
        values, known = self.spectrum(name), self.value(TOTALS[name]) if name in TOTALS else None
        if values is None:
            return math.nan
        return float(values.sum()) if known is None or len(values) == self.size(name) else float(known)

    def cut(self, name: str, length: int) -> "Record":
        """The record with the leading eigenvalues of one of `SIZES` only, and with their number and sum named."""
        if len(self.value(name)) <= length:
            return self
        named: dict[str, Any] = {SIZES[name]: self.size(name), TOTALS[name]: self.total(name)}
        return dataclasses.replace(self, **{name: self.value(name)[:length]}, **named)

    def as_json(self) -> dict[str, Any]:
        """The line of metrics.jsonl, rounded to seven digits (measurements are less accurate)."""
        values = {name: getattr(self, name) for name in FIELDS if name != "leading"} | self.extra
        return {name: _rounded(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, line: Any) -> "Record":
        """Read a line; raises ValueError if it is not a record. Single numbers that are not finite become None."""
        if not isinstance(line, dict) or _number(line.get("t")) is None or _number(line.get("step")) is None:
            raise ValueError("a record needs step and t")
        values: dict[str, Any] = {"extra": {name: value for name, value in line.items() if name not in FIELDS}}
        for name, value in line.items():
            number = _number(value)
            if name in SPECTRA and isinstance(value, list):
                values[name] = np.array(value, dtype=np.float64)
            elif name == "checkpoint" and isinstance(value, str):
                values[name] = value
            elif name in NUMBERS and number is not None:
                values[name] = int(number) if name in WHOLE else number
        return cls(**values)


FIELDS = tuple(f.name for f in dataclasses.fields(Record) if f.name != "extra")
WHOLE = (
    "step",
    "samples",
    "batch",
    "skipped",
    "first_skipped",
    "dimensions",
    "hidden_dimensions",
    "wanted",
    "planned_updates",
)
NUMBERS = set(FIELDS) - {*SPECTRA, "checkpoint", "leading"}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None
    return float(value)


def _rounded(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value
