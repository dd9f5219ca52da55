"""What a loss needs of data parallelism: everybody's rows, with the gradient that averaging makes right.

Every process computes the loss of the joint batch from the gathered rows. The gradient with respect to its own rows is
its slice of the joint gradient; since parameter gradients are then averaged over the W processes, that slice is
multiplied by W. (A plain all-reduce in a loss leaves gradients W times too small.)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather", "rank", "total", "world"]


def world() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if world() > 1 else 0


def gather(z: Tensor) -> Tensor:
    """Rows of all processes, in order of rank; differentiable. Every process must bring equally many (drop a last,
    smaller batch): checking would cost a synchronization a step."""
    if world() == 1:
        return z
    joint: Tensor = _Gather.apply(z)
    return joint


def total(x: Tensor) -> Tensor:
    """Sum over processes, not differentiable."""
    x = x.detach()
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        parts = [torch.empty_like(z, memory_format=torch.contiguous_format) for _ in range(world())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].chunk(world())[rank()] * world()
