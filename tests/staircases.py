"""Simulated measurements: the linear theory's staircase, sampled in small batches."""

import numpy as np

SPECTRA = {
    "halving": 2.0 ** -np.arange(8),
    "1/j": 1 / np.arange(1, 9),
    "0.8^j": 0.8 ** np.arange(10),
    "0.9^j": 0.9 ** np.arange(10),
}
STARTS = (1e-13, 1e-10, 1e-6, 1e-3)


def simulate(gamma, start, seed, records=300, batch=64, correlation=0.9):
    """Times, measured eigenvalues of C, true step times and rise times, in order of the steps.

    Every record is a fresh batch of pairs; λ_j(0) are spread as from Gaussian weights.
    """
    rng = np.random.default_rng(seed)
    d = len(gamma)
    initial = start * rng.chisquare(np.arange(d, 0, -1)) / d
    tau, rise = np.log((1 - initial) / initial) / (8 * gamma), 1 / (8 * gamma)
    t = np.linspace(0, tau.max() + 4 * rise[np.argmax(tau)], records)
    lam = 1 / (1 + (1 - initial) / initial * np.exp(-8 * np.outer(t, gamma)))
    measured = np.empty_like(lam)
    for i, row in enumerate(np.sqrt(lam)):
        shared = rng.standard_normal((batch, d))
        z_a, z_b = (row * (shared + np.sqrt(1 / correlation - 1) * rng.standard_normal((batch, d))) for _ in "ab")
        C = z_a.T @ z_b / batch
        measured[i] = np.linalg.eigvalsh((C + C.T) / 2)[::-1]
    order = np.argsort(tau)
    return t, measured, tau[order], rise[order]


def isolated(tau, rise):
    """Which steps are at least three rise times from their neighbours."""
    near = np.diff(tau) < 3 * np.maximum(rise[1:], rise[:-1])
    return ~(np.r_[False, near] | np.r_[near, False])
