r"""Closed-form trajectories from any small initialization.

There are two laws of gradient flow. Both work in the eigenbasis of Γ, where u_k = W₀ v_k are the columns of W₀:

aligned   the paper's Result 4.1: replace W₀ by its aligned init (QR) and let each mode grow independently.
          Its error shrinks only as α^{1 − max γ_{j+1}/γ_j}, slowly when eigenvalues are close, as in real data.
logistic  let all columns grow as in the linear phase, then saturate the resulting matrix:

              M(t) = Σ_k γ_k e^{8γ_k t} b_k b_kᵀ,   b_k = (I − C₀)^{-1/2} u_k,
              C(t) ≈ M (I + M)^{-1},   W(t) ≈ (I + M)^{-1/2} Σ_k e^{4γ_k t} b_k v_kᵀ.

          It is exact for aligned init (the Proposition) and when all γ are equal, and accurate in between.

A third law, spectral (theory/spectral_law.py), is for spectral flow, the continuous form of Muon.

With `lr=` both predict descent instead of flow. At learning rate η a mode grows by 1 + 4ηγ per step instead of
e^{4ηγ}, and the log-odds log(λ/(1 − λ)) grow by 2 log(1 + 4ηγ) + 3 (4ηγ)² λ + O((4ηγ)³) per step, which sums to

              λ/(1 − λ) = μ (1 + μ)^{6ηγ}   instead of   λ/(1 − λ) = μ.
"""

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import (
    LARGEST,
    InputError,
    TheoryWarning,
    as_numpy,
    flag,
    number,
    one_of,
    rate,
    time_vector,
    times,
    vector,
)
from stairwise.theory.alignment import qr_nonnegative
from stairwise.theory.conditions import check_conditions
from stairwise.theory.correlation import Correlation, checked
from stairwise.theory.modes import Modes
from stairwise.theory.spectral_law import spectral_evolve
from stairwise.theory.trajectory import Trajectory

Floats = NDArray[np.float64]

LAWS = ("logistic", "aligned")
LOG_CAP = math.log(1e6)  # once its eigenvalue of M exceeds 1e12, a direction is learned: λ = 1 to 1e-12
FOREVER = 1e300  # log of the growth of the fastest mode at t = ∞, and at times that are as good as infinite
LATEST_STEP = 1e290  # later ones are as good as infinite
CHUNK = 1 << 21  # number of floats per block of times


def closed_form(
    W0: ArrayLike,
    corr: Correlation,
    times: ArrayLike,
    law: str = "logistic",
    lr: float | None = None,
    momentum: float = 0.0,
    weights: bool = False,
) -> Trajectory:
    """Predicted trajectory of a flow, or of a descent if `lr` is given, from small init W0.

    Warns (`TheoryWarning`) when the conditions of the law do not hold; `check_conditions` gives the details. The
    absolute error of tiny eigenvalues is about 1e-15 of the largest eigenvalue at that time.

    Arguments:
        W0: initial weights, (d, m).
        corr: the data.
        times: t = lr × step, (T,); infinity allowed.
        law: for gradient flow "logistic" (any small init) or "aligned" (the paper's); for spectral flow "spectral".
        lr: learning rate of descent; None for flow.
        momentum: heavy-ball momentum of the descent; time is still lr × step. The growth is exact, but saturation is
            taken from the flow: predicted steps are up to 3 % late and the overshoot of λ beyond 1 is missing.
        weights: also return W(t). The weights are less accurate than the spectrum: the true flow stops rotating once
            C = I, while the logistic law continues towards the exact top eigenvectors.

    Example:
        >>> corr = Correlation.from_matrix([2.0, 1.0, 0.5])
        >>> W0 = 1e-6 * np.random.default_rng(0).standard_normal((2, 3))
        >>> closed_form(W0, corr, [0.0, 2.2, np.inf]).eigenvalues.round(3)
        array([[0.  , 0.  ],
               [0.99, 0.  ],
               [1.  , 1.  ]])
    """
    one_of(law, "law", (*LAWS, "spectral"))
    lr = None if lr is None else rate(lr)
    momentum, weights = number(momentum, "momentum", least=0), flag(weights, "weights")
    if law == "spectral" and momentum:
        raise InputError("momentum", "must be 0 for the spectral law", momentum, "use gradient_descent")
    t = time_vector(times)
    conditions = check_conditions(W0, corr)
    if not conditions.start < 1:
        raise InputError(
            "W0", "must start with all eigenvalues of C below 1", f"{conditions.start:.3g}", "use gradient_flow"
        )
    problems = conditions.problems(law)
    if momentum:
        problems.append(
            "with momentum only the growth is exact: step times are up to 3 % late, the overshoot is missing"
        )
    for problem in problems:
        warnings.warn(problem, TheoryWarning, stacklevel=2)
    coordinates, gamma = checked(corr).project(W0)
    if law == "spectral":
        spectrum, moved = spectral_evolve(coordinates, gamma, t, lr, weights)
    else:
        spectrum, moved = evolve(coordinates, gamma, t, law, lr, momentum, weights)
    if moved is not None:  # the part outside the span of the data never changes
        still = np.asarray(as_numpy(W0), dtype=np.float64) - coordinates @ corr.eigenvectors.T
        moved = moved @ corr.eigenvectors.T + still
    how = f"closed form ({law}" + (f", lr={lr:g}" if lr else "") + (f", momentum={momentum:g})" if momentum else ")")
    return Trajectory(t, spectrum, how, moved)


