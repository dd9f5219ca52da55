r"""Faster steps for any joint-embedding loss: stretch its gradient along the directions not yet learned (App. G).

The paper proposes ∇_F (FᵀF + damping·I)⁻¹. Here the damping is relative to the mean eigenvalue, the power may be ½,
and the length of the gradient is kept, which is what makes it stable from standard initialization too.
"""

import math
from typing import Any

import torch
from torch import Tensor

from stairwise.checks import InputError, number
from stairwise.losses.ranks import total, world
from stairwise.losses.views import check_views

__all__ = ["inverse_root", "precondition"]

POWERS = (0.5, 1.0)


def precondition(
    z_a: Tensor, z_b: Tensor, damping: float = 0.1, power: float = 0.5, keep_norm: bool = True
) -> tuple[Tensor, Tensor]:
    r"""Return z_a, z_b unchanged; their gradients are multiplied by (C + damping·c̄·I)^(−power).

    C is the second moment of both views together, over all processes, and c̄ its mean eigenvalue. Put it between the
    network and any loss:

        loss = sw.losses.simclr(*sw.precondition(z_a, z_b))

    Arguments:
        z_a, z_b: (N, d).
        damping: relative to c̄; the largest stretch is about (d / damping)^power.
        power: ½ or 1.
        keep_norm: scale the gradient of the joint batch back to the length it had.

    Example:
        >>> z_a = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> a, b = precondition(z_a, z_a.detach(), damping=1e-6, power=1.0)
        >>> a.sum().backward()
        >>> (z_a.grad[0, 1] / z_a.grad[0, 0]).round(decimals=3)  # variances 2 and ½: four times
        tensor(4.)
    """
    check_views(z_a, z_b)
    number(damping, "damping", above=0)
    if power not in POWERS:
        raise InputError("power", "must be 0.5 or 1", power)
    a, b = _Precondition.apply(z_a, z_b, float(damping), float(power), bool(keep_norm))
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
            stretched = _apply_inverse(C, g, damping, power)
            if keep_norm:
                before, after = total(torch.stack([g.square().sum(), stretched.square().sum()]))
                stretched = stretched * torch.where(after > 0, before / after, 1.0).sqrt()
        a, b = stretched.to(grads[0].dtype).chunk(2)
        return a, b, None, None, None


def _apply_inverse(C: Tensor, g: Tensor, damping: float, power: float) -> Tensor:
    """g (C + damping·c̄·I)^(−power); C scaled to mean eigenvalue 1 first, which only matters without keep_norm."""
    mean = C.diagonal().mean()
    safe = torch.where(mean > 0, mean, 1.0)  # all-zero embeddings have nothing to say
    eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
    A = C / safe + damping * eye
    if power == 1:
        factor, _ = torch.linalg.cholesky_ex(A)  # positive definite by the damping; no check, so no synchronization
        return torch.cholesky_solve(g.T, factor).T / safe
    return g @ inverse_root(A, damping) / safe.sqrt()


def inverse_root(A: Tensor, least: float) -> Tensor:
    r"""A^{-1/2} for symmetric A with eigenvalues ≥ `least`, by matrix products alone (coupled Newton–Schulz).

    With Y → (A/c)^{1/2} and Z → (A/c)^{-1/2}, c an upper bound of the spectrum, every round multiplies small
    eigenvalues of ZY by about 9/4 until they near 1, so that the condition number bounds the rounds. A's mean
    eigenvalue should be near 1 + `least`, as it is here.

    Example:
        >>> inverse_root(torch.diag(torch.tensor([4.0, 0.25])), least=0.25).round(decimals=4)
        tensor([[0.5000, 0.0000],
                [0.0000, 2.0000]])
    """
    bound = torch.minimum(A.diagonal().sum(), A.abs().sum(dim=1).max())
    eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
    # the trace of A is at most d (1 + least) where its mean eigenvalue without damping is 1
    rounds = math.ceil(math.log(len(A) * (1 + least) / least) / math.log(2.25)) + 5
    Y, Z = A / bound, eye
    for _ in range(rounds):
        T = (3 * eye - Z @ Y) / 2
        Y, Z = Y @ T, T @ Z
    return Z / bound.sqrt()
