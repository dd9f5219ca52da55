r"""Spectral flow from any small initialization: every Gram–Schmidt row follows its own path, and time is its length.

Let U = W₀V = Q R in the eigenbasis of Γ (QR with a nonnegative diagonal, largest γ first). In spectral flow,
W' = polar(−∇L), row j of R competes only with the columns k > d, because the other rows take the columns up to d:

    T_jj = s,   T_jk(s) = R_jk (s / R_jj)^{γ_k/γ_j},                                   (App. C, as for gradient flow)
    t(s) = ∫ √(1 + Σ_{k>d} (γ_k T_jk / γ_j s)²) ds   from R_jj to s,                   (unit speed)
    λ_j(s) = γ_j s² + Σ_{k>d} γ_k T_jk²   up to 1, where the row comes to rest.

For aligned init this is s = s(0) + t; for d = 1 it is exact, too. It has no fitted constant. Columns k > d fade only
as powers of the growth, s/R_jj, unless W₀ is tiny: they delay the last steps and stay in the learned span. The first
step of spectral descent makes weights of size lr, however small W₀ is; descent follows the law from there, from
W₁ = W₀ + lr polar(−∇L).

If W₀ misses a mode, the row follows the next one that it has. If W₀ has rank below d, the rows beyond its rank are zero
and stay so, because the gradient has W₀'s rows. So does a row that has only modes with γ ≤ 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import cumulative_simpson
from scipy.interpolate import CubicHermiteSpline
from scipy.optimize import brentq

from stairwise.checks import InputError
from stairwise.theory.alignment import qr_nonnegative

Floats = NDArray[np.float64]

GRID = 401  # points of the integral over log s
SMALLEST = 1e-145  # length of weights; squares of smaller ones vanish
NOISE = 1e-14  # rounding error: of singular values of G relative to ‖U Λ‖, of columns of U relative to ‖U‖


def gradient(u: Floats, gamma: Floats) -> tuple[Floats, float]:
    """G = (I − C) U Λ, a quarter of −∇L, (d, m), and the size below which its singular values are rounding error."""
    y = u * gamma
    return y - (y @ u.T) @ y, NOISE * float(np.linalg.norm(y))


def check_size(u: Floats) -> None:
    """Weights are zero, or long enough for their squares."""
    largest = float(np.abs(u).max(initial=0.0))
    if 0 < largest < SMALLEST:
        remedy = "multiply W0: step times hardly depend on its size"
        raise InputError("W0", f"must be zero or at least {SMALLEST:g} large for the spectral rule", largest, remedy)


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


def spectral_evolve(
    coordinates: Floats, gamma: Floats, t: Floats, lr: float | None = None, weights: bool = False
) -> tuple[Floats, Floats | None]:
    """The law in the eigenbasis: from W₀V (d, r) and γ (r,) descending to spectra (T, d) and W(t)V (T, d, r).

    The weights have the law's eigenvalues and the span of the rows T, all columns included.
    """
    q, r, rows = _rows(coordinates, gamma, lr)
    late = np.maximum(t - (lr or 0.0), 0.0)
    growth = np.stack([row.growth(late) for row in rows], axis=1)
    lam = np.stack([row.eigenvalue(x) for row, x in zip(rows, growth.T, strict=True)], axis=1)
    moved = q @ _weights(r, gamma, rows, growth, lam) if weights else None
    before = t < (lr or 0.0)
    lam[before] = np.linalg.eigvalsh((coordinates * gamma) @ coordinates.T)
    if moved is not None:
        moved[before] = coordinates
    return -np.sort(-lam, axis=1), moved


def spectral_steps(coordinates: Floats, gamma: Floats, lr: float | None = None) -> Floats:
    """Times at which the law's eigenvalues reach 1/2, ascending, (d,); infinite for rows that do not grow.

    >>> spectral_steps(1e-3 * np.eye(2, 5), np.array([2.0, 0.5, 0.3, 0.2, 0.1])).round(3)
    array([0.499, 0.999])
    """
    steps = np.array([row.step_time() for row in _rows(coordinates, gamma, lr)[2]])
    return np.sort(steps + (lr or 0.0))


def _rows(u: Floats, gamma: Floats, lr: float | None) -> tuple[Floats, Floats, list["_Row | _Still"]]:
    """Q, R and the paths of the rows, after the first step of descent if `lr` is given."""
    check_size(u)
    d = len(u)
    positive = int((gamma > 0).sum())
    if d > positive:
        rule = f"must have at most {positive} rows, the number of positive γ, for the spectral law"
        raise InputError("W0", rule, d, 'lower d, or use gradient_flow(rule="spectral")')
    if lr is not None:
        u = u + lr * polar(*gradient(u, gamma))
    largest = float(np.linalg.eigvalsh((u * gamma) @ u.T)[-1])
    if not largest < 1:
        name, what = ("W0", "start with") if lr is None else ("lr", "be so small that the first update leaves")
        remedy = f'stay below γ₁^(-1/2) = {gamma[0] ** -0.5:.3g}, or use gradient_descent(rule="spectral")'
        raise InputError(name, f"must {what} all eigenvalues of C below 1", lr or f"{largest:.3g}", remedy)
    pivots = _pivots(u)
    n = len(pivots)
    order = np.append(pivots, np.setdiff1d(np.arange(len(gamma)), pivots)).astype(int)
    q, r = qr_nonnegative(u[:, order])
    r[:n][order < np.array(pivots)[:, None]] = 0.0
    r[n:] = 0.0
    grows = [j < n and gamma[pivots[j]] > 0 for j in range(d)]
    paths = [
        _Row.of(r[j], gamma[order], j, n) if grows[j] else _Still(float((gamma[order] * r[j] ** 2).sum()))
        for j in range(d)
    ]
    r[:, order] = r.copy()
    return q, r, paths


def _pivots(u: Floats) -> list[int]:
    """The first columns of u that are independent of those before; 0, …, d − 1 for generic u."""
    noise, found = NOISE * float(np.linalg.norm(u)), []
    basis = np.zeros((len(u), 0))
    for k, column in enumerate(u.T):
        rest = column - basis @ (basis.T @ column)
        rest = rest - basis @ (basis.T @ rest)  # once more, against rounding
        length = float(np.linalg.norm(rest))
        if length > noise:
            found.append(k)
            basis = np.column_stack([basis, rest / length])
        if len(found) == len(u):
            break
    return found


def _weights(r: Floats, gamma: Floats, rows: list["_Row | _Still"], growth: Floats, lam: Floats) -> Floats:
    """D^{1/2} (T Λ Tᵀ)^{-1/2} T with D = diag(λ), (T, d, m), of the rows that grow; T itself while T Λ Tᵀ is not
    positive. Other rows stay."""
    own = {j: row.gamma[0] for j, row in enumerate(rows) if isinstance(row, _Row)}
    grow = list(own)
    out = np.broadcast_to(r, (len(growth), *r.shape)).copy()
    r = r[grow]
    power = gamma / np.array(list(own.values()))[:, None]
    t = r * np.exp(np.where(r != 0, power, 0.0) * growth[:, grow, None])
    c, p = np.linalg.eigh((t * gamma) @ t.transpose(0, 2, 1))
    positive = np.all(c > 0, axis=1)
    c[~positive] = 1.0
    unit = (p * c[:, None, :] ** -0.5) @ p.transpose(0, 2, 1) @ t
    grown = np.sqrt(np.maximum(lam[:, grow], 0.0))[:, :, None] * unit
    out[:, grow] = np.where(np.reshape(positive, (-1, 1, 1)), grown, t)
    return out


@dataclass(frozen=True, eq=False)
class _Row:
    """One row as a function of its growth x = log(s/R_jj).

    Attributes:
        gamma: γ_j and the γ_k of the columns k > d, (n,).
        log_entries: log |R_jj| and log |R_jk|, (n,).
        end: x at which λ = 1.
        extra: t(x) − (s − R_jj), the length that the columns k > d add.
    """

    gamma: Floats
    log_entries: Floats
    end: float
    extra: CubicHermiteSpline

    @classmethod
    def of(cls, r: Floats, gamma: Floats, j: int, d: int) -> "_Row":
        entries = np.abs(np.append(r[j], r[d:]))
        kept = entries > 0
        g, log_r = np.append(gamma[j], gamma[d:])[kept], np.log(entries[kept])
        grows = g > 0
        longest = max(((-0.5 * np.log(g[grows]) - log_r[grows]) * g[0] / g[grows]).min(), 0.0)
        while _eigenvalue(longest, g, log_r) < 1:  # by rounding, or by columns with γ_k < 0
            longest += 0.01
        end = 0.0 if longest == 0 else brentq(lambda x: _eigenvalue(x, g, log_r) - 1, 0.0, longest, xtol=1e-14)
        x = np.linspace(0.0, max(end, 1e-9), GRID)
        t = np.exp(log_r + x[:, None] * g / g[0])
        side = np.sqrt(((g[1:] / g[0] * t[:, 1:]) ** 2).sum(axis=1))
        rate = side**2 / (np.hypot(t[:, 0], side) + t[:, 0])
        extra = CubicHermiteSpline(x, cumulative_simpson(rate, x=x, initial=0.0), rate)
        return cls(g, log_r, end, extra)

    def eigenvalue(self, x: Floats) -> Floats:
        return np.asarray(_eigenvalue(x, self.gamma, self.log_entries))

    def time(self, x: Floats) -> Floats:
        return np.asarray(np.exp(self.log_entries[0]) * np.expm1(x) + self.extra(x))

    def growth(self, t: Floats) -> Floats:
        """x(t): Newton's method on `time`, which increases, from an interpolation; the row rests at its end."""
        grid = self.extra.x
        x = np.interp(t, self.time(grid), grid)
        for _ in range(4):
            slope = np.exp(self.log_entries[0] + x) + self.extra(x, 1)
            x = np.clip(x - (self.time(x) - np.minimum(t, self.time(grid[-1]))) / slope, 0.0, self.end)
        return x

    def step_time(self) -> float:
        if self.eigenvalue(np.array(0.0)) >= 0.5:
            return 0.0
        return float(self.time(np.array(brentq(lambda x: self.eigenvalue(x) - 0.5, 0.0, self.end))))


@dataclass(frozen=True)
class _Still:
    """A row that does not grow, with its eigenvalue."""

    value: float

    def eigenvalue(self, x: Floats) -> Floats:
        return np.full_like(x, self.value)

    def growth(self, t: Floats) -> Floats:
        return np.zeros_like(t)

    def step_time(self) -> float:
        return np.inf


def _eigenvalue(x: Floats | float, gamma: Floats, log_entries: Floats) -> Floats:
    """λ(x) = Σ γ_k T_k(x)², shape of x."""
    t = np.exp(log_entries + np.asarray(x)[..., None] * gamma / gamma[0])
    return np.asarray((gamma * t**2).sum(axis=-1))
