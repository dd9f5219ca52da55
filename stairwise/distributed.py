"""Devices and processes: choose a device, count processes, and compute sums over them.

Every process computes the loss of the joint batch from the gathered rows. The gradient with respect to its own rows is
its slice of the joint gradient. Parameter gradients are later averaged over the W processes, so this slice is
multiplied by W. (With a plain all-reduce in the loss, gradients would be W times too small.)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stairwise.checks import InputError


class LostProcess(RuntimeError):
    """Another process of the group has ended or does not answer."""


@contextmanager
def peers() -> Iterator[None]:
    """Turn an error of a collective into one that says what has happened and what to do."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise LostProcess(
            f"process {rank()} of {world()} has lost another one, which has ended or does not answer: "
            f"look at the output of that process, then start all of them again ({why})"
        ) from error


def world() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def gather(z: Tensor) -> Tensor:
    """Rows of all processes in order of rank; differentiable.

    All processes must have equally many rows, so drop a smaller last batch; a check would cost one synchronization per
    step."""
    if world() == 1:
        return z
    joint: Tensor = _Gather.apply(z)
    return joint


def total(x: Tensor) -> Tensor:
    """Sum over all processes; not differentiable."""
    x = x.detach()
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def reduced(x: Tensor) -> Tensor:
    """Sum over all processes, for the first one only; the others get numbers without meaning."""
    x = x.detach()
    if world() > 1:
        x = x.clone()
        dist.reduce(x, 0)
    return x


def agreed(flag: int, device: torch.device) -> int:
    """The largest flag of any process."""
    if world() == 1:
        return flag
    value = torch.tensor(flag, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def choose_device(name: str = "auto") -> torch.device:
    """Choose a device by name; "auto" takes a GPU if there is one, and each local process takes its own."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError("device", "must be cpu, cuda or cuda:N", repr(name)) from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", "must be cpu, cuda or cuda:N", repr(name))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError("device", "must be available", name, "use cpu, or install a CUDA build of torch")
        device = torch.device("cuda", local if device.index is None else device.index)
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise InputError("device", f"must be one of {torch.cuda.device_count()} GPUs", device)
        torch.cuda.set_device(device)
    return device


def launched_rank() -> int:
    """Number of this process among those started by torchrun; it needs no process group."""
    return int(os.environ.get("RANK", 0))


@contextmanager
def process_group(device: torch.device, timeout: float | None = None) -> Iterator[None]:
    """Join the processes started by torchrun, if any.

    `timeout`: seconds to wait for another process before an error; None: torch's own, 10 or 30 minutes.
    """
    mine = "RANK" in os.environ and dist.is_available() and not dist.is_initialized()
    if mine:
        limit = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    try:
        yield
    finally:
        if mine and dist.is_initialized():
            dist.destroy_process_group()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        parts = [torch.empty_like(z, memory_format=torch.contiguous_format) for _ in range(world())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].chunk(world())[rank()] * world()
