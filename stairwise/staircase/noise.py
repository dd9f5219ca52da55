"""Sampling noise in words: how much of a run's loss it is, and how many dimensions the batch can carry."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import positive_int
from stairwise.staircase.notes import noted
from stairwise.theory.batch_noise import EPSILON, SOLVERS, VISIBLE, Carried, carried, expected_hinge

Floats = NDArray[np.float64]

SMALL = 0.1  # share of the loss below which noise is not mentioned
LARGER = 4  # the batch that is proposed, in multiples of the present one
BARLOW_TWINS = {"lambda_": 0.0051, "batch_norm": True, "symmetric": False}  # defaults of sw.losses
VICREG = {"invariance": 25.0, "variance": 25.0, "covariance": 1.0}


class Measured(Protocol):
    """What is needed of a `Record` or a `Spectrum`; None if not measured.

    If spectra hold the leading eigenvalues only, `dimensions`, `trace` and `variance` are needed, too.
    """

    @property
    def eigenvalues(self) -> Floats | None: ...
    @property
    def covariance(self) -> Floats | None: ...
    @property
    def mean_square(self) -> float | None: ...
    @property
    def correlations(self) -> Floats | None: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def scatter_diagonal(self) -> float | None: ...
    @property
    def scatter_symmetric(self) -> float | None: ...
    @property
    def scatter_plain(self) -> float | None: ...
    @property
    def scatter_covariance(self) -> float | None: ...


def noise_of(measured: Measured, loss: str, options: Mapping[str, Any] | None = None) -> float | None:
    """The part of a batch's expected loss that is sampling noise, from the moments of the embedding.

    The pairs of a batch are taken as independent. With batch norm inside the network there can be less noise: 0.62 to
    0.79 of it in small networks with Barlow Twins (docs/results/batch.md). None if moments are missing, and for SimCLR,
    whose loss depends on the number of negatives by definition.
    """
    m, d = measured, _dimensions(measured)
    if m.batch is None or m.batch < 2 or d == 0:
        return None
    if loss == "barlow_twins":
        chosen = BARLOW_TWINS | dict(options or {})
        if chosen["batch_norm"]:  # entries c of C are correlations, with variance (1 − c²)²/N
            shared = _shared(m)
            return float((d * (1 - shared**2) ** 2 + chosen["lambda_"] * d * (d - 1)) / m.batch)
        others = m.scatter_symmetric if chosen["symmetric"] else m.scatter_plain
        if m.scatter_diagonal is None or others is None:
            return None
        return float((m.scatter_diagonal + chosen["lambda_"] * others) / m.batch)
    if loss == "vicreg" and m.scatter_covariance is not None and m.covariance is not None:
        chosen, mean = VICREG | dict(options or {}), _sum(m, m.covariance, "variance") / d
        hinge = expected_hinge(mean, m.batch - 1) - max(0.0, 1 - np.sqrt(mean + EPSILON))
        return float(2 * chosen["covariance"] * m.scatter_covariance / (d * m.batch) + chosen["variance"] * hinge)
    return None


def carried_by(
    measured: Measured, loss: str, options: Mapping[str, Any] | None = None, batch: int | None = None
) -> Carried | None:
    """The modes that a run can carry with its own batch or another, from its correlations; None if not measured for
    all modes, or if the loss lacks one of its terms.

    Barlow Twins without batch norm also learns the constant, a mode of correlation 1, if the mean of z shows it. Noise
    is taken in proportion to the measured one, which exceeds that of Gaussian modes if a few pairs are far out.
    """
    if loss not in SOLVERS or measured.correlations is None or measured.batch is None:
        return None
    rho, d = measured.correlations, len(measured.correlations)
    if d < _dimensions(measured):
        return None
    chosen = dict(options or {})
    weights = [chosen.get(name, 1.0) for name in ("invariance", "variance", "covariance", "lambda_")]
    if min(weights) <= 0:  # without one of its terms the loss collapses, and no batch carries anything
        return None
    if loss == "barlow_twins" and not (BARLOW_TWINS | chosen)["batch_norm"] and (measured.mean_square or 0) > VISIBLE:
        rho = np.append(1.0, rho)
    return carried(rho, batch or measured.batch, loss, d, excess_noise(measured, loss), **chosen)


def excess_noise(measured: Measured, loss: str) -> float:
    """Measured scatter in multiples of that of Gaussian modes with the same spectra; 1 if not measured."""
    m, mean = measured, measured.mean_square or 0.0
    if m.covariance is None or m.eigenvalues is None:
        return 1.0
    s, lam, d = m.covariance, m.eigenvalues, _dimensions(m)
    total, trace = _sum(m, s, "variance"), _sum(m, lam, "trace")
    squares, lam_squares = (_squares(v, v_sum, d) for v, v_sum in ((s, total), (lam, trace)))
    if loss == "barlow_twins" and m.scatter_diagonal is not None and m.scatter_symmetric is not None:
        gaussian = ((total + mean) ** 2 + trace**2 + squares + mean**2 + lam_squares) / 2
        gaussian -= 2 * mean**2  # the constant does not vary
        return _ratio(m.scatter_diagonal + m.scatter_symmetric, float(gaussian))
    if loss == "vicreg" and m.scatter_covariance is not None:
        return _ratio(m.scatter_covariance, float(total**2 * (1 - 2 / d) + squares))
    return 1.0


def noise_sentence(
    measured: Measured,
    loss: str,
    options: Mapping[str, Any] | None = None,
    value: float | None = None,
    batch: int | None = None,
) -> str:
    """How much of the loss is sampling noise and what a larger batch would change; "" if that is little or unknown.

    Modes of little variance are not trained, so their correlations are underestimated: "or more".

    Arguments:
        measured: the last `Record` of a run, or a `Spectrum`.
        loss, options: name and arguments of the loss, as in a recipe.
        value: loss of the run, averaged over batches.
        batch: the batch to compare with; None: four times the present one.
    """
    noise = noise_of(measured, loss, options)
    now = carried_by(measured, loss, options)
    if noise is None or now is None or value is None or not value > 0 or noise < SMALL * value or not measured.batch:
        return ""
    larger = LARGER * measured.batch if batch is None else positive_int(batch, "batch")
    then = carried_by(measured, loss, options, larger)
    share, d = min(noise / value, 1.0), len(now.rho)
    part = "half" if 0.45 <= share <= 0.55 else f"{100 * share:.0f} %"
    if then is None or then.above_half <= now.above_half + SMALL * d / 2:
        return noted("noise only", batch=measured.batch, part=part)
    counts = {"now": now.above_half, "d": d, "larger": larger, "then": then.above_half}
    return noted("noise", batch=measured.batch, part=part, **counts)


def _shared(m: Measured) -> float:
    """Σ ρ_j s_j / Σ s_j: the share of the variance that both views have in common."""
    if m.covariance is None or m.eigenvalues is None or not m.covariance.sum() > 0:
        return 0.0
    trace, variance = _sum(m, m.eigenvalues, "trace"), _sum(m, m.covariance, "variance")
    return float(np.clip((trace - (m.mean_square or 0.0)) / variance, 0, 1))


def _dimensions(m: Measured) -> int:
    """d; 0 if no covariance was measured."""
    return 0 if m.covariance is None else max(len(m.covariance), getattr(m, "dimensions", None) or 0)


def _sum(m: Measured, spectrum: Floats, total: str) -> float:
    """Sum of all eigenvalues, from the total of that name if the spectrum holds the leading ones only."""
    known = getattr(m, total, None) if len(spectrum) < _dimensions(m) else None
    return float(spectrum.sum() if known is None else known)


def _squares(spectrum: Floats, total: float, d: int) -> float:
    """Sum of the squares of all eigenvalues; those that were not recorded are taken as equal."""
    own, unseen = float((spectrum**2).sum()), d - len(spectrum)
    return own + (total - float(spectrum.sum())) ** 2 / unseen if unseen > 0 else own


def _ratio(measured: float, gaussian: float) -> float:
    ratio = measured / gaussian if gaussian > 0 else 1.0
    return float(np.clip(ratio, 0.2, 20)) if np.isfinite(ratio) else 1.0
