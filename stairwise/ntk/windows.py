"""What a convolution sees, position by position, of images in either layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["channels_last", "laid_in_rows", "windows"]

WORD = 16  # bytes, the most that a GPU copies at a time


def channels_last(x: Tensor) -> bool:
    """Whether these are images whose channels lie next to each other, and could not be said to lie otherwise."""
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def windows(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (1, 1),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """A view (N, groups, channels, kernel height, kernel width, height, width) of images (N, groups · channels, …).

    Example:
        >>> x = torch.arange(9.0).view(1, 1, 3, 3)
        >>> windows(x, (2, 2))[0, 0, 0, :, :, 1, 1]
        tensor([[4., 5.],
                [7., 8.]])
    """
    sides = zip(x.shape[2:], kernel, stride, dilation, strict=True)
    outs = [(side - d * (k - 1) - 1) // step + 1 for side, k, step, d in sides]
    sample, channel, high, wide = x.stride()
    channels = x.shape[1] // groups
    steps = (channels * channel, channel, high * dilation[0], wide * dilation[1], high * stride[0], wide * stride[1])
    # F.unfold would launch a kernel for every image
    return x.as_strided((len(x), groups, channels, *kernel, *outs), (sample, *steps))


def laid_in_rows(seen: Tensor, out: Tensor | None = None) -> Tensor:
    """A copy of windows of channels-last images, (N, height, width, groups, kernel height, kernel width, channels);
    into the memory `out`, if it is given."""
    rows = seen.permute(0, 5, 6, 1, 3, 4, 2)
    copy = rows.new_empty(rows.shape) if out is None else out.view(rows.shape)
    words = WORD // rows.element_size()
    apart = [*rows.stride()[:-1], rows.storage_offset(), copy.storage_offset(), rows.shape[-1]]
    aligned = rows.data_ptr() % WORD == copy.data_ptr() % WORD == 0
    if aligned and rows.stride(-1) == 1 and all(v % words == 0 for v in apart):  # many at a time
        copy.view(torch.complex128).copy_(rows.view(torch.complex128))
        return copy
    return copy.copy_(rows)
