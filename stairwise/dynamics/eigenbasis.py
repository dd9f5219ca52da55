"""The linear model in the eigenbasis of Γ, reduced to the columns that affect the result.

With U = W V the flow (Eq. 6) is U' = 4 (I − U Λ Uᵀ) U Λ: columns interact only through the d × d matrix C = U Λ Uᵀ. Up
to time T, column k grows at most by e^{4γ_k T}, so from a small start most columns stay negligible in C. These columns
are *passive*: they enter C as if they grew freely, and only the others are simulated. All columns are simulated if the
weights are requested.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import InputError, as_numpy
from stairwise.theory.correlation import Correlation, checked
from stairwise.theory.laws import learning_rate_bound, log_growth
from stairwise.theory.trajectory import Trajectory

Floats = NDArray[np.float64]


def rhs(u: Floats, gamma: Floats) -> Floats:
    """4 (I − U Λ Uᵀ) U Λ, (d, k)."""
    y = u * gamma
    return 4 * (y - (y @ u.T) @ y)


def jacobian(u: Floats, gamma: Floats) -> Floats:
    """d rhs / dU, (d k, d k); minus the Hessian of the loss."""
    d, k = u.shape
    y = u * gamma
    free = np.eye(d) - y @ u.T
    out = -np.einsum("ib,ja->iajb", y, y)
    out[np.arange(d), :, np.arange(d), :] -= y.T @ y
    columns = np.arange(k)
    out[:, columns, :, columns] += free * gamma[:, None, None]
    return 4 * out.reshape(d * k, d * k)


@dataclass(frozen=True, eq=False)
class Split:
    """A problem (W0, corr, horizon), divided into active and passive columns.

    Attributes:
        u, gamma: coordinates (d, r) and eigenvalues (r,) of all columns.
        active: which columns are simulated, (r,) of bool.
    """

    W0: Floats
    corr: Correlation
    u: Floats
    gamma: Floats
    active: NDArray[np.bool_]

    @classmethod
    def of(cls, W0: ArrayLike, corr: Correlation, horizon: float, tolerance: float) -> "Split":
        """Passive columns contribute at most `tolerance` to C up to time `horizon`; with 0 there are none."""
        u, gamma = checked(corr).project(W0)
        with np.errstate(divide="ignore"):
            size = 2 * np.log(np.abs(u).max(axis=0)) + np.log(len(u))  # bound of log Σ u², whose squares may underflow
            log_share = np.log(np.abs(gamma)) + size + 8 * np.maximum(gamma, 0) * horizon
        order = np.argsort(log_share)
        total = np.cumsum(np.exp(np.minimum(log_share[order], 0.0)))
        active = np.zeros(len(gamma), dtype=bool)
        active[order[total > tolerance]] = True
        active[0] = True
        active |= tolerance == 0
        return cls(np.asarray(as_numpy(W0), dtype=np.float64), corr, u, gamma, active)

    def trajectory(self, times: Floats, u_active: Floats, method: str, weights: bool, lr: float | None) -> Trajectory:
        """Combine active and passive columns into the spectrum, and the weights if requested."""
        if not np.isfinite(u_active).all():
            bound = learning_rate_bound(self.gamma)
            raise InputError("lr", f"must be below {bound:.3g}: training diverged", lr, "lower lr")
        passive = ~self.active
        growth = log_growth(self.gamma[passive], times, lr)
        most = growth.max(axis=0, initial=-np.inf)  # both logarithms may be large where their sum is not
        with np.errstate(divide="ignore"):
            u_passive = np.sign(self.u[:, passive]) * np.exp(np.log(np.abs(self.u[:, passive])) + most)
        c = (u_active * self.gamma[self.active]) @ u_active.transpose(0, 2, 1)
        shares = self.gamma[passive] * np.exp(2 * (growth - most))
        c += np.einsum("ik,tk,jk->tij", u_passive, shares, u_passive, optimize=True)
        spectrum: Floats = np.linalg.eigvalsh(c)[:, ::-1].astype(np.float64, copy=False)
        moved = None
        if weights:
            moved = self.W0 + (u_active - self.u[:, self.active]) @ self.corr.eigenvectors[:, self.active].T
        return Trajectory(times, spectrum, method, moved)
