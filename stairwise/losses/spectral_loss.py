r"""Losses of the eigenvalues of C: the paper's proposals for faster steps (App. G).

L = Σ_j h(λ_j(C)) has the gradient dL/dC = V h′(Λ) Vᵀ, which needs no derivative of eigenvectors and also holds for
equal eigenvalues. Each h is the landscape of the same name in `stairwise.theory.landscapes`, extended to λ < 0.
h = (1 − λ)² is `barlow_twins(lambda_=1, batch_norm=False, symmetric=True)`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stairwise.checks import InputError, number
from stairwise.losses.views import correlation, of_views, warn_if_undetermined

TINY = 1e-12  # below this |λ|, the root is linear


@of_views
def sharpened(z_a: Tensor, z_b: Tensor) -> Tensor:
    r"""h = (1 − sign(λ) √|λ|)²: a kink at 0, so modes do not wait.

    Example:
        >>> z = torch.eye(4)  # all eigenvalues are ¼
        >>> sharpened(z, z)
        tensor(1.)
    """

    def h(x: Tensor) -> tuple[Tensor, Tensor]:
        root = x.abs().clamp_min(TINY).sqrt()
        off = 1 - x / root
        return off.square(), -off / root

    return _sum_over_modes(z_a, z_b, h)


@of_views
def smoothed(z_a: Tensor, z_b: Tensor, epsilon: float = 0.1) -> Tensor:
    r"""h = (g − 1)² with g = min(λ, 1 + ε(λ − 1)): less steep beyond the minimum, flat if ε = 0.

    Example:
        >>> z = 4 * torch.eye(4)  # all eigenvalues are 4
        >>> smoothed(z, z, epsilon=0.0)
        tensor(0.)
    """
    epsilon = _epsilon(epsilon)

    def h(x: Tensor) -> tuple[Tensor, Tensor]:
        softening = 1 - (1 - epsilon**2) * (x > 1).to(x)
        return softening * (x - 1).square(), 2 * softening * (x - 1)

    return _sum_over_modes(z_a, z_b, h)


@of_views
def fourth_power(z_a: Tensor, z_b: Tensor) -> Tensor:
    """h = (1 − λ)⁴: no curvature at the minimum, so large learning rates are stable there.

    Example:
        >>> z = torch.eye(4)
        >>> fourth_power(z, z).round(decimals=4)  # 4 · 0.75⁴
        tensor(1.2656)
    """

    def h(x: Tensor) -> tuple[Tensor, Tensor]:
        return (1 - x) ** 4, -4 * (1 - x) ** 3

    return _sum_over_modes(z_a, z_b, h)


@of_views
def hinged(z_a: Tensor, z_b: Tensor, width: float = 0.25) -> Tensor:
    """h = max(|1 − λ| − width, 0)²: a flat floor around λ = 1.

    Example:
        >>> z = torch.eye(4)
        >>> hinged(z, z, width=0.25)
        tensor(1.)
    """
    width = _width(width)

    def h(x: Tensor) -> tuple[Tensor, Tensor]:
        beyond = ((x - 1).abs() - width).clamp_min(0)
        return beyond.square(), 2 * beyond * (x - 1).sign()

    return _sum_over_modes(z_a, z_b, h)


def _epsilon(epsilon: float) -> float:
    if (value := number(epsilon, "epsilon", least=0)) > 1:
        raise InputError("epsilon", "must be at most 1", epsilon, "1 is the plain loss")
    return value


def _width(width: float) -> float:
    if (value := number(width, "width", least=0)) >= 1:
        raise InputError("width", "must be below 1", width, "the floor must not reach the origin")
    return value


def _sum_over_modes(z_a: Tensor, z_b: Tensor, h: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    warn_if_undetermined(z_a)
    loss: Tensor = _SpectralSum.apply(correlation(z_a, z_b), h)
    return loss


class _SpectralSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, C: Tensor, h: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        eigenvalues, V = _eigh(C)
        values, slopes = h(eigenvalues)
        ctx.save_for_backward((V * slopes) @ V.T)
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def _eigh(C: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; retried on the CPU in float64 if the solver fails, NaN if C is not finite."""
    try:
        values, vectors = torch.linalg.eigh(C)
        return values, vectors
    except torch.linalg.LinAlgError:
        if not torch.isfinite(C).all():
            return torch.full_like(C[0], torch.nan), torch.full_like(C, torch.nan)
        values, vectors = torch.linalg.eigh(C.double().cpu())
        return values.to(C), vectors.to(C)


class Sharpened(nn.Module):
    """`sharpened` as a module."""

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return sharpened(z_a, z_b)


class Smoothed(nn.Module):
    """`smoothed` as a module."""

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        self.epsilon = _epsilon(epsilon)

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return smoothed(z_a, z_b, self.epsilon)


class FourthPower(nn.Module):
    """`fourth_power` as a module."""

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return fourth_power(z_a, z_b)


class Hinged(nn.Module):
    """`hinged` as a module."""

    def __init__(self, width: float = 0.25) -> None:
        super().__init__()
        self.width = _width(width)

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return hinged(z_a, z_b, self.width)
