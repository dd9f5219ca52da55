r"""Spectral flow and descent: move along the polar factor of −∇L, as Muon does, instead of along −∇L.

In the eigenbasis of Γ the direction is polar(G) with G = (I − C) U Λ, where polar(A Σ Bᵀ) = A Bᵀ for the singular
vectors of nonzero singular values. A mode that reaches λ = 1 has no gradient left, and the polar factor jumps there: on
either side it points back. The flow in the sense of Filippov therefore *freezes* the left singular vectors of G whose
singular value has reached zero, and the others move on. Between such events the direction is smooth. Integration steps
end before the next event, whose time follows from λ and λ'; when it is as near as the tolerance, a straight line
reaches it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import DOP853

from stairwise.checks import InputError
from stairwise.dynamics.integrate import REMEDY
from stairwise.theory.spectral_law import NOISE, check_size, gradient

Floats = NDArray[np.float64]

STEPS = 20_000  # of the integrator; a flow that is not done by then is refused
CAUTION = 0.9  # a step covers at most this fraction of the time to the next event
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Muon's quintic: x ← a x + b x³ + c x⁵


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


def spectral_flow(u: Floats, gamma: Floats, times: Floats, rtol: float) -> Floats:
    """U(t) of U' = polar((I − U Λ Uᵀ) U Λ) in the eigenbasis of Γ, at finite times in any order; (T, d, m)."""
    check_size(u)
    u = np.where(np.abs(u) < 1e-290, 0.0, u)  # such numbers have too few digits
    out = np.empty((len(times), *u.shape))
    out[:] = u
    moves = np.abs(gamma) > NOISE * np.abs(gamma).max(initial=0.0)  # the other columns have no gradient, and stay
    if moves.any():
        out[:, :, moves] = _moving_columns(u[:, moves], gamma[moves], times, rtol)
    return out


def _moving_columns(u: Floats, gamma: Floats, times: Floats, rtol: float) -> Floats:
    """U(t) of columns that all have a gradient."""
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


@dataclass(frozen=True, eq=False)
class _Line:
    """A straight path."""

    start: float
    u: Floats
    move: Floats

    def __call__(self, t: float) -> Floats:
        return self.u + (t - self.start) * self.move


class _Motion:
    """The flow and its events, in which directions come to rest: learned, or shrunk to zero."""

    def __init__(self, u: Floats, gamma: Floats) -> None:
        g, noise = gradient(u, gamma)
        s = np.linalg.svd(u, compute_uv=False)
        lam = np.linalg.eigvalsh((u * gamma) @ u.T)
        present = s > NOISE * s.max(initial=0.0)
        self.gamma, self.smallest = gamma, float(s[present].min(initial=1.0))
        self.learned, self.gone = int((np.abs(lam - 1) < NOISE).sum()), int((~present).sum())
        self.moving = int((np.linalg.svd(g, compute_uv=False) > noise).sum())

    def direction(self, u: Floats) -> Floats:
        """The polar factor of G without the directions at rest."""
        lam, p = np.linalg.eigh((u * self.gamma) @ u.T)
        free = p[:, np.abs(lam - 1).argsort()[self.learned :]]
        left, _, right = np.linalg.svd(free.T @ gradient(u, self.gamma)[0], full_matrices=False)
        product: Floats = free @ left[:, : self.moving] @ right[: self.moving]
        return product

    def steps(self, u: Floats, end: float, rtol: float) -> Iterator[tuple[float, Floats, Callable[[float], Floats]]]:
        """Integrate up to `end`; yield t, U(t) and an interpolation after each step."""
        t, shape, count = 0.0, u.shape, 0

        def rate(_: float, y: Floats) -> Floats:
            return self.direction(y.reshape(shape)).ravel()

        while t < end and self.moving > 0:
            solver = DOP853(rate, t, u.ravel(), end, rtol=rtol, atol=rtol * self.smallest)
            ahead = self.events(u).min()
            while solver.status == "running" and ahead > rtol * max(float(np.abs(u).max()), self.smallest):
                solver.max_step = CAUTION * ahead
                solver.atol = max(rtol * self.smallest, NOISE * float(np.linalg.norm(u)))
                message = solver.step()
                count += 1
                if solver.status == "failed" or count > STEPS:
                    reached = f"{end:.6g}; the flow came to t = {solver.t:.6g}: {message or 'too many steps'}"
                    raise InputError("times", f"must be reached within {STEPS:,} steps", reached, REMEDY)
                t, u = solver.t, self.settle(solver.y.reshape(shape))
                solver.y = u.ravel()
                yield t, u, solver.dense_output()
                ahead = self.events(u).min()
            if solver.status == "running":
                line = _Line(t, u, self.direction(u))
                t, u = t + ahead, self.land(u)
                yield t, u, line

    def events(self, u: Floats) -> Floats:
        """Times until each direction is learned, (d,), or has shrunk to zero, (d,); exact for aligned modes."""
        move = self.direction(u)
        lam, p = np.linalg.eigh((u * self.gamma) @ u.T)
        speed = np.einsum("ij,ij->j", p, (move * self.gamma) @ (u.T @ p))  # λ'/2
        root = np.sqrt(np.maximum(lam, 0.0))
        left, s, right = np.linalg.svd(u, full_matrices=False)
        shrink = -np.einsum("ij,ij->j", left, move @ right.T)
        with np.errstate(divide="ignore", invalid="ignore"):
            learned, gone = (1 - root) * root / speed, s / shrink
        learned[np.abs(lam - 1).argsort()[: self.learned]] = np.inf
        gone[len(s) - self.gone :] = np.inf
        times: Floats = np.concatenate([learned, gone])
        return np.where(times > 0, times, np.inf)

    def land(self, u: Floats) -> Floats:
        """Go straight to the next event, and let the directions that arrive there rest."""
        times = self.events(u)
        ahead = times.min()
        u = u + ahead * self.direction(u)
        learned, gone = (part <= ahead * (1 + 1e-6) for part in (times[: len(u)], times[len(u) :]))
        self.learned, self.gone = self.learned + int(learned.sum()), self.gone + int(gone.sum())
        self.moving -= int(learned.sum() + gone.sum())
        return self.settle(u)

    def settle(self, u: Floats) -> Floats:
        """u with the directions at rest at λ = 1 or s = 0 exactly, so that they have no gradient and do not drift."""
        lam, p = np.linalg.eigh((u * self.gamma) @ u.T)
        learned = np.abs(lam - 1).argsort()[: self.learned]
        u = u + (p[:, learned] * (lam[learned] ** -0.5 - 1)) @ (p[:, learned].T @ u)
        if self.gone:
            left, s, right = np.linalg.svd(u, full_matrices=False)
            kept = len(s) - self.gone
            u = (left[:, :kept] * s[:kept]) @ right[:kept]
        return u