def evolve(
    coordinates: Floats,
    gamma: Floats,
    t: Floats,
    law: str = "logistic",
    lr: float | None = None,
    momentum: float = 0.0,
    weights: bool = False,
) -> tuple[Floats, Floats | None]:
    """The laws in the eigenbasis: from W₀ V (d, r) and γ (r,) descending to spectra (T, d) and W(t) V (T, d, r)."""
    lr = None if lr is None else rate(lr)
    growth = log_growth(gamma, t, lr, momentum)
    bound = learning_rate_bound(gamma, momentum)
    if lr is not None and not lr < bound:
        raise InputError("lr", f"must be below {bound:.3g}: descent diverges above it", lr, "lower lr")
    bend = 6 * (lr or 0.0) * np.maximum(gamma, 0) * (momentum == 0)  # derived only for descent without momentum
    solve = _aligned if one_of(law, "law", LAWS) == "aligned" else _logistic
    return solve(coordinates, gamma, growth, bend, weights)


def log_growth(gamma: ArrayLike, t: ArrayLike, lr: float | None = None, momentum: float = 0.0) -> Floats:
    """Log of the factor by which a small mode has grown by time t, shape (*t.shape, *gamma.shape).

    Flow: 4γt. Descent: (t/lr) log|1 + 4 lr γ|. Heavy ball: the solution of W_{i+1} = (1 + μ + 4 lr γ) W_i − μ W_{i−1}
    from rest, which the larger root dominates; oscillating modes (only γ < 0) get the envelope of their decay.

    >>> log_growth([1.0], [0.5], lr=0.25).round(3), log_growth([1.0], [0.5]).round(3)
    (array([[1.386]]), array([[2.]]))
    """
    gamma, t = np.asarray(gamma, dtype=np.float64), times(t, "t")[..., None]
    steepest = max(float(np.abs(gamma).max(initial=0.0)), 1e-300)
    forever = FOREVER * (gamma / steepest)  # finite, ordered like γ
    if lr is None:
        if momentum:
            raise InputError("momentum", "needs lr", momentum, "gradient flow has no momentum")
        with np.errstate(over="ignore"):
            late = 4 * steepest * t >= FOREVER
        grown = 4 * gamma * np.where(late, 0.0, t)
    else:
        lr, momentum = rate(lr), number(momentum, "momentum", least=0)
        if momentum >= 1:
            raise InputError("momentum", "must be below 1", momentum)
        with np.errstate(over="ignore"):
            steps = t / lr
            late = steps * max(4 * lr * steepest, 1.0) >= LATEST_STEP
        with np.errstate(divide="ignore"):
            grown = _log_descent_growth(4 * lr * gamma, np.where(late, 0.0, steps), momentum)
    return np.where(late, forever, grown)


def _log_descent_growth(a: Floats, steps: Floats, momentum: float) -> Floats:
    if momentum == 0:
        rate = np.log(np.abs(1 + a))
        return np.where(steps > 0, steps * np.maximum(rate, -1e9), 0.0)  # −∞: a step to exactly zero
    discriminant = (1 + momentum + a) ** 2 - 4 * momentum
    root = np.sqrt(np.maximum(discriminant, 0))
    large, small = (1 + momentum + a + root) / 2, (1 + momentum + a - root) / 2
    envelope = steps * 0.5 * math.log(momentum)
    share = np.where(root > 0, (1 + a - small) / np.where(root > 0, root, 1), 1.0)  # weight of the larger root
    with np.errstate(invalid="ignore"):
        decayed = np.abs(small / large) ** steps
        two_roots = steps * np.log(np.abs(large)) + np.log(np.abs(share + (1 - share) * decayed))
    return np.where(discriminant > 0, two_roots, envelope)


def early_weights(W0: ArrayLike, corr: Correlation, t: float) -> Floats:
    """W₀ e^{4Γt}, the linear phase before the first step (Eq. 17), (d, m).

    >>> early_weights([[1e-3, 1e-3]], Correlation.from_matrix([1.0, 0.0]), t=0.5).round(5)
    array([[0.00739, 0.001  ]])
    """
    coordinates, gamma = checked(corr).project(W0)
    moment = number(t, "t", least=0)
    with np.errstate(over="ignore"):
        most = 4 * float(gamma.max(initial=0.0)) * moment
    if most > 100:
        raise InputError("t", "must be early: 4 γ_1 t must be at most 100", f"{most:.3g}", "use closed_form")
    with np.errstate(over="ignore"):
        growth = np.expm1(4 * gamma * moment)
    return np.asarray(as_numpy(W0), dtype=np.float64) + (coordinates * growth) @ corr.eigenvectors.T


