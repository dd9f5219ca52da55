"""How far tensors of two passes are apart, many at a time: of small ones most of the time would be Python's."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

__all__ = ["SAME", "apart", "at_least_single", "differences", "errors"]

SAME = 0.03  # of their size, by which tensors may differ through rounding
TINY = 1e-30
Tensors = Sequence[Tensor]


def errors(found: Tensors, wholes: Tensors, i: int) -> Tensor:
    """Largest error of gradients (n, size) by rules, where sample i has all of autograd's (size,) and the others have
    nothing; and the largest element: (tensors, 2). None may be empty.

    Example:
        >>> errors([torch.tensor([[1.0, 2.0], [0.5, 0.0]])], [torch.tensor([1.0, 2.0])], 0).tolist()
        [[0.5, 2.0]]
    """
    rows = [list(gradients.unbind()) for gradients in found]
    for own, off in zip(rows, torch._foreach_sub([own[i] for own in rows], list(wholes)), strict=True):
        own[i] = off
    most = torch.stack(torch._foreach_norm([row for own in rows for row in own], torch.inf))
    largest = torch.stack(torch._foreach_norm(list(wholes), torch.inf))
    return torch.stack([most.view(len(found), -1).amax(1), largest], 1)


def differences(ones: Tensors, others: Tensors) -> Tensor:
    """Of the rows of some and of others, relative to these: the smallest and the largest, (tensors, 2).

    Example:
        >>> one, more = torch.ones(2, 3), torch.ones(5, 3)
        >>> differences([one, more], [torch.stack([one[0], 2 * one[0]]), more]).tolist()
        [[0.0, 0.5], [0.0, 0.0]]
    """
    ones, others = _comparable(ones, others)
    share = _norms(ones, others) / _norms(others).clamp_min(TINY)
    return torch.stack([share.amin(1), share.amax(1)], 1)


def apart(ones: Tensors, others: Tensors, least: float | Tensor = 0.0) -> Tensor:
    """How far rows are from the same rows of another pass, in units of what may be rounding: a tenth of the distance
    of two such rows, a little of their size, or at least so much, a number or (tensors, 1); (tensors,).

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> (apart([rows + 1e-3, rows.flip(0)], [rows, rows]) < 1).tolist()  # rounding; another order
        [True, False]
    """
    ones, others = _comparable(ones, others)
    between = _norms([other[:1] for other in others], [other[-1:] for other in others])
    allowed = torch.maximum(0.1 * between, SAME * _norms(others)).clamp_min(TINY)
    return (_norms(ones, others) / allowed.clamp_min(least)).amax(1)


def at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _comparable(ones: Tensors, others: Tensors) -> tuple[Tensors, Tensors]:
    pairs = [_pair(one, other) for one, other in zip(ones, others, strict=True)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _pair(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Of integers it matters whether they are the same; nothing is the same as nothing."""
    if not one.numel():
        return torch.zeros(1, 1, device=one.device), torch.zeros(1, 1, device=one.device)
    if not one.is_floating_point():
        return (one != other).float(), torch.zeros(other.shape, device=other.device)
    return at_least_single(one), at_least_single(other)


def _norms(tensors: Tensors, less: Tensors | None = None) -> Tensor:
    """Norms of the rows of tensors, or of what they are more than others, (tensors, rows); where rows are fewer than
    elsewhere, the last again and again."""
    lengths = [len(tensor) for tensor in tensors]
    rows = [row for tensor in tensors for row in tensor.unbind()]
    if less is not None:
        rows = list(torch._foreach_sub(rows, [row for tensor in less for row in tensor.unbind()]))
    norms, table = iter(torch._foreach_norm(rows)), list[Tensor]()
    for length in lengths:
        own = list(islice(norms, length))
        table += own + own[-1:] * (max(lengths) - length)
    return torch.stack(table).view(len(tensors), -1)
