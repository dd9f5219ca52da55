"""1.3 × for float32 passes on an H200 (ResNet-50, N = 2000: 0.33 s → 0.25 s): convolutions as matrix products.

Without TF32, cuDNN's gradients with respect to images mostly reach 10 to 25 TFLOP/s there, cuBLAS's products 30 to 45.
Images are kept in channels-last layout, whose rows are multiplied. cuDNN keeps what it is good at: kernels of stride 1
on large images.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stairwise.ntk.patches import windows

WINOGRAD = 64  # positions above which cuDNN is better at kernels of stride 1
Pair = tuple[int, int]


class ConvolutionsByProducts(TorchFunctionMode):
    """A context in which plain 2-D float32 convolutions are matrix products, and batch norm in evaluation mode keeps
    the layout of gradients, which torch's does not. Images get gradients; parameters do not.

    Example:
        >>> x, w = torch.randn(5, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
        >>> with ConvolutionsByProducts():
        ...     by_products = F.conv2d(x, w, None, (2, 2), (1, 1), (1, 1), 1)
        >>> torch.allclose(by_products, F.conv2d(x, w, None, 2, 1), atol=1e-5)
        True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or torch.is_autocast_enabled(args[0].device.type):
            return func(*args, **kwargs)
        if func is torch.conv2d and len(args) == 7 and not kwargs:  # the call of nn.Conv2d
            x, weight, bias, stride, padding, dilation, groups = args
            pairs = all(isinstance(v, tuple) and len(v) == 2 for v in (stride, padding)) and dilation == (1, 1)
            # the memory estimate only covers layers that are trained
            known = weight.requires_grad and _is_given(weight, x)
            if pairs and groups == 1 and x.ndim == 4 and x.dtype == torch.float32 and known:
                return _convolution(x, weight, bias, stride, padding)
        if func is F.batch_norm and len(args) == 3 and not kwargs.get("training", False):
            x, mean, var = args
            weight, bias = kwargs["weight"], kwargs["bias"]
            if x.ndim == 4 and x.dtype == torch.float32 and all(_is_given(v, x) for v in (mean, var, weight, bias)):
                return _BatchNorm.apply(x, mean, var, weight, bias, kwargs["eps"])
        return func(*args, **kwargs)


def _is_given(v: Tensor | None, x: Tensor) -> bool:
    """True if v is not computed from something that needs a gradient."""
    return v is None or (v.is_leaf and v.dtype == x.dtype)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    if stride == (1, 1) and weight[0, 0].numel() > 1 and x[0, 0].numel() > WINOGRAD:
        planes, rows = torch.contiguous_format, torch.channels_last
        return _in_layout(torch.conv2d(_in_layout(x, planes, rows), weight, bias, stride, padding), rows, planes)
    out = _Convolution.apply(x, weight, stride, padding)
    return out if bias is None else out + bias.view(-1, 1, 1)


def _in_layout(x: Tensor, there: torch.memory_format, back: torch.memory_format) -> Tensor:
    return x if x.is_contiguous(memory_format=there) else _InLayout.apply(x, there, back)


class _InLayout(torch.autograd.Function):
    """The same numbers in one layout, and their gradients in another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: torch.memory_format, back: torch.memory_format) -> Tensor:
        ctx.back = back
        return x.contiguous(memory_format=there)

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor, None, None]:
        return b.contiguous(memory_format=ctx.back), None, None


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(scale if weight is None else scale * weight)
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        return b.contiguous(memory_format=torch.channels_last) * scale[:, None, None], None, None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.stride, ctx.padding, ctx.size = stride, padding, x.shape
        matrix = weight.permute(2, 3, 1, 0).reshape(-1, len(weight))
        return _products(x, matrix, (weight.shape[2], weight.shape[3]), stride, padding)

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        (n, channels, high, wide), kernel = ctx.size, tuple(weight.shape[2:])
        rest = (kernel[0] - 1 - ctx.padding[0], kernel[1] - 1 - ctx.padding[1])
        # a convolution with the flipped kernel, unless it would see more channels than the forward pass did
        if ctx.stride == (1, 1) and min(rest) >= 0 and len(weight) <= channels:
            flipped = weight.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, channels)
            return _products(b, flipped, kernel, (1, 1), rest), None, None, None
        rows = b.permute(0, 2, 3, 1)
        parts = rows.reshape(-1, len(weight)) @ weight.permute(0, 2, 3, 1).flatten(1)
        parts = parts.view(*rows.shape[:3], *kernel, channels)
        padded = b.new_zeros(n, high + 2 * ctx.padding[0], wide + 2 * ctx.padding[1], channels)
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                seen = padded[:, i :: ctx.stride[0], j :: ctx.stride[1]]
                seen[:, : rows.shape[1], : rows.shape[2]] += parts[:, :, :, i, j]
        inner = padded[:, ctx.padding[0] :, ctx.padding[1] :][:, :high, :wide]
        return inner.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last), None, None, None


def _products(x: Tensor, matrix: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Rows that the kernel sees, (N · positions, kernel · channels), times a matrix: (N, out, height, width)."""
    x = x.contiguous(memory_format=torch.channels_last)
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = windows(x, kernel, stride)
    size = (len(x), matrix.shape[1], *seen.shape[5:])
    rows = x.permute(0, 2, 3, 1)  # these are the rows of kernels of one pixel
    if not kernel == stride == (1, 1):
        view = seen.permute(0, 5, 6, 1, 3, 4, 2)
        rows = view.contiguous()
    out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    torch.mm(rows.reshape(-1, len(matrix)), matrix, out=out.permute(0, 2, 3, 1).view(-1, matrix.shape[1]))
    return out
