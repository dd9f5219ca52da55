"""The patches of its input that the weights of a linear map multiply, one per position."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LinearMap: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d


def patches(module: LinearMap, x: Tensor, copy: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """Patches (N, groups, p, positions) of inputs x, where p counts kernel elements, then channels.

    Arguments:
        copy: returns a contiguous copy of a view, perhaps in memory that it keeps.
    """
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2).unsqueeze(1)
    if {*module.kernel_size, *module.stride} == {1} and not isinstance(module.padding, str) and not any(module.padding):
        return x.reshape(len(x), module.groups, x.shape[1] // module.groups, -1)
    seen = _windows_of(module, x)
    if channels_last(x):  # copy in the order of the memory
        return copy(seen.permute(0, 5, 6, 1, 3, 4, 2)).flatten(4, 6).permute(0, 3, 4, 1, 2).flatten(3, 4)
    return copy(seen.permute(0, 1, 3, 4, 2, 5, 6)).flatten(5, 6).flatten(2, 4)


def patches_bytes(module: nn.Module, x: Tensor) -> float:
    """Memory of a convolution's patches."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or x.ndim != len(module.kernel_size) + 2:
        return 0.0
    return float(_windows_of(module, x).numel() * x.element_size())


def channels_last(x: Tensor) -> bool:
    """True if channels-last and not also contiguous."""
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
    # F.unfold would launch one GPU kernel per image
    return x.as_strided((len(x), groups, channels, *kernel, *outs), (sample, *steps))


def _windows_of(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        padding = list(module._reversed_padding_repeated_twice)
    else:  # read `padding` itself, because users may change it after the module was made
        padding = [side for one in reversed(module.padding) for side in (one, one)]
    if any(padding):
        x = F.pad(x, padding, "constant" if module.padding_mode == "zeros" else module.padding_mode)
    one: tuple[int, ...] = ()
    if isinstance(module, nn.Conv1d):  # treat a series as an image with one row
        x, one = x.unsqueeze(2), (1,)
    kernel, stride, dilation = ((*one, *v) for v in (module.kernel_size, module.stride, module.dilation))
    return windows(x, kernel, stride, dilation, module.groups)
