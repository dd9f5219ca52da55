r"""Spectral flow and descent: move along the polar factor of −∇L, as Muon does, instead of along −∇L.

In the eigenbasis of Γ the direction is polar(G) with G = (I − C) U Λ, where polar(A Σ Bᵀ) = A Bᵀ for the singular
vectors of nonzero singular values. A mode that reaches λ = 1 has no gradient left, and the polar factor jumps there: on
either side it points back. The flow in the sense of Filippov therefore *freezes* the left singular vectors of G whose
singular value has reached zero, and the others move on. Between such events the direction is smooth. Integration steps
end before the next event, whose time follows from λ and λ', and approach to 1e-11.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import DOP853

Floats = NDArray[np.float64]

NOISE = 1e-14  # singular values of G below this fraction of ‖U Λ‖ are rounding error
NEAR = 1e-11  # a mode this close to λ = 1, or to s = 0 in units of 1/√γ_1, has come to rest
CAUTION = 0.9  # a step covers at most this fraction of the time to the next event
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Muon's quintic: x ← a x + b x³ + c x⁵


def polar(g: Floats, noise: float = 0.0) -> Floats:
    """A Bᵀ of the SVD g = A Σ Bᵀ, (d, m); directions with singular values up to `noise` are left out.

    >>> polar(np.array([[2.0, 0.0, 0.0], [0.0, 0.0, -3.0]]))
    array([[ 1.,  0.,  0.],
           [ 0.,  0., -1.]])
    """
    left, sigma, right = np.linalg.svd(g, full_matrices=False)
    kept = sigma > noise
    product: Floats = left[:, kept] @ right[kept]
    return product


def newton_schulz(g: Floats, iterations: int = 5) -> Floats:
    """Muon's approximation of polar(g): quintic iterations from g/‖g‖; they take singular values to about 0.68 … 1.2.

    >>> newton_schulz(np.diag([2.0, 1.0, 1e-3])).diagonal().round(3)
    array([0.689, 1.114, 0.216])
    """
    a, b, c = COEFFICIENTS
    size = np.linalg.norm(g)
    x = g / size if size > 0 else g
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def gradient(u: Floats, gamma: Floats) -> tuple[Floats, float]:
    """G = (I − C) U Λ, a quarter of −∇L, (d, m), and the size below which its singular values are rounding error."""
    y = u * gamma
    return y - (y @ u.T) @ y, NOISE * float(np.linalg.norm(y))


def spectral_flow(u: Floats, gamma: Floats, times: Floats, rtol: float) -> Floats:
    """U(t) of U' = polar((I − U Λ Uᵀ) U Λ) in the eigenbasis of Γ, at finite times in any order; (T, d, m)."""
    order = np.argsort(times, kind="stable")
    out = np.empty((len(times), *u.shape))
    done = int((times <= 0).sum())
    out[:] = u
    for t, now, between in _Motion(u, gamma).steps(u, float(times.max(initial=0.0)), rtol):
        while done < len(times) and times[order[done]] <= t:
            out[order[done]] = between(times[order[done]]).reshape(u.shape)
            done += 1
        out[order[done:]] = now
    return out


class _Motion:
    """The flow and its events, in which directions come to rest: learned, or shrunk to zero."""

    def __init__(self, u: Floats, gamma: Floats) -> None:
        g, noise = gradient(u, gamma)
        s = np.linalg.svd(u, compute_uv=False)
        self.gamma, self.size = gamma, float(s[s > 0].min(initial=1.0))
        self.gone = min(1e-6 * self.size, NEAR / np.sqrt(max(float(np.abs(gamma).max(initial=0.0)), 1e-300)))
        self.moving = int((np.linalg.svd(g, compute_uv=False) > noise).sum())
        self.learned, gone = self.at_rest(u)
        self.total = self.moving + self.learned + gone

    def at_rest(self, u: Floats) -> tuple[int, int]:
        """Number of directions learned, and number shrunk to zero."""
        lam = np.linalg.eigvalsh((u * self.gamma) @ u.T)
        return int((np.abs(lam - 1) < NEAR).sum()), int((np.linalg.svd(u, compute_uv=False) < self.gone).sum())

    def direction(self, u: Floats) -> Floats:
        """The polar factor of G without the directions at rest."""
        g = gradient(u, self.gamma)[0]
        lam, p = np.linalg.eigh((u * self.gamma) @ u.T)
        free = p[:, np.argsort(np.abs(lam - 1))[self.learned :]]
        left, _, right = np.linalg.svd(free.T @ g, full_matrices=False)
        product: Floats = free @ left[:, : self.moving] @ right[: self.moving]
        return product

    def steps(self, u: Floats, end: float, rtol: float) -> Iterator[tuple[float, Floats, Callable[[float], Floats]]]:
        """Integrate up to `end`; yield t, U(t) and an interpolation after each step."""
        t, shape = 0.0, u.shape

        def rate(_: float, y: Floats) -> Floats:
            return self.direction(y.reshape(shape)).ravel()

        while t < end and self.moving > 0:
            solver = DOP853(rate, t, u.ravel(), end, rtol=rtol, atol=rtol * self.size)
            arrived = False
            while solver.status == "running" and not arrived:
                solver.max_step = CAUTION * self.next_event(u)
                solver.atol = max(rtol * self.size, NOISE * float(np.linalg.norm(u)))
                message = solver.step()
                if solver.status == "failed":
                    raise RuntimeError(f"the flow could not be integrated beyond t = {solver.t:.6g}: {message}")
                t, u = solver.t, self.settle(solver.y.reshape(shape))
                solver.y = u.ravel()
                yield t, u, solver.dense_output()
                learned, gone = self.at_rest(u)
                arrived = self.total - learned - gone < self.moving
            self.learned, self.moving = learned, self.total - learned - gone

    def settle(self, u: Floats) -> Floats:
        """u with the directions at rest at λ = 1 or s = 0 exactly, so that they have no gradient and do not drift."""
        lam, p = np.linalg.eigh((u * self.gamma) @ u.T)
        off = np.abs(lam - 1)
        learned = (off < NEAR) | (off.argsort().argsort() < self.learned)
        p, lam = p[:, learned], lam[learned]
        u = u + (p * (lam**-0.5 - 1)) @ (p.T @ u)
        left, s, right = np.linalg.svd(u, full_matrices=False)
        gone = s < self.gone
        settled: Floats = u - (left[:, gone] * s[gone]) @ right[gone] if gone.any() else u
        return settled

    def next_event(self, u: Floats) -> float:
        """Time until a direction comes to rest; exact for aligned modes, infinite if none will."""
        move = self.direction(u)
        lam, p = np.linalg.eigh((u * self.gamma) @ u.T)
        speed = np.einsum("ij,ij->j", p, (move * self.gamma) @ (u.T @ p))  # λ'/2
        root = np.sqrt(np.maximum(lam, 0.0))
        left, s, right = np.linalg.svd(u, full_matrices=False)
        shrink = -np.einsum("ij,ij->j", left, move @ right.T)
        with np.errstate(divide="ignore", invalid="ignore"):
            learned = np.where(np.abs(lam - 1) > NEAR, (1 - root) * root / speed, np.inf)
            gone = np.where((s > self.gone) & (shrink > 0), s / shrink, np.inf)
        return float(np.concatenate([learned[learned > 0], gone]).min(initial=np.inf))
