"""How far tensors of two passes are apart, many at a time, and numbers that a device is asked for once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SAME", "apart", "at_least_single", "differences", "errors", "numbers"]

SAME = 0.03  # of their size, by which tensors may differ through rounding
TINY = 1e-30
Tensors = Sequence[Tensor]


def errors(found: Tensors, wholes: Tensors, i: int) -> Tensor:
    """Largest error of gradients (n, size) by rules, where sample i has all of autograd's (size,) and the others have
    nothing; and the largest element: (tensors, 2).

    Example:
        >>> errors([torch.tensor([[1.0, 2.0], [0.5, 0.0]])], [torch.tensor([1.0, 2.0])], 0).tolist()
        [[0.5, 2.0]]
    """
    rows = [list(gradients.unbind()) for gradients in found]
    for own, off in zip(rows, _less([own[i] for own in rows], wholes), strict=True):
        own[i] = off
    most = _norms([row for own in rows for row in own], torch.inf).view(len(found), -1).amax(1)
    return torch.stack([most, _norms(wholes, torch.inf)], 1)


def differences(ones: Tensors, others: Tensors) -> Tensor:
    """Of the rows of some and of others, relative to these: the smallest and the largest, (tensors, 2)."""
    ones, others = _comparable(ones, others)
    share = _rows(_less(ones, others)) / _rows(others).clamp_min(TINY)
    return torch.stack([share.amin(1), share.amax(1)], 1)


def apart(ones: Tensors, others: Tensors, least: float | Tensor = 0.0) -> Tensor:
    """How far rows are from the same rows of another pass, in units of what may be rounding: a tenth of the distance
    of two such rows, a little of their size, or at least so much; (tensors,).

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> (apart([rows + 1e-3, rows.flip(0)], [rows, rows]) < 1).tolist()  # rounding; another order
        [True, False]
    """
    ones, others = _comparable(ones, others)
    between = _norms(_less([other[0] for other in others], [other[-1] for other in others]))
    allowed = torch.maximum(0.1 * between[:, None], SAME * _rows(others)).clamp_min(TINY)
    return (_rows(_less(ones, others)) / allowed.clamp_min(least)).amax(1)


def numbers(*tables: Tensor) -> list[Any]:
    """Tables of numbers, as lists; the device is asked once."""
    flat = torch.cat([table.double().flatten() for table in tables])
    parts = flat.cpu().split([table.numel() for table in tables])
    return [part.view(table.shape).tolist() for part, table in zip(parts, tables, strict=True)]


def at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _comparable(ones: Tensors, others: Tensors) -> tuple[Tensors, Tensors]:
    """Of integers it matters whether they are the same."""
    pairs = [
        (at_least_single(one), at_least_single(other))
        if one.is_floating_point()
        else ((one != other).float(), torch.zeros(other.shape, device=other.device))
        for one, other in zip(ones, others, strict=True)
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _rows(tensors: Tensors) -> Tensor:
    """Norms of the rows of tensors that have equally many, (tensors, rows)."""
    return _norms([row for tensor in tensors for row in tensor.unbind()]).view(len(tensors), -1)


# one call for a list: of small tensors most of the time would be Python's


def _less(ones: Tensors, others: Tensors) -> Tensors:
    return torch._foreach_sub(list(ones), list(others))


def _norms(tensors: Tensors, order: float = 2.0) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors), order))
