r"""How many dimensions a batch can carry.

Training minimizes the loss of a batch of N pairs, not that of the population, and the difference is a function of the
embedding: it changes what is learned. Let mode j have variance s_j in the embedding and correlation ρ_j between two
views, so that C has the eigenvalue λ_j = ρ_j s_j. For Gaussian modes the expected loss of a batch is convex in s, and
its minimum is where training settles. With S = Σ s_j, P = Σ ρ_j s_j and d outputs among which the modes are spread
evenly (which is best for each of these losses):

    Barlow Twins   d − 2P + (1 − λ) P²/d + λ Σ (ρ_j s_j)² + (α_S S² + α_P P² + Σ (β + γ ρ_j²) s_j²)/N
        symmetric C:  α_S = α_P = (1 − λ)/d + λ/2,  β = γ = λ/2      (λ = 1: the paper's ‖C − I‖²)
        plain C:      α_S = (1 − λ)/d + λ,  α_P = (1 − λ)/d,  β = 0,  γ = λ
    … with batch norm   S = d is fixed, so noise only adds about λ d(d − 1)/N to the loss and removes no mode:
        d(1 − P/d)² + λ(1 − 2/N)(Σ (ρ_j s_j)² − P²/d) + (d(1 − P²/d²)² + λ d(d − 1))/N
    VICReg (times d)   2 inv Σ (1 − ρ_j) s_j + var d E[1 − σ̂]₊ + 2 cov (c (Σ s_j² − S²/d) + S²(1 − 1/d)/(N − 1))
        c = N/(N − 1), and σ̂ is the standard deviation of N numbers of variance S/d
    SimCLR (S = 1)     −P/τ + E log(e^{P/τ} + Σ_k e^{x_k}),  x_k ~ N(0, Σ s_j²/τ²) for the M = 2N − 2 negatives
        ≈ −P/τ + log M + q/2 + e^{P/τ − q/2}/M − (e^q − 1)/2M  with q = Σ s_j²/τ²

Each solution fills the modes of largest ρ up to a threshold ρ*, which is also what a further mode would need.
SimCLR fixes the length of z, so its variances are given in units of 1/d, as if z had the length √d.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from stairwise.checks import InputError, flag, number, one_of, positive_int, real

Floats = NDArray[np.float64]

VISIBLE = 0.1  # variance above which a mode is counted
LARGEST_BATCH = 2**24
EPSILON = 1e-4  # below the root of VICReg's standard deviations
HERMITE = np.polynomial.hermite_e.hermegauss(60)


@dataclass(frozen=True, eq=False)
class Carried:
    """Where training settles at one batch size; modes in descending order of their correlation.

    Attributes:
        rho: correlation of each mode between two views, (d,).
        variance: variance of each mode in the embedding, (d,).
        threshold: correlation that a further mode needs.
        loss: expected loss of a batch.
        noise: the part of it that comes from the batch being finite; can be negative for SimCLR.
    """

    rho: Floats
    variance: Floats
    threshold: float
    loss: float
    noise: float

    @property
    def eigenvalues(self) -> Floats:
        """Of C, (d,)."""
        return self.rho * self.variance

    @property
    def alive(self) -> int:
        """Number of modes that grow at all."""
        return int((self.variance > 0).sum())

    @property
    def above_tenth(self) -> int:
        """Number of modes with variance above 0.1."""
        return int((self.variance > VISIBLE).sum())

    @property
    def above_half(self) -> int:
        """Number of eigenvalues of C above ½."""
        return int((self.eigenvalues > 0.5).sum())


def carried(
    rho: ArrayLike, batch: int, loss: str = "barlow_twins", d: int | None = None, excess: float = 1.0, **options: Any
) -> Carried:
    """The modes that training with this batch size can carry.

    Arguments:
        rho: correlation between two views of each mode that could be learned, in any order.
        batch: pairs per batch, over all processes.
        loss: "barlow_twins", "vicreg" or "simclr".
        d: dimension of the embedding, if there are more modes than that; None: the number of modes.
        excess: sampling noise in multiples of that of Gaussian modes, as measured; not for SimCLR.
        options: of the loss, with the defaults of `sw.losses`.

    Example:
        >>> rho = np.linspace(0.9, 0.3, 50)
        >>> simple = {"lambda_": 1.0, "batch_norm": False, "symmetric": True}
        >>> [carried(rho, batch, **simple).above_half for batch in (64, 256)]
        [15, 50]
    """
    modes = np.sort(np.asarray(real(rho, "rho"), dtype=np.float64).ravel())[::-1]
    if not modes.size or not (np.abs(modes) <= 1 + 1e-9).all():
        raise InputError("rho", "must be correlations, from −1 to 1", rho, "give one number per mode")
    if modes[0] <= 0:
        raise InputError("rho", "must have a positive correlation: views that share nothing teach nothing", modes[0])
    if positive_int(batch, "batch", 2**53) < 2:
        raise InputError("batch", "must be at least 2", batch)
    outputs = len(modes) if d is None else positive_int(d, "d")
    excess = number(excess, "excess", least=1e-12, most=1e12)
    solve = SOLVERS[one_of(loss, "loss", SOLVERS)]
    modes = np.minimum(modes[:outputs], 1.0)
    usable = np.maximum(modes, 1e-9)  # a mode that its views do not share never pays
    for name in options:
        one_of(name, f"option of {loss}", list(inspect.signature(solve).parameters)[4:])
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            variance, threshold, value, noise = solve(usable, batch, outputs, excess, **options)
    except (ArithmeticError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        given = ", ".join(f"{k} = {v}" for k, v in ({"batch": batch, "excess": excess} | options).items())
        raise InputError(
            "rho, batch and options", "must allow a solution", given, f"none was found: {error}"
        ) from error
    return Carried(modes, np.where(modes > 0, variance, 0.0), float(threshold), float(value), float(noise))


def smallest_batch(rho: ArrayLike, wanted: int, loss: str = "barlow_twins", **options: Any) -> int | None:
    """The smallest batch at which `wanted` eigenvalues of C settle above ½; None if no batch is large enough.

    Example:
        >>> smallest_batch(np.linspace(0.9, 0.3, 50), 40, lambda_=1.0, batch_norm=False, symmetric=True)
        154
    """
    positive_int(wanted, "wanted")
    low, high = 1, 2
    while carried(rho, high, loss, **options).above_half < wanted:
        if high >= LARGEST_BATCH:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = carried(rho, middle, loss, **options).above_half >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def useful_d(rho: ArrayLike, batch: int, loss: str = "barlow_twins", **options: Any) -> int:
    """The dimension of the embedding, up to the number of modes, with the most eigenvalues of C above ½ at this batch.

    Further dimensions share the same variance, so they push others below ½.

    Example:
        >>> useful_d(np.linspace(0.9, 0.3, 50), 64, lambda_=1.0, batch_norm=False, symmetric=True)
        29
    """
    options.pop("d", None)
    carried(rho, batch, loss, **options)  # checks all of them
    sizes = np.arange(1, real(rho, "rho").size + 1)
    counts = [carried(rho, batch, loss, int(d), **options).above_half for d in sizes]
    return int(sizes[np.argmax(counts)])


# Each solver: correlations in descending order, all positive → variances, threshold, expected loss, noise.
Solution = tuple[Floats, float, float, float]


def _barlow_twins(
    rho: Floats,
    batch: int,
    d: int,
    excess: float,
    lambda_: float = 0.0051,
    batch_norm: bool = True,
    symmetric: bool = False,
) -> Solution:
    """Stationarity: (λ ρ² + (β + γ ρ²)/N) s = ρ (1 − κ P) − α_S S/N where s > 0, with κ = (1 − λ)/d + α_P/N.

    For the first k modes this is two linear equations for S and P; the right k is the one where exactly these modes
    have s > 0.
    """
    lambda_ = number(lambda_, "lambda_", least=1e-12, most=1e12)
    if flag(batch_norm, "batch_norm"):
        return _standardized(rho, batch, d, excess, lambda_)
    N, rest = batch / excess, (1 - lambda_) / d
    alpha_s, alpha_p, beta, gamma = (
        (rest + lambda_ / 2, rest + lambda_ / 2, lambda_ / 2, lambda_ / 2)
        if flag(symmetric, "symmetric")
        else (rest + lambda_, rest, 0.0, lambda_)
    )
    kappa, sigma = rest + alpha_p / N, alpha_s / N
    stiffness = lambda_ * rho**2 + (beta + gamma * rho**2) / N
    ones, rhos, squares = (np.cumsum(rho**power / stiffness) for power in (0, 1, 2))
    # S = (1 − κP) rhos − σ S ones,  P = (1 − κP) squares − σ S rhos
    determinant = (1 + sigma * ones) * (1 + kappa * squares) - sigma * kappa * rhos**2
    S = rhos / determinant
    P = (squares * (1 + sigma * ones) - sigma * rhos**2) / determinant
    threshold = sigma * S / (1 - kappa * P)
    k = int(np.argmax(np.append(threshold[:-1] >= rho[1:], True)))
    s = np.clip(rho * (1 - kappa * P[k]) - sigma * S[k], 0, None) / stiffness
    lam = rho * s
    noise = (alpha_s * s.sum() ** 2 + alpha_p * lam.sum() ** 2 + (beta * s**2 + gamma * lam**2).sum()) / N
    clean = d - 2 * lam.sum() + rest * lam.sum() ** 2 + lambda_ * (lam**2).sum()
    return s, threshold[k], clean + noise, noise


def _standardized(rho: Floats, batch: int, d: int, excess: float, lambda_: float) -> Solution:
    """Batch norm: Σ s = d. Stationarity: 2 λ' ρ² s = g ρ − ν with g = −dF/dP at fixed Σ (ρ s)²; solve for P."""
    N = batch / excess
    weight = lambda_ * max(1 - 2 / N, 0.1)

    def slope(P: float) -> float:
        c = P / d
        return float(2 * (1 - c) + 2 * weight * c + 4 * c * (1 - c**2) / N)

    def filled(P: float) -> tuple[Floats, float]:
        return _filled(slope(P) * rho, 2 * weight * rho**2, float(d))

    P = brentq(lambda P: (rho * filled(P)[0]).sum() - P, 0.0, d * float(rho[0]) * (1 + 1e-9))
    s, level = filled(P)
    noise = (d * (1 - (P / d) ** 2) ** 2 + lambda_ * d * (d - 1)) / N
    clean = d * (1 - P / d) ** 2 + lambda_ * (((rho * s) ** 2).sum() - P**2 / d)
    return s, level / slope(P), clean + noise, noise


