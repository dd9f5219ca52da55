"""Tensors as parts of one vector, so that all of them move in a few operations."""

from collections.abc import Sequence

from torch import Tensor


def in_order(x: Tensor, like: Tensor) -> Tensor:
    """x with its axes in the memory order of the parameter `like`: channels come last if they do there."""
    return x if like.ndim < 3 or like.is_contiguous() else x.movedim(1, -1)


def as_matrix(p: Tensor) -> Tensor:
    """View a parameter as (out, rest). Columns are in the order of its memory, which does not matter, because polar
    factors permute with them."""
    return p if p.ndim == 2 else in_order(p, p).view(len(p), -1)


def shaped(part: Tensor, like: Tensor) -> Tensor:
    """View a part of a vector in the shape of a parameter, and in its memory order: the inverse of `in_order`."""
    if like.ndim < 3 or like.is_contiguous():
        return part.view(like.shape)
    return part.view(len(like), *like.shape[2:], like.shape[1]).movedim(-1, 1)


def parts_of(vector: Tensor, params: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts of a vector that belong to each parameter."""
    return vector.split([p.numel() for p in params])


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are parts of one and the same memory."""
    a, b = x.untyped_storage(), y.untyped_storage()
    return (a.data_ptr(), a.nbytes()) == (b.data_ptr(), b.nbytes())


def joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As few vectors as possible over contiguous tensors: those that lie one after the other in memory are one.

    >>> import torch
    >>> a, b = torch.arange(5.0).split([2, 3])
    >>> joined([a, b, torch.ones(1)])
    [tensor([0., 1., 2., 3., 4.]), tensor([1.])]
    """
    runs: list[tuple[Tensor, int]] = []  # the first tensor of each, and the number of entries
    for x in tensors:
        if runs:
            first, count = runs[-1]
            alike = x.dtype == first.dtype and same_memory(x, first)
            if alike and x.storage_offset() == first.storage_offset() + count:
                runs[-1] = first, count + x.numel()
                continue
        runs.append((x, x.numel()))
    return [first.as_strided((count,), (1,)) for first, count in runs]
