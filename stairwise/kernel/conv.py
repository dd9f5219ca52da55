"""Covariance Σ (NNGP) and tangent kernel Θ (NTK) of convolutional networks of infinite width.

For two images x, y and each pair of pixels (p, q), with the variances Σ_xx[p, p] and Σ_yy[q, q] of each image alone:

    input         Σ = x_p · y_q / channels,  Θ = 0
    convolution   Σ ← σ_w² mean_δ Σ[p + δ, q + δ] + σ_b²,  Θ ← Σ_new + σ_w² mean_δ Θ[p + δ, q + δ]
    activation    Σ ← E[φφ],  Θ ← Θ E[φ′φ′]
    shortcut      Σ ← Σ_branch + Σ,  Θ ← Θ_branch + Θ
    readout       as a convolution, the mean over p = q (flatten) or over all p and q (global average pooling)

Pairs of images are computed in tiles, so that memory is bounded, and only those pairs of pixels on which the output
depends (`convnet.py`). A convolution and the activation after it can be fused into one GPU kernel.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from math import isqrt, pi
from typing import NamedTuple

import torch
from torch import Tensor

from stairwise.checks import InputError
from stairwise.kernel.convnet import ConvNet, Taps, build_axis

MEMORY = 1 << 29  # bytes for the tensors of a tile on a CPU; on a GPU: a quarter of its free memory
LIVE = 10  # number of tensors of the size of the covariance that exist at the same time
WORTH_COMPILING = 10_000  # entries with global average pooling; compiling takes longer than it saves for fewer


class Pair(NamedTuple):
    """Σ and Θ. Θ is None if it is not wanted or zero."""

    sigma: Tensor
    theta: Tensor | None


class Window(NamedTuple):
    """`Taps` on the device; `weight` is 1 / kernel_size, and 0 outside the image."""

    source: Tensor  # index of the inputs, (kernel_size, outputs)
    weight: Tensor
    shifts: tuple[int, ...] | None


Indices = tuple[Tensor, Tensor]  # of rows, of columns


class Step(NamedTuple):
    """A convolution and its surroundings.

    Attributes:
        windows: the convolution along rows and along columns.
        x_at, y_at: the pixels p and q of its output, counted as in `_variances`.
        enter_at: the pairs of its output, counted as in the input of the shortcut that is added; None: no shortcut.
        project: whether that shortcut is a convolution.
        enters: whether its output is the input of a shortcut.
    """

    windows: tuple[Window, Window]
    x_at: Indices
    y_at: Indices
    enter_at: Indices | None
    project: bool
    enters: bool


def conv_covariances(
    net: ConvNet,
    X: Tensor,
    Y: Tensor,
    *,
    tangent: bool = True,
    memory: int | None = None,
    compiled: bool | None = None,
) -> Pair:
    """Σ and Θ of the output, (n, k), for images X (n, height, width, channels) and Y (k, height, width, channels).

    Arguments:
        tangent: whether to compute Θ.
        memory: bytes for the tensors of a tile; None: 512 MiB on a CPU, a quarter of the free memory on a GPU.
        compiled: whether `torch.compile` fuses each layer; None: for many entries on a GPU with triton.
    """
    net.check()
    if X.ndim != 4 or X.shape[1:] != Y.shape[1:]:
        rule = "must be images of the same shape, (number, height, width, channels)"
        raise InputError("X and Y", rule, f"{tuple(X.shape)} and {tuple(Y.shape)}")
    same = X is Y
    x = X.movedim(-1, 1).contiguous()
    y = x if same else Y.movedim(-1, 1).contiguous()
    first, steps, largest = _plan(net, x, diagonal=net.head == "flatten")
    x_scales = _variances(net, x)
    y_scales = x_scales if same else _variances(net, y)
    if compiled is None:
        many = net.head == "gap" and len(x) * len(y) >= WORTH_COMPILING
        compiled = x.is_cuda and many and find_spec("triton") is not None
    out = Pair(x.new_empty(len(x), len(y)), x.new_empty(len(x), len(y)) if tangent else None)
    pairs = max(1, _budget(x, memory) // (LIVE * x.element_size() * largest))
    for rows, columns in _tiles(len(x), len(y), pairs, same):
        scales = [(a[rows], b[columns]) for a, b in zip(x_scales, y_scales, strict=True)]
        tile = _propagate(net, steps, _products(x[rows], y[columns], first), scales, tangent, compiled)
        for whole, part in zip(out, tile, strict=True):
            if whole is not None and part is not None:
                whole[rows, columns] = part
                if same:
                    whole[columns, rows] = part.T
    return out


def _budget(x: Tensor, memory: int | None) -> int:
    if memory is not None:
        return memory
    return torch.cuda.mem_get_info(x.device)[0] // 4 if x.is_cuda else MEMORY


def _tiles(n: int, k: int, pairs: int, same: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most `pairs` entries; only the upper triangle if both sets of images are the same."""
    tall = min(n, isqrt(pairs))
    wide = tall if same else min(k, pairs // tall)
    for i in range(0, n, tall):
        for j in range(i if same else 0, k, wide):
            yield slice(i, min(i + tall, n)), slice(j, min(j + wide, k))


# --- the plan: index tensors


def _plan(net: ConvNet, x: Tensor, diagonal: bool) -> tuple[tuple[Indices, Indices], list[Step], int]:
    """Pixels p and q of the input, all steps, and the largest number of pairs of pixels in a layer."""
    sides = x.shape[-2:]
    alone = [build_axis(net, side, diagonal=True) for side in sides]
    axes = alone if diagonal else [build_axis(net, side, diagonal=False) for side in sides]

    def both(arrays: list) -> Indices:
        rows, columns = (torch.as_tensor(array, device=x.device) for array in arrays)
        return rows, columns

    def at(layer: int, which: int) -> Indices:
        lists = zip(alone, axes, strict=True)
        return both([one.pairs[layer][0].searchsorted(axis.pairs[layer][which]) for one, axis in lists])

    steps = []
    for layer in range(net.depth):
        rows, columns = (_window(axis.taps[layer], x) for axis in axes)
        joins = net.leaves_block(layer)
        enter_at = both([axis.shortcuts[layer] for axis in axes]) if joins else None
        project = joins and net.block_stride(layer) > 1
        places = at(layer + 1, 0), at(layer + 1, 1)
        steps.append(Step((rows, columns), *places, enter_at, project, net.enters_block(layer + 1)))
    first = both([axis.pairs[0][0] for axis in axes]), both([axis.pairs[0][1] for axis in axes])
    largest = max(a.shape[1] * b.shape[1] for a, b in zip(axes[0].pairs, axes[1].pairs, strict=True))
    return first, steps, largest


def _window(taps: Taps, like: Tensor) -> Window:
    weight = torch.as_tensor(taps.valid / len(taps.valid), dtype=like.dtype, device=like.device)
    return Window(torch.as_tensor(taps.index, device=like.device), weight, taps.shifts)


# --- the recursion


def _products(x: Tensor, y: Tensor, first: tuple[Indices, Indices]) -> Tensor:
    """x_p · y_q / channels, (n, k, pairs of rows, pairs of columns), for x (n, channels, height, width)."""
    x, y = (_select(z, at) for z, at in zip((x, y), first, strict=True))
    out = x[:, None, 0] * y[None, :, 0]
    for channel in range(1, x.shape[1]):
        out.addcmul_(x[:, None, channel], y[None, :, channel])
    return out.div_(x.shape[1])


def _variances(net: ConvNet, x: Tensor) -> list[Tensor]:
    """Σ_xx[p, p] before each activation, (n, rows, columns), as far as the output depends on it."""
    first, steps, _ = _plan(net, x, diagonal=True)
    state, entry, out = Pair(_select((x * x).mean(1), first[0]), None), None, []
    for step in steps:
        before = _convolve(net, step, state, entry, first=False, fused=False)
        entry = before if step.enters else entry
        out.append(before.sigma)
        scale = _scale(net, before.sigma)
        state = Pair(_expectations(net, before.sigma, scale, scale)[0], None)
    return [_scale(net, variance) for variance in out]


def _propagate(
    net: ConvNet, steps: list[Step], products: Tensor, scales: list[tuple[Tensor, Tensor]], tangent: bool, fused: bool
) -> Pair:
    """Σ and Θ of the output, (n, k), from the products of pixels."""
    layer = _compiled_layer() if fused else _layer
    state, entry = Pair(products, None), None
    for number, (step, scale) in enumerate(zip(steps, scales, strict=True)):
        before, state = layer(net, step, state, entry, scale, first=tangent and number == 0, fused=fused)
        entry = before or entry
    sigma = net.weight_variance * state.sigma.mean((-2, -1)) + net.bias_variance
    if state.theta is None:
        return Pair(sigma, None)
    return Pair(sigma, sigma + net.weight_variance * state.theta.mean((-2, -1)))


def _layer(
    net: ConvNet, step: Step, state: Pair, entry: Pair | None, scale: tuple[Tensor, Tensor], first: bool, fused: bool
) -> tuple[Pair | None, Pair]:
    """A convolution, its shortcut and the activation: values before the activation, if needed again, and after it."""
    before = _convolve(net, step, state, entry, first, fused)
    x_scale, y_scale = _select(scale[0], step.x_at)[:, None], _select(scale[1], step.y_at)[None]
    sigma, slope = _expectations(net, before.sigma, x_scale, y_scale)
    after = Pair(sigma, None if before.theta is None else before.theta * slope)
    return before if step.enters else None, after


@cache
def _compiled_layer() -> Callable:
    return torch.compile(_layer)


def _convolve(net: ConvNet, step: Step, state: Pair, entry: Pair | None, first: bool, fused: bool) -> Pair:
    """A convolution and its shortcut. `first`: Θ = 0 below the convolution, and is wanted above it."""
    w, b = net.weight_variance, net.bias_variance
    mean = _mean_fused if fused else _mean
    sigma = w * mean(state.sigma, step.windows) + b
    theta = sigma if first else None
    if state.theta is not None:
        theta = sigma + w * mean(state.theta, step.windows)
    if step.enter_at is None or entry is None:
        return Pair(sigma, theta)
    short = _select(entry.sigma, step.enter_at)
    short_theta = None if entry.theta is None else _select(entry.theta, step.enter_at)
    if step.project:
        short = w * short + b
        short_theta = None if short_theta is None else short + w * short_theta
    return Pair(sigma + short, None if theta is None or short_theta is None else theta + short_theta)


def _select(values: Tensor, at: Indices) -> Tensor:
    """Rows and columns (the last two dimensions) of `values`."""
    return values.index_select(-2, at[0]).index_select(-1, at[1])


def _mean_fused(values: Tensor, windows: tuple[Window, Window]) -> Tensor:
    """The mean over a window in one expression, which a compiler makes one loop."""
    rows, columns = windows
    out = torch.zeros((), dtype=values.dtype, device=values.device)
    for row, row_weight in zip(rows.source, rows.weight, strict=True):
        for column, weight in zip(columns.source, columns.weight, strict=True):
            out = out + (row_weight[:, None] * weight) * _select(values, (row, column))
    return out


def _mean(values: Tensor, windows: tuple[Window, Window]) -> Tensor:
    """The mean over a window, along rows and then along columns, which takes few operations."""
    for dim, window in zip((-2, -1), windows, strict=True):
        values = _mean_along(values, window, dim)
    return values


def _mean_along(values: Tensor, window: Window, dim: int) -> Tensor:
    weights = window.weight[..., None] if dim == -2 else window.weight
    if window.shifts is None:
        out = values.index_select(dim, window.source[0]) * weights[0]
        for index, weight in zip(window.source[1:], weights[1:], strict=True):
            out.addcmul_(values.index_select(dim, index), weight)
        return out
    size, out = values.shape[dim], torch.zeros_like(values)
    for shift, weight in zip(window.shifts, weights, strict=True):
        start, length = max(0, -shift), size - abs(shift)
        part = weight.narrow(0, start, length)
        out.narrow(dim, start, length).addcmul_(values.narrow(dim, start + shift, length), part)
    return out


# --- activations: Gaussian expectations


def _scale(net: ConvNet, variance: Tensor) -> Tensor:
    """What the expectations need of a variance."""
    return variance.sqrt() if net.activation == "relu" else variance


def _expectations(net: ConvNet, xy: Tensor, x_scale: Tensor, y_scale: Tensor) -> tuple[Tensor, Tensor]:
    """E[φφ] and E[φ′φ′] for Gaussian pairs of covariance xy."""
    return (_relu if net.activation == "relu" else _erf)(xy, x_scale, y_scale)


def _relu(xy: Tensor, x_root: Tensor, y_root: Tensor) -> tuple[Tensor, Tensor]:
    info = torch.finfo(xy.dtype)
    norm = x_root * y_root
    # stretched, so that rounding does not keep the cosine of equal vectors below 1, where the angle is a square root
    cosine = (xy * (1 + 4 * info.eps) / norm.clamp(min=info.tiny)).clamp(-1, 1)
    share = 0.5 - cosine.arccos() / (2 * pi)
    sine = ((1 - cosine) * (1 + cosine)).sqrt()
    return norm * (sine / (2 * pi) + share * cosine), share


def _erf(xy: Tensor, xx: Tensor, yy: Tensor) -> tuple[Tensor, Tensor]:
    norm2 = (1 + 2 * xx) * (1 + 2 * yy)
    value = (2 * xy / norm2.sqrt()).clamp(-1, 1).arcsin() * (2 / pi)
    # norm2 − 4 xy², without cancelling large numbers
    spread = 1 + 2 * xx + 2 * yy + 4 * (xx * yy - xy * xy).clamp(min=0)
    return value, (4 / pi) / spread.sqrt()
