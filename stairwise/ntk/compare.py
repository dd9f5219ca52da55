"""How far tensors of two passes are apart, and numbers that a device is asked for once."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

__all__ = ["SAME", "apart", "at_least_single", "differences", "errors", "floats", "largest", "numbers"]

SAME = 0.03  # of their size, by which tensors may differ through rounding


def errors(found: Tensor, whole: Tensor, i: int) -> list[Tensor]:
    """Largest error of gradients (n, size) by rules, where sample i has all of autograd's (size,) and the others have
    nothing; and the largest element.

    Example:
        >>> [float(v) for v in errors(torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([1.0, 2.0]), 0)]
        [0.5, 2.0]
    """
    off = found.clone()
    off[i] -= whole
    return [largest(off), largest(whole)]


def differences(one: Tensor, other: Tensor) -> list[Tensor]:
    """Of the rows of one and of the other, relative to these: the smallest and the largest."""
    if not floats(one):
        return [(one != other).any().float()] * 2
    one, other = at_least_single(one), at_least_single(other)
    off, size = ((v.reshape(len(v), -1)).norm(dim=1) for v in (one - other, other))
    share = off / size.clamp_min(1e-30)
    return [share.amin(), share.amax()]


def floats(x: Tensor) -> bool:
    return x.is_floating_point() and x.numel() > 0


def apart(one: Tensor, other: Tensor, *least: Tensor) -> Tensor:
    """How far rows are from the same rows of another pass, in units of what may be rounding: a tenth of the distance
    of two such rows, a little of their size, or at least so much.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> bool(apart(rows + 1e-3, rows) < 1), bool(apart(rows.flip(0), rows) < 1)  # rounding; another order
        (True, False)
    """
    if not floats(one):
        return (one != other).any() * 2.0
    one, other = (at_least_single(v).reshape(len(v), -1) for v in (one, other))
    allowed = torch.maximum(0.1 * (other[0] - other[-1]).norm(), SAME * other.norm(dim=1))
    for other_size in least:
        allowed = torch.maximum(allowed, other_size.to(allowed))
    return ((one - other).norm(dim=1) / allowed.clamp_min(1e-30)).amax()


def numbers(rows: Collection[Sequence[Tensor]]) -> list[list[float]]:
    """Rows of scalars; the device is asked once."""
    flat = [x for row in rows for x in row]
    return torch.stack(flat).double().view(len(rows), -1).tolist() if flat else []


def largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, ord=torch.inf) if x.numel() else x.new_zeros(())


def at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
