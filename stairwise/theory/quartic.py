r"""The family of losses Tr(W A Wᵀ) + Tr((W B Wᵀ)²), to which most joint-embedding losses reduce near the origin.

Barlow Twins is A = −2Γ, B = Γ (up to the constant d). If A and B commute, each common eigenvector with eigenvalues
(a, b) has an independent mode that obeys Bernoulli's equation s' = −2a s − 4b² s³. `dynamics.flow.quartic_flow`
integrates the flow for A and B that do not commute.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stairwise.checks import LARGEST, InputError, matrix, real, symmetric, times
from stairwise.theory.alignment import qr_nonnegative

Floats = NDArray[np.float64]

LARGEST_MATRIX = 1e25  # of A and B, so that (W B Wᵀ)² stays below 1e308


@dataclass(frozen=True, eq=False)
class Quartic:
    """L(W) = Tr(W A Wᵀ) + Tr((W B Wᵀ)²) for symmetric A, B of shape (m, m).

    Example:
        >>> gamma = np.diag([2.0, 1.0])
        >>> barlow = Quartic(-2 * gamma, gamma)
        >>> W0 = 1e-3 * np.eye(2)
        >>> barlow.weights(W0, np.inf).round(3)
        array([[0.707, 0.   ],
               [0.   , 1.   ]])
        >>> round(float(barlow.loss(barlow.weights(W0, np.inf))), 9) + 2  # the constant d
        0.0
    """

    A: ArrayLike
    B: ArrayLike

    def __post_init__(self) -> None:
        a = symmetric(self.A, "A", most=LARGEST_MATRIX)
        object.__setattr__(self, "A", a)
        object.__setattr__(self, "B", symmetric(self.B, "B", len(a), LARGEST_MATRIX))

    def _weights(self, W: ArrayLike) -> Floats:
        out, m = np.asarray(real(W, "W"), dtype=np.float64), len(np.asarray(self.A))
        if out.ndim < 2 or out.shape[-1] != m or not (np.abs(out) <= LARGEST).all():
            raise InputError("W", f"must be finite weights, (…, d, {m}), up to {LARGEST:g}", f"shape {out.shape}")
        return out

    def loss(self, W: ArrayLike) -> Floats:
        """L(W) for weights (..., d, m)."""
        w, a, b = self._weights(W), np.asarray(self.A), np.asarray(self.B)
        inner = w @ b @ w.swapaxes(-1, -2)
        return np.einsum("...ij,jk,...ik->...", w, a, w) + (inner**2).sum(axis=(-1, -2))

    def gradient(self, W: ArrayLike) -> Floats:
        """∇L = 2 W A + 4 W B Wᵀ W B."""
        w, a, b = self._weights(W), np.asarray(self.A), np.asarray(self.B)
        return 2 * w @ a + 4 * w @ b @ w.swapaxes(-1, -2) @ w @ b

    def common_modes(self) -> tuple[Floats, Floats, Floats]:
        """Eigenvalues a, b and the common eigenvectors (in columns) of A and B, fastest growth (lowest a) first."""
        a, b = np.asarray(self.A), np.asarray(self.B)
        size = np.linalg.norm(a) * np.linalg.norm(b)
        if np.linalg.norm(a @ b - b @ a) > 1e-9 * size:
            raise InputError("A and B", "must commute for a closed form", None, "use quartic_flow")
        # eigenvectors of a generic combination are common ones, even if A or B alone is degenerate
        scale = np.linalg.norm(a) / max(np.linalg.norm(b), np.finfo(float).tiny)
        _, vectors = np.linalg.eigh(a + 0.7320508 * scale * b if np.any(b) else a)
        a_modes, b_modes = (np.einsum("ij,ik,kj->j", vectors, m, vectors) for m in (a, b))
        order = np.argsort(a_modes, kind="stable")
        return a_modes[order], b_modes[order], vectors[:, order]

    def weights(self, W0: ArrayLike, t: ArrayLike) -> Floats:
        """W(t) of the flow from the aligned init of W0 (exact if W0 is aligned already), (*t.shape, d, m).

        Bernoulli: s(t)² = s₀² e^{−4at} / (1 + 8b² s₀² (1 − e^{−4at}) / 4a), which tends to −a/2b² if a < 0.
        """
        a, b, vectors = self.common_modes()
        q, r = qr_nonnegative(np.asarray(matrix(W0, "W0", len(a), LARGEST), dtype=np.float64) @ vectors)
        t = times(t, "t")
        k = min(r.shape)
        s = _bernoulli(np.diag(r), -4 * a[:k], 8 * b[:k] ** 2, t[..., None])
        diagonal = np.zeros((*t.shape, *r.shape))
        diagonal[..., np.arange(k), np.arange(k)] = s
        return q @ diagonal @ vectors.T


def _bernoulli(s0: Floats, rate: Floats, brake: Floats, t: Floats) -> Floats:
    """s(t) of (s²)' = rate s² − brake s⁴."""
    if np.any(np.isinf(t)) and np.any((rate > 0) & (brake == 0) & (s0 > 0)):
        raise InputError("t", "must be finite", np.inf, "a mode with a < 0 and b = 0 grows without bound")
    speed = np.abs(rate)
    with np.errstate(over="ignore"):
        x = np.where(speed == 0, 0.0, speed) * np.where(speed == 0, 0.0, t)
    # (1 − e^{−x})/|rate|; the limit at rate 0 is t
    elapsed = np.where(speed > 0, -np.expm1(-x) / np.where(speed > 0, speed, 1), t)
    still = brake * s0**2 == 0
    with np.errstate(invalid="ignore"):
        held = np.where(still, 0.0, np.sqrt(brake) * s0 * np.sqrt(elapsed))
    grows = rate > 0
    # rate > 0: divide by e^{rate t}, unless the brake is zero
    with np.errstate(divide="ignore", over="ignore"):
        free = np.exp(np.log(s0) + np.where(grows & still, x / 2, 0.0))
    if np.isinf(free[np.isfinite(x + 0 * free)]).any():
        raise InputError("t", "must be earlier", t.max(), "a mode with a < 0 and b = 0 grows beyond 1e308")
    top = np.where(grows, np.where(still, free, s0), np.exp(-x / 2) * s0)
    bottom = np.hypot(np.where(grows & ~still, np.exp(-x / 2), 1.0), held)
    return np.divide(top, bottom, out=np.zeros(np.broadcast_shapes(top.shape, bottom.shape)), where=bottom > 0)
