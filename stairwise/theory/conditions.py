"""Measure whether the conditions of the paper's Result 4.1 and of the logistic law hold."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from stairwise.theory.alignment import qr_nonnegative
from stairwise.theory.correlation import Correlation, checked


@dataclass(frozen=True)
class Conditions:
    """The assumptions of the closed forms, measured for one W0 and one Γ.

    Attributes:
        positive: γ_1 … γ_d > 0. Only then can d modes be learned.
        unique: γ_1 … γ_d are all different.
        closest: max_j γ_{j+1}/γ_j over j ≤ d; near 1 the aligned law converges very slowly.
        full_rank: all R_jj > 0, so W₀ has a component along each of the top d eigenvectors.
        weakest: min_j R_jj / (α √(d − j + 1)), relative to its root mean square. A tiny R_jj delays mode j.
        start: largest eigenvalue of C at t = 0.
        aligned_error: estimated error of the aligned law's eigenvalues, the largest γ_k a_jk² ~ α^{2 − 2γ_k/γ_j} that
            the neglected off-diagonal entries reach (App. C). Errors on real images were a third to half of it.
    """

    positive: bool
    unique: bool
    closest: float
    full_rank: bool
    weakest: float
    start: float
    aligned_error: float

    def problems(self, law: str) -> list[str]:
        """One sentence per reason not to trust `law`; empty if there is none."""
        reasons: list[str] = []
        if not self.positive:
            reasons.append("fewer than d eigenvalues of Γ are positive, so some modes are never learned; lower d")
        elif not self.full_rank:  # with fewer positive ones it is no wonder
            reasons.append("W0 misses one of the top d eigenvectors, so its QR is not unique; draw W0 at random")
        if self.start > 0.1:
            reasons.append(f"C starts at {self.start:.2g}, which is not small; use gradient_flow, or scale W0 down")
        if law == "aligned" and not self.unique:
            reasons.append('eigenvalues of Γ coincide, so the aligned law does not apply; use law="logistic"')
        elif law == "aligned" and self.aligned_error > 0.1:
            reasons.append(
                f"eigenvalues of Γ are close (ratio {self.closest:.3f}) for this scale of W0: the aligned law may err"
                f' by {self.aligned_error:.1g}; use law="logistic"'
            )
        return reasons


def check_conditions(W0: ArrayLike, corr: Correlation) -> Conditions:
    """Measure the conditions of the closed forms for weights W0 (d, m) on `corr`.

    >>> W0 = 1e-6 * np.random.default_rng(0).standard_normal((2, 4))
    >>> close = check_conditions(W0, Correlation.from_matrix([1.0, 0.99, 0.5, 0.1]))
    >>> close.closest, close.aligned_error > 0.1, len(close.problems("aligned")), close.problems("logistic")
    (0.99, True, 1, [])
    """
    u, gamma = checked(corr).project(W0)
    d, k = len(u), min(u.shape)
    _, r = qr_nonnegative(u)
    diagonal = np.zeros(d)
    diagonal[:k] = np.diag(r)
    rms = np.sqrt((u**2).mean() * (d - np.arange(d)))
    tiny = 1e-12 * np.abs(gamma).max(initial=0.0)
    padded = np.concatenate([gamma[: d + 1], np.zeros(max(0, d + 1 - len(gamma)))])
    positive = bool((padded[:d] > tiny).all())
    ratios = padded[1:] / np.where(padded[:-1] > tiny, padded[:-1], 1)
    return Conditions(
        positive=positive,
        unique=bool((np.diff(-padded[:d]) > tiny).all()),
        closest=float(ratios.max(initial=0.0)) if positive else 1.0,
        full_rank=bool((diagonal > 1e-12 * rms).all()),
        weakest=float((diagonal / np.where(rms > 0, rms, 1)).min()),
        start=float(np.linalg.eigvalsh((u * gamma) @ u.T)[-1]),
        aligned_error=_neglected(r[:k], gamma, tiny),
    )


def _neglected(r: np.ndarray, gamma: np.ndarray, tiny: float) -> float:
    """max over j < k of γ_k a_jk(∞)² with a_jk(∞) = a_jk(0) (s_j(∞)/s_j(0))^{γ_k/γ_j} (Eq. 48), at most 1."""
    keep = gamma > tiny
    r, gamma = r[:, keep], gamma[keep]
    j, k = np.triu_indices(min(r.shape), 1, r.shape[1])
    s, a = r[j, j], np.abs(r[j, k])
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        gain = gamma[k] / gamma[j] * (-0.5 * np.log(gamma[j]) - np.log(s))
        size = np.exp(np.minimum(np.log(gamma[k]) + 2 * (np.log(a) + gain), 0.0))
    return float(np.nan_to_num(size, nan=1.0).max(initial=0.0))