def learning_rate_bound(gamma: ArrayLike, momentum: float = 0.0) -> float:
    """1 / (4 γ_1): with a larger learning rate, the minimum of the first mode is unstable (App. G).

    A negative eigenvalue also bounds it by 1 / (2 |γ|); above that, its mode grows instead of decaying. Heavy-ball
    momentum raises the bound by the factor 1 + momentum.

    >>> learning_rate_bound([5.0, 1.0])
    0.05
    """
    gamma = vector(gamma, "gamma", LARGEST)
    if gamma.size == 0:
        raise InputError("gamma", "must not be empty")
    steepest = max(4 * float(gamma.max()), -2 * float(gamma.min()))
    return (1 + momentum) / steepest if steepest > 0 else math.inf


def _aligned(u: Floats, gamma: Floats, growth: Floats, bend: Floats, weights: bool) -> tuple[Floats, Floats | None]:
    d, k = len(u), min(u.shape)
    q, r = qr_nonnegative(u)
    gamma, s0 = gamma[:k], np.diag(r)
    own_time = np.maximum(growth[:, :k] / np.where(gamma == 0, 1.0, 4 * gamma), 0)
    modes = [Modes(g, s) for g, s in zip(gamma, s0, strict=True)]
    s = np.stack([mode.singular_values(t)[:, 0] for mode, t in zip(modes, own_time.T, strict=True)], axis=1)
    s = s * np.sqrt(_bent(gamma * s**2, bend[:k]))
    spectrum = np.zeros((len(growth), d))  # modes beyond the rank of Γ stay at 0
    spectrum[:, :k] = gamma * s**2
    moved = None
    if weights:
        diagonal = np.zeros((len(growth), *u.shape))
        diagonal[:, np.arange(k), np.arange(k)] = s
        moved = q @ diagonal
    return -np.sort(-spectrum, axis=1), moved


def _bent(lam: Floats, bend: Floats) -> Floats:
    """Factor that turns λ = μ/(1 + μ) into the λ of descent, whose odds are μ (1 + μ)^bend."""
    room = np.maximum(1 - lam, 1e-12)  # 1/(1 + μ)
    return np.where(bend > 0, 1 / (lam + (1 - lam) * room**bend), 1.0)


def _logistic(u: Floats, gamma: Floats, growth: Floats, bend: Floats, weights: bool) -> tuple[Floats, Floats | None]:
    d, r = u.shape
    bend = np.append(bend, np.zeros(d))[:d]  # approximation: the j-th eigenvalue of C belongs to the j-th mode
    lam0, basis = np.linalg.eigh((u * gamma) @ u.T)
    b = (basis / np.sqrt(1 - lam0)) @ basis.T @ u
    # in the rows of R (Gram–Schmidt order, largest γ first) each saturated direction can be capped separately
    q, rows = qr_nonnegative(b)
    with np.errstate(divide="ignore"):
        log_rows, log_gamma = np.log(np.abs(rows)), np.log(np.abs(gamma)) / 2
    spectrum, moved = np.empty((len(growth), d)), np.empty((len(growth), d, r)) if weights else None
    step = max(1, CHUNK // (d * r))
    for start in range(0, len(growth), step):
        part = slice(start, start + step)
        lead = growth[part][:, np.minimum(np.arange(d), r - 1), None]  # a row is about as large as its first entry
        linear = log_rows + (growth[part, None, :] - lead)  # (T, d, r), logs of |entries|
        height = (linear + log_gamma).max(axis=-1, keepdims=True)
        height = np.where(np.isfinite(height), height, 0.0)
        cap = np.minimum(height + lead, LOG_CAP) - height
        f = np.sign(rows) * np.exp(linear + log_gamma + cap)
        m = (f * np.sign(gamma)) @ f.transpose(0, 2, 1)
        diagonal = np.einsum("tii->ti", m)
        lower = np.linalg.cholesky(m + _diagonal(1 + 1e-15 * d * np.abs(diagonal)))
        half = np.linalg.solve(lower, m)
        c = np.linalg.solve(lower, half.transpose(0, 2, 1))
        lam: Floats = np.linalg.eigvalsh((c + c.transpose(0, 2, 1)) / 2)[:, ::-1].astype(np.float64, copy=False)
        factor = _bent(lam, bend)
        spectrum[part] = lam * factor
        if moved is not None:
            left, sigma, _ = np.linalg.svd(lower)
            root = (left * (np.sqrt(factor) / sigma)[:, None, :]) @ left.transpose(0, 2, 1)  # (I + M)^{-1/2}
            moved[part] = q @ root @ (np.sign(rows) * np.exp(linear + cap))
    return spectrum, moved


def _diagonal(x: Floats) -> Floats:
    return x[..., None] * np.eye(x.shape[-1])
