"""Checks and precision that all losses share."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from stairwise.checks import InputError, RunWarning, TheoryWarning, number
from stairwise.distributed import gather, world

P = ParamSpec("P")
Loss = Callable[Concatenate[Tensor, Tensor, P], Tensor]


def of_views(loss: Loss[P]) -> Loss[P]:
    """Wrap a loss of (z_a, z_b): check the views, gather all processes, use at least float32, disable autocast."""

    names = tuple(inspect.signature(loss).parameters)[:2]

    @wraps(loss)
    def checked(*args: Any, **kwargs: Any) -> Tensor:
        z_a, z_b = (args[i] if i < len(args) else kwargs.pop(name, None) for i, name in enumerate(names))
        check_views(z_a, z_b, names)
        z_a, z_b = _precise(z_a), _precise(z_b)
        with torch.autocast(z_a.device.type, enabled=False):
            value = loss(gather(z_a), gather(z_b), *args[2:], **kwargs)
        if z_a.device.type == "cpu" and not torch.compiler.is_compiling():
            with suppress(RuntimeError):  # values cannot be read inside torch.vmap and fake tensors
                _warn_if_too_large(loss.__name__, names, z_a.detach(), z_b.detach(), value.detach())
        return value

    return checked


def gathered_views(views: Sequence[Tensor]) -> Tensor:
    """Several views, (N, d) each, of all processes and in float32 at least, (views, rows, d)."""
    for i, other in enumerate(views[1:], 1):
        check_views(views[0], other, ("views[0]", f"views[{i}]"))
    return torch.stack([gather(_precise(view)) for view in views])


def _warn_if_too_large(loss: str, names: tuple[str, ...], z_a: Tensor, z_b: Tensor, value: Tensor) -> None:
    """Warn if finite views overflow. Only on a CPU, because a GPU would have to wait; NaN in the views is passed on."""
    norms = torch.stack([torch.linalg.vector_norm(z_a), torch.linalg.vector_norm(z_b), value.to(z_a.dtype)])
    if not norms.isfinite().all() and z_a.isfinite().all() and z_b.isfinite().all():
        kind = str(value.dtype).removeprefix("torch.")
        warnings.warn(
            f"{loss}: {' and '.join(names)} must be small enough for {kind}: their squares or the loss overflow, and "
            "its value is wrong; normalize the embeddings, lower the learning rate or use float64",
            RunWarning,
            stacklevel=3,
        )


def check_views(z_a: Tensor, z_b: Tensor, names: tuple[str, ...] = ("z_a", "z_b")) -> None:
    """Require two real matrices of equal shape, precision and device, with two rows or more over all processes."""
    for name, z in zip(names, (z_a, z_b), strict=True):
        if not isinstance(z, Tensor) or z.ndim != 2 or not z.is_floating_point() or z.layout != torch.strided:
            given = f"{z.dtype}, shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise InputError(name, "must be a 2-D tensor of floats", given, "rows are samples, columns are dimensions")
    both = " and ".join(names)
    if z_a.shape != z_b.shape:
        shapes = f"{tuple(z_a.shape)} and {tuple(z_b.shape)}"
        raise InputError(both, "must have the same shape", shapes, "row i of each is a view of sample i")
    if z_a.dtype != z_b.dtype and torch.float64 in (z_a.dtype, z_b.dtype):
        raise InputError(both, "must have the same precision", f"{z_a.dtype} and {z_b.dtype}", "convert one of them")
    if z_a.device != z_b.device:
        raise InputError(both, "must be on the same device", f"{z_a.device} and {z_b.device}", "move one with .to()")
    if len(z_a) * world() < 2 or z_a.shape[1] == 0:
        raise InputError(
            names[0], "must hold at least two samples of at least one dimension", tuple(z_a.shape), "enlarge the batch"
        )


def weight(x: float, name: str) -> float:
    """The weight of a term of a loss: 0 to 1e30, which float32 can multiply with."""
    return number(x, name, least=0, most=1e30)


def correlation(z_a: Tensor, z_b: Tensor) -> Tensor:
    """C = (Z_aᵀ Z_b + Z_bᵀ Z_a) / 2N, symmetric (Eq. 3)."""
    C = z_a.T @ z_b / len(z_a)
    return (C + C.T) / 2


def centred(z: Tensor) -> Tensor:
    return z - z.mean(dim=0)


def warn_if_undetermined(z: Tensor) -> None:
    """Warn if N < d: a batch of N rows gives C at most N nonzero eigenvalues."""
    if len(z) < z.shape[1]:
        warnings.warn(
            f"the batch ({len(z)}) is smaller than the embedding ({z.shape[1]}): "
            f"{z.shape[1] - len(z)} eigenvalues of C are always zero; enlarge the batch or lower d",
            TheoryWarning,
            stacklevel=4,
        )


def _precise(z: Tensor) -> Tensor:
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
