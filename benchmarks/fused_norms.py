"""ResNets whose batch norms are computed together with what follows them, the sum with the shortcut and the ReLU.

An experiment: torch's batch norm of bf16 images in channels-last order takes four kernels of its own and is half of a
step at 32 px. Here a norm, the sum and the ReLU read and write their tensors eight times instead of thirteen, in
kernels that triton compiles in seconds. `encoder = "benchmarks.fused_norms:resnet18"` uses them in a recipe; parameters
and their names are those of the package's networks. On a CPU and in evaluation mode the modules compute as torch does.

`TRITON_INTERPRET=1` runs the kernels on a CPU, to test them. benchmarks/bench_norms.py measures them.
"""

import os
from types import MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from stairwise.nets import resnet

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROWS, CHANNELS = 64, 64  # of a tile
CHUNKS = 512  # at most this many sums per channel are added up at the end
ADDED = {"P": CHUNKS, "BC": 16}


@triton.jit
def _statistics(x, partial, M, C, rows, BM: tl.constexpr, BC: tl.constexpr):
    """Sums of x and x² over `rows` of the M rows, for BC of the C channels."""
    chunk, channel = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    total, square = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in range(0, rows, BM):
        row = chunk * rows + start + tl.arange(0, BM)
        inside = (row < M)[:, None] & (channel < C)[None, :]
        value = tl.load(x + row[:, None] * C + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        total += value
        square += value * value
    tl.store(partial + 2 * chunk * C + channel, tl.sum(total, 0), mask=channel < C)
    tl.store(partial + (2 * chunk + 1) * C + channel, tl.sum(square, 0), mask=channel < C)


@triton.jit
def _added(partial, chunks, C, channel, which, P: tl.constexpr):
    """Sum over the chunks, of which there are at most P."""
    chunk = tl.arange(0, P)
    inside = (chunk < chunks)[:, None] & (channel < C)[None, :]
    return tl.sum(tl.load(partial + (2 * chunk[:, None] + which) * C + channel[None, :], mask=inside, other=0.0), 0)


@triton.jit(do_not_specialize=["chunks"])  # compiled once for all sizes
def _averages(partial, saved, mean_, var_, M, C, chunks, eps, momentum, P: tl.constexpr, BC: tl.constexpr):
    """Mean and 1 / standard deviation from the sums, and new running averages."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channel < C
    mean = _added(partial, chunks, C, channel, 0, P) / M
    var = tl.maximum(_added(partial, chunks, C, channel, 1, P) / M - mean * mean, 0.0)
    tl.store(saved + channel, mean, mask=known)
    tl.store(saved + C + channel, 1 / tl.sqrt(var + eps), mask=known)
    old_mean, old_var = tl.load(mean_ + channel, mask=known), tl.load(var_ + channel, mask=known)
    tl.store(mean_ + channel, old_mean + momentum * (mean - old_mean), mask=known)
    tl.store(var_ + channel, old_var + momentum * (var * (M / (M - 1)) - old_var), mask=known)


@triton.jit
def _normalize(x, more, y, saved, weight, bias, M, C, ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """y = weight (x − mean) / std + bias, plus `more`, and its positive part."""
    row, channel = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    inside, place = (row < M)[:, None] & known[None, :], row[:, None] * C + channel[None, :]
    scale = tl.load(weight + channel, mask=known) * tl.load(saved + C + channel, mask=known)
    shift = tl.load(bias + channel, mask=known) - scale * tl.load(saved + channel, mask=known)
    value = tl.load(x + place, mask=inside).to(tl.float32) * scale[None, :] + shift[None, :]
    if ADD:
        value += tl.load(more + place, mask=inside).to(tl.float32)
    tl.store(y + place, tl.maximum(value, 0.0).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _arrived(x, y, dy, place, inside, mean, rstd, w, b, ADD: tl.constexpr):
    """The standardized input, and the gradient behind the ReLU; without a sum, x tells where that was positive."""
    standard = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rstd[None, :]
    gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        positive = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) > 0
    else:
        positive = standard * w[None, :] + b[None, :] > 0
    return standard, tl.where(positive, gradient, 0.0)


@triton.jit
def _gradient_sums(
    x, y, dy, saved, weight, bias, partial, M, C, rows,
    ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient and of its product with the standardized input, as in `_statistics`."""
    chunk, channel = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    mean, rstd = tl.load(saved + channel, mask=known), tl.load(saved + C + channel, mask=known)
    w, b = tl.load(weight + channel, mask=known), tl.load(bias + channel, mask=known)
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for start in range(0, rows, BM):
        row = chunk * rows + start + tl.arange(0, BM)
        inside, place = (row < M)[:, None] & known[None, :], row[:, None] * C + channel[None, :]
        standard, gradient = _arrived(x, y, dy, place, inside, mean, rstd, w, b, ADD)
        total += gradient
        product += gradient * standard
    tl.store(partial + 2 * chunk * C + channel, tl.sum(total, 0), mask=known)
    tl.store(partial + (2 * chunk + 1) * C + channel, tl.sum(product, 0), mask=known)


@triton.jit(do_not_specialize=["chunks"])  # compiled once for all sizes
def _parameter_gradients(partial, sums, C, chunks, P: tl.constexpr, BC: tl.constexpr):
    """Gradients of bias and weight."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(sums + channel, _added(partial, chunks, C, channel, 0, P), mask=channel < C)
    tl.store(sums + C + channel, _added(partial, chunks, C, channel, 1, P), mask=channel < C)


@triton.jit
def _input_gradients(
    x, y, dy, saved, weight, bias, sums, dx, dmore, M, C,
    ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    known = channel < C
    mean, rstd = tl.load(saved + channel, mask=known), tl.load(saved + C + channel, mask=known)
    w, b = tl.load(weight + channel, mask=known), tl.load(bias + channel, mask=known)
    inside, place = (row < M)[:, None] & known[None, :], row[:, None] * C + channel[None, :]
    standard, gradient = _arrived(x, y, dy, place, inside, mean, rstd, w, b, ADD)
    if ADD:
        tl.store(dmore + place, gradient.to(dmore.dtype.element_ty), mask=inside)
    of_bias, of_weight = tl.load(sums + channel, mask=known), tl.load(sums + C + channel, mask=known)
    gradient -= of_bias[None, :] / M + standard * (of_weight[None, :] / M)
    tl.store(dx + place, (gradient * (w * rstd)[None, :]).to(dx.dtype.element_ty), mask=inside)


class _Grid:
    """How the rows (images and pixels) and channels of a tensor are divided among programs."""

    def __init__(self, x: Tensor) -> None:
        self.C = x.shape[1]
        self.M = x.numel() // self.C
        self.across, tiles = triton.cdiv(self.C, CHANNELS), triton.cdiv(self.M, ROWS)
        self.rows = triton.cdiv(tiles, min(tiles, max(1, CHUNKS // self.across))) * ROWS
        self.chunks = triton.cdiv(self.M, self.rows)
        self.tiles: dict[str, Any] = {"BM": ROWS, "BC": CHANNELS}
        self.adders = triton.cdiv(self.C, ADDED["BC"])
        self.partial = torch.empty(self.chunks, 2, self.C, device=x.device)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor, more: Tensor | None, norm: nn.BatchNorm2d
    ) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        added = x if more is None else more.contiguous(memory_format=torch.channels_last)
        grid, y, saved = _Grid(x), torch.empty_like(x), torch.empty(2, x.shape[1], device=x.device)
        C, M, how = grid.C, grid.M, {"ADD": more is not None}
        averages = norm.running_mean, norm.running_var
        _statistics[(grid.chunks, grid.across)](x, grid.partial, M, C, grid.rows, **grid.tiles)
        _averages[(grid.adders,)](grid.partial, saved, *averages, M, C, grid.chunks, norm.eps, norm.momentum, **ADDED)
        _normalize[(triton.cdiv(M, ROWS), grid.across)](x, added, y, saved, weight, bias, M, C, **how, **grid.tiles)
        context.save_for_backward(x, x if more is None else y, saved, weight, bias)
        context.how = how
        return y

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, saved, weight, bias = context.saved_tensors
        dy, how = gradients[0].contiguous(memory_format=torch.channels_last), context.how
        grid, dx, sums = _Grid(x), torch.empty_like(x), torch.empty(2, x.shape[1], device=x.device)
        dmore = torch.empty_like(x) if how["ADD"] else dx
        C, M, given = grid.C, grid.M, (x, y, dy, saved, weight, bias)
        _gradient_sums[(grid.chunks, grid.across)](*given, grid.partial, M, C, grid.rows, **how, **grid.tiles)
        _parameter_gradients[(grid.adders,)](grid.partial, sums, C, grid.chunks, **ADDED)
        _input_gradients[(triton.cdiv(M, ROWS), grid.across)](*given, sums, dx, dmore, M, C, **how, **grid.tiles)
        return dx, sums[1], sums[0], dmore if how["ADD"] else None, None


def fused(self: nn.BatchNorm2d, x: Tensor, more: Tensor | None = None, relu: bool = False) -> Tensor:
    """relu(norm(x) + more)."""
    # norms without a ReLU are few, and not worth compiling for
    if self.training and relu and (x.is_cuda or INTERPRETED):
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        out: Tensor = _Fused.apply(x, self.weight, self.bias, more, self)
        return out
    out = nn.BatchNorm2d.forward(self, x)
    out = out if more is None else out + more
    return torch.relu(out) if relu else out


def _block(self: resnet.BasicBlock, x: Tensor) -> Tensor:
    out = self.bn1(self.conv1(x), relu=True)
    out = self.bn2(self.conv2(out), x if self.downsample is None else self.downsample(x), relu=True)
    assert isinstance(out, Tensor)
    return out


def _bottleneck(self: resnet.Bottleneck, x: Tensor) -> Tensor:
    out = self.bn2(self.conv2(self.bn1(self.conv1(x), relu=True)), relu=True)
    out = self.bn3(self.conv3(out), x if self.downsample is None else self.downsample(x), relu=True)
    assert isinstance(out, Tensor)
    return out


def _network(self: resnet.ResNet, x: Tensor) -> Tensor:
    x = self.maxpool(self.bn1(self.conv1(x), relu=True))
    return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean(dim=(2, 3))


FORWARD: dict[type[nn.Module], Any] = {
    **{nn.BatchNorm2d: fused, resnet.BasicBlock: _block},
    **{resnet.Bottleneck: _bottleneck, resnet.ResNet: _network},
}


def resnet18(stem: str = "large", width: int = 64, channels: int = 3) -> resnet.ResNet:
    """The package's ResNet-18 with fused norms."""
    return _with_fused_norms(resnet.resnet18(stem, width, channels))


def resnet50(stem: str = "large", width: int = 64, channels: int = 3) -> resnet.ResNet:
    """The package's ResNet-50 with fused norms."""
    return _with_fused_norms(resnet.resnet50(stem, width, channels))


def _with_fused_norms(net: resnet.ResNet) -> resnet.ResNet:
    """The same network with other ways to compute; modules stay of their types, which training looks at."""
    for module in net.modules():
        if type(module) in FORWARD:
            module.forward = MethodType(FORWARD[type(module)], module)  # type: ignore[method-assign]
    return net