def _vicreg(
    rho: Floats,
    batch: int,
    d: int,
    excess: float,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> Solution:
    """Stationarity: 4 cov c s = μ − 2 inv (1 − ρ) where s > 0, with μ(S) minus the slope of the terms in S."""
    invariance, variance, covariance = (
        number(x, name, least=1e-12, most=1e12)
        for name, x in (("invariance", invariance), ("variance", variance), ("covariance", covariance))
    )
    dof = (batch - 1) / excess
    c, shared = 1 + 1 / dof, (1 - 1 / d) / dof

    def level(S: float) -> float:
        push = -variance * _slope(lambda v: expected_hinge(v, batch - 1), S / d)
        return push + 4 * covariance * S * (c / d - shared)

    def variances(S: float) -> Floats:
        return np.clip(level(S) - 2 * invariance * (1 - rho), 0, None) / (4 * covariance * c)

    S = brentq(lambda S: variances(S).sum() - S, 1e-6 * d, 1e3 * d)
    s = variances(S)
    off = (s**2).sum() - S**2 / d
    hinge = max(0.0, 1 - np.sqrt(S / d + EPSILON))
    clean = (2 * invariance * ((1 - rho) * s).sum() + 2 * covariance * off) / d + variance * hinge
    noise = 2 * covariance * (off / dof + shared * S**2) / d + variance * (expected_hinge(S / d, batch - 1) - hinge)
    return s, 1 - level(S) / (2 * invariance), clean + noise, noise


def _simclr(rho: Floats, batch: int, d: int, _: float, temperature: float = 0.2) -> Solution:
    """Stationarity: s = τ̃ (ρ − ρ*)₊, Σ s = 1, with τ̃ = τ (1 − w)/2A_q: A the expected log of the denominator, A_q its
    slope in q and w = τ A_P, the average weight of the positive. Without noise τ̃ = τ."""
    tau, negatives = number(temperature, "temperature", least=1e-3, most=1e3), 2 * batch - 2

    def settled(effective: float) -> tuple[Floats, float, float, float]:
        s, threshold = _filled(effective * rho, np.ones_like(rho), 1.0)
        return s, threshold / effective, float((rho * s).sum()) / tau, float((s**2).sum()) / tau**2

    def mismatch(log_effective: float) -> float:
        *_, p, q = settled(np.exp(log_effective))
        weight = _slope(lambda p: expected_log_sum(p, q, negatives), p)
        spread = _slope(lambda q: expected_log_sum(p, q, negatives), q)
        return float(np.log(tau * (1 - weight) / (2 * spread)) - log_effective)

    effective = np.exp(brentq(mismatch, np.log(tau / 30), np.log(tau * 30), xtol=1e-6))
    s, threshold, p, q = settled(effective)
    log_sum = expected_log_sum(p, q, negatives)
    return s * d, threshold, log_sum - p, log_sum - np.log(negatives) - q / 2


SOLVERS: dict[str, Callable[..., Solution]] = {
    "barlow_twins": _barlow_twins,
    "vicreg": _vicreg,
    "simclr": _simclr,
}


def expected_hinge(variance: float, dof: float) -> float:
    """E max(0, 1 − σ̂) for the standard deviation σ̂ of a Gaussian sample (approximately normal itself)."""
    mean, sd = np.sqrt(variance + EPSILON) * (1 - 0.25 / dof), np.sqrt(variance / (2 * dof))
    gap = (1 - mean) / sd
    return float((1 - mean) * ndtr(gap) + sd * np.exp(-(gap**2) / 2) / np.sqrt(2 * np.pi))


def expected_log_sum(p: float, q: float, negatives: int) -> float:
    """E log(e^p + Σ_k e^{x_k}) over independent x_k ~ N(0, q), from E log X = ∫ (e^{−e^y} − E e^{−X e^y}) dy."""
    nodes, weights = HERMITE[0], HERMITE[1] / HERMITE[1].sum()
    scale = np.logaddexp(p, np.log(negatives) + q / 2)
    y = np.linspace(-30, 12, 1500)
    t = np.exp(y - scale)
    one = weights @ np.exp(-np.exp(np.sqrt(q) * nodes)[:, None] * t)
    with np.errstate(divide="ignore"):
        together = np.exp(negatives * np.log(one) - t * np.exp(p))
    return float(scale + np.trapezoid(np.exp(-np.exp(y)) - together, y))


def _filled(height: Floats, stiffness: Floats, total: float) -> tuple[Floats, float]:
    """s = (height − ν)₊ / stiffness with Σ s = total, and ν."""
    order = np.argsort(-height)
    h, c = height[order], 1 / stiffness[order]
    level = (np.cumsum(h * c) - total) / np.cumsum(c)
    k = int(np.flatnonzero(h > level)[-1])
    return np.clip(height - level[k], 0, None) / stiffness, float(level[k])


def _slope(function: Callable[[float], float], x: float) -> float:
    step = 1e-4 * abs(x)
    return (function(x + step) - function(x - step)) / (2 * step)
