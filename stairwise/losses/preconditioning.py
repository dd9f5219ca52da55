r"""Faster steps for any joint-embedding loss: amplify its gradient along directions not yet learned (App. G).

The paper proposes ∇_F (FᵀF + damping·I)⁻¹. Here the damping is relative to the mean eigenvalue, the power may be ½,
and the norm of the gradient is preserved, which makes it stable from standard initialization too.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from stairwise.checks import InputError, flag, number
from stairwise.distributed import total, world
from stairwise.losses.views import check_views

POWERS = (0.5, 1.0)


def precondition(
    z_a: Tensor, z_b: Tensor, damping: float = 0.1, power: float = 0.5, keep_norm: bool = True
) -> tuple[Tensor, Tensor]:
    r"""Return z_a, z_b unchanged, but multiply their gradients by (C + damping·c̄·I)^(−power).

    C is the second moment of both views together, over all processes, and c̄ is its mean eigenvalue. Call it between
    the network and any loss:

        loss = sw.losses.simclr(*sw.precondition(z_a, z_b))

    Arguments:
        z_a, z_b: (N, d).
        damping: relative to c̄; the largest amplification is about (d / damping)^power.
        power: ½ or 1.
        keep_norm: rescale the gradient of the joint batch to its original norm.

    Example:
        >>> z_a = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> a, b = precondition(z_a, z_a.detach(), damping=1e-6, power=1.0)
        >>> a.sum().backward()
        >>> (z_a.grad[0, 1] / z_a.grad[0, 0]).round(decimals=3)  # variances 2 and ½: ratio 4
        tensor(4.)
    """
    check_views(z_a, z_b)
    least = z_a.shape[1] * torch.finfo(torch.promote_types(z_a.dtype, torch.float32)).eps
    damping, power = number(damping, "damping", most=1e30), number(power, "power")
    if damping < least:
        raise InputError("damping", f"must be at least {least:.1e} in this precision", damping, "raise it")
    if power not in POWERS:
        raise InputError("power", "must be 0.5 or 1", power)
    a, b = _Precondition.apply(z_a, z_b, damping, power, flag(keep_norm, "keep_norm"))
    return a, b


class _Precondition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z_a: Tensor, z_b: Tensor, damping: float, power: float, keep_norm: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(z_a, z_b)
        ctx.options = damping, power, keep_norm
        return z_a.view_as(z_a), z_b.view_as(z_b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        damping, power, keep_norm = ctx.options
        with torch.autocast(grads[0].device.type, enabled=False):
            z = torch.cat(ctx.saved_tensors)
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            g = torch.cat(grads).to(z)
            C = total(z.T @ z) / (len(z) * world())
            scaled = _apply_inverse(C, g, damping, power)
            if keep_norm:
                before, after = total(torch.stack([g.square().sum(), scaled.square().sum()]))
                scaled = scaled * torch.where(after > 0, before / after, 1.0).sqrt()
        a, b = scaled.to(grads[0].dtype).chunk(2)
        return a, b, None, None, None


def _apply_inverse(C: Tensor, g: Tensor, damping: float, power: float) -> Tensor:
    """g (C + damping·c̄·I)^(−power)."""
    mean = C.diagonal().mean()
    safe = torch.where(mean > 0, mean, 1.0)  # avoid division by zero for all-zero embeddings
    eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
    A = C / safe + damping * eye
    if power == 1:
        factor, _ = torch.linalg.cholesky_ex(A)  # positive definite by the damping; unchecked, so no synchronization
        return torch.cholesky_solve(g.T, factor).T / safe
    return g @ inverse_root(A, damping, len(C) + damping) / safe.sqrt()  # the trace of C / c̄ is d


def inverse_root(A: Tensor, least: float, most: float) -> Tensor:
    r"""A^{-1/2} for symmetric A with eigenvalues from `least` to `most`, by matrix products alone.

    With Y₀ = A/most and Z₀ = I the coupled iteration T = aI − bZY, Y ← YT, Z ← TZ keeps Y = (A/most) Z and maps the
    eigenvalues σ of (ZY)^{1/2} to p(σ) = aσ − bσ³. Newton–Schulz has a = 3/2, b = 1/2. Here (a, b) are optimal for the
    interval known to contain σ, which halves the number of rounds.

    Example:
        >>> inverse_root(torch.diag(torch.tensor([4.0, 0.25])), least=0.25, most=4.0).round(decimals=4)
        tensor([[0.5000, 0.0000],
                [0.0000, 2.0000]])
    """
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    rounds = cubic_rounds(math.sqrt(least / most), torch.finfo(A.dtype).eps)
    Y, Z = A / most, eye
    for i, (a, b) in enumerate(rounds):
        T = a * eye - b * (Z @ Y if i else Y)
        if i + 1 < len(rounds):
            Y = Y @ T
        Z = T @ Z if i else T
    return Z / math.sqrt(most)


@lru_cache
def cubic_rounds(least: float, tolerance: float) -> list[tuple[float, float]]:
    """Coefficients (a, b) of p(σ) = aσ − bσ³ that map σ from [least, 1] to 1, the minimax choice in each round.

    On [l, u] the error equioscillates at l, at √s² with s² = (l² + lu + u²)/3, and at u, so that a = 3s²b and
    b = 2/(2s³ + 3s²l − l³); the next interval is [p(l), 2 − p(l)].

    >>> len(cubic_rounds(0.01, 1e-7))
    8
    """
    low, high = least, 1.0
    rounds: list[tuple[float, float]] = []
    while high - low > tolerance or not rounds:
        s2 = (low * low + low * high + high * high) / 3
        b = 2 / (2 * s2**1.5 + 3 * s2 * low - low**3)
        a = 3 * s2 * b
        rounds.append((a, b))
        low = a * low - b * low**3
        high = 2 - low
    return rounds
