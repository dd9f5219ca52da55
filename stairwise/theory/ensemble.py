"""Predict the staircase from the data alone, averaged over Gaussian initializations of a given scale."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import LARGEST, InputError, one_of, positive_int, rate, scale, time_vector, vector
from stairwise.checks import seed as check_seed
from stairwise.theory.alignment import step_time_quantiles
from stairwise.theory.laws import evolve
from stairwise.theory.spectral_law import spectral_evolve, spectral_steps
from stairwise.theory.trajectory import Trajectory

Floats = NDArray[np.float64]

OPTIMIZERS = ("sgd", "muon")


@dataclass(frozen=True, eq=False)
class Staircase:
    """Predicted spectra for many draws of W₀.

    Attributes:
        times: (T,).
        spectra: eigenvalues of C, (draws, T, d).
        steps: times at which λ_j reaches 1/2, (draws, d); infinite if it does not within `times`.
    """

    times: Floats
    spectra: Floats
    steps: Floats

    def step_quantiles(self, q: ArrayLike = (0.05, 0.5, 0.95)) -> Floats:
        """Quantiles of the time of the j-th step over the draws, (len(q), d)."""
        return np.quantile(self.steps, _quantiles(q), axis=0, method="closest_observation")

    def loss_quantiles(self, q: ArrayLike = (0.05, 0.5, 0.95)) -> Floats:
        """Quantiles of the loss over the draws, (len(q), T)."""
        return np.quantile(((1 - self.spectra) ** 2).sum(axis=-1), _quantiles(q), axis=0)


def _quantiles(q: ArrayLike) -> Floats:
    out = vector(q, "q")
    if ((out < 0) | (out > 1)).any():
        raise InputError("q", "must lie between 0 and 1", out)
    return out


def predict_staircase(
    gamma: ArrayLike,
    d: int,
    alpha: float,
    times: ArrayLike | None = None,
    lr: float | None = None,
    draws: int | None = None,
    seed: int = 0,
    optimizer: str = "sgd",
) -> Staircase:
    """Predicted spectra for `draws` Gaussian inits of scale α, from the leading eigenvalues of Γ alone.

    W₀V is Gaussian like W₀, so the eigenvectors are not needed. Give more than d eigenvalues (about d + 50), because
    modes beyond d compete with the last ones; a few hundred for Muon, under which they fade more slowly.

    Arguments:
        gamma: leading eigenvalues of Γ, descending, (r,), r ≥ d, the first d positive.
        times: default: dense around expected steps, up to 1.15 times the 95 % quantile of the last step.
        draws: number of draws of W₀; default 100, fewer for d above 16.
        lr: learning rate of descent; None for flow.
        optimizer: "sgd" (logistic law) or "muon" (spectral law).

    Example:
        >>> steps = predict_staircase([2.0, 1.0, 0.5], d=2, alpha=1e-3, draws=50)
        >>> steps.step_quantiles(0.5).round(1)
        array([[0.8, 1.8]])
    """
    gamma = -np.sort(-vector(gamma, "gamma", LARGEST))
    gamma[np.abs(gamma) < 1e-290] = 0.0  # such numbers have too few digits
    d = positive_int(d, "d", int((gamma > 0).sum()), "only modes with positive γ are learned; lower d or give more γ")
    alpha = scale(alpha)
    lr = None if lr is None else rate(lr)
    spectral = one_of(optimizer, "optimizer", OPTIMIZERS) == "muon"
    draws = max(20, min(100, 1600 // d)) if draws is None else positive_int(draws, "draws", 10**6)
    rng = np.random.default_rng(check_seed(seed))
    starts = alpha * rng.standard_normal((draws, d, len(gamma)))
    largest = max(float(np.linalg.eigvalsh((u * gamma) @ u.T)[-1]) for u in starts)
    if not largest < 1:
        raise InputError("alpha", "must start with all eigenvalues of C below 1", f"{largest:.3g}", "lower alpha")
    if spectral:
        return _spectral_staircase(starts, gamma, times, lr)
    if times is None:
        times = _default_times(gamma[:d], alpha, lr)
    t = time_vector(times)
    spectra = np.stack([evolve(u, gamma, t, lr=lr)[0] for u in starts])
    return Staircase(t, spectra, np.stack([Trajectory(t, s, "draw").step_times() for s in spectra]))


def _spectral_staircase(starts: Floats, gamma: Floats, times: ArrayLike | None, lr: float | None) -> Staircase:
    steps = np.stack([spectral_steps(u, gamma, lr) for u in starts])
    if times is None:  # λ grows like t² up to 1, so it is done at √2 times its step
        times = np.linspace(0, 1.15 * np.sqrt(2) * np.quantile(steps[:, -1], 0.95), 300)
    t = time_vector(times)
    spectra = np.stack([spectral_evolve(u, gamma, t, lr)[0] for u in starts])
    return Staircase(t, spectra, np.where(steps <= t.max(initial=0.0), steps, np.inf))


def _default_times(gamma: Floats, alpha: float, lr: float | None) -> Floats:
    # descent is slower than flow by the ratio of their growth rates
    slower = 1.0 if lr is None else 4 * gamma * lr / np.log1p(4 * gamma * lr)
    early, late, last = slower * step_time_quantiles(gamma, alpha, (0.005, 0.995, 0.95))
    rise = slower / (8 * gamma)
    end = 1.15 * (last + 2 * rise).max()
    per_mode = int(np.clip(500 / len(gamma), 5, 40))
    around = np.linspace(early - 5 * rise, late + 5 * rise, per_mode)
    grid = np.concatenate([np.linspace(0, end, 200), around.ravel()])
    return np.unique(grid[(grid >= 0) & (grid <= end)])
