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
from torch.nn.functional import pad

from stairwise.checks import InputError
from stairwise.kernel.convnet import Axis, ConvNet, Taps, build_axis

MEMORY = 1 << 23  # bytes for the tensors of a tile on a CPU: tiles that stay in its cache are faster
GPU_MEMORY = 1 << 32  # on a GPU: many entries per call, and the same number in each call, for which layers are compiled
LIVE = 10  # number of tensors of the size of the covariance that exist at the same time
OVERLAP = 1.05  # entries computed per entry that is wanted; more is worth another shape of tiles
WORTH_COMPILING = 10**11  # pairs of pixels, of all entries and layers; for fewer, compiling takes longer than it saves


class Pair(NamedTuple):
    """Σ and Θ. Θ is None if it is not wanted or zero."""

    sigma: Tensor
    theta: Tensor | None


class Window(NamedTuple):
    """`Taps` on the device; `weight` is σ_w / kernel_size, and 0 outside the image."""

    source: Tensor  # index of the inputs, (taps, outputs)
    weight: Tensor
    shifts: tuple[int, ...] | None


Indices = tuple[Tensor, Tensor]  # of rows, of columns


class Step(NamedTuple):
    """A convolution and its surroundings.

    Attributes:
        windows: the convolution along rows and along columns.
        x_at, y_at: the pixels p and q of its output, counted as in `_variances`.
        joins: whether a shortcut is added to its output.
        project: whether that shortcut is a convolution.
        enter_at: the pairs of its output, counted as in the input of that shortcut; None: they are the same.
        enters: whether its output is the input of a shortcut.
    """

    windows: tuple[Window, Window]
    x_at: Indices
    y_at: Indices
    joins: bool
    project: bool
    enter_at: Indices | None
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
        memory: bytes for the tensors of a tile; None: 8 MiB on a CPU, on a GPU 4 GiB or a quarter of the free
            memory. A tile holds at least one entry.
        compiled: whether `torch.compile` fuses each layer; None: for many entries on a GPU with triton.
    """
    net.check()
    if X.ndim != 4 or X.shape[1:] != Y.shape[1:]:
        rule = "must be images of the same shape, (number, height, width, channels)"
        raise InputError("X and Y", rule, f"{tuple(X.shape)} and {tuple(Y.shape)}")
    same = X is Y
    # The angle between nearly equal vectors has half of the digits. Pooling averages that away, flattening does not.
    dtype = X.dtype if net.head == "gap" else torch.float64
    x = X.to(dtype).movedim(-1, 1).contiguous()
    y = x if same else Y.to(dtype).movedim(-1, 1).contiguous()
    first, steps, sizes = _plan(net, x, diagonal=net.head == "flatten")
    x_scales = _variances(net, x)
    y_scales = x_scales if same else _variances(net, y)
    if compiled is None:
        many = net.head == "gap" and len(x) * len(y) * sum(sizes) >= WORTH_COMPILING
        compiled = x.is_cuda and many and find_spec("triton") is not None
    out = Pair(X.new_empty(len(x), len(y)), X.new_empty(len(x), len(y)) if tangent else None)
    pairs = max(1, _budget(x, memory) // (LIVE * x.element_size() * max(sizes)))
    scales_of = [_wide(x_scales, steps, 0), _wide(y_scales, steps, 1)]
    for rows, columns in _tiles(len(x), len(y), pairs, same):
        scales = [(a[rows], b[columns]) for a, b in zip(*scales_of, strict=True)]
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
    return min(GPU_MEMORY, torch.cuda.mem_get_info(x.device)[0] // 4) if x.is_cuda else MEMORY


def _tiles(n: int, k: int, pairs: int, same: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most `pairs` entries; only the upper triangle if both sets of images are the same.

    All tiles have one shape, for which layers are compiled: the last ones overlap with those before.
    """
    tall = _side(n, isqrt(pairs))
    wide = tall if same else _side(k, pairs // tall)
    for i in range(0, n, tall):
        top = min(i, n - tall)
        for j in range(i if same else 0, k, wide):
            left = min(j, k - wide)
            yield slice(top, top + tall), slice(left, left + wide)


def _side(n: int, most: int) -> int:
    """Images per tile: `most`, or of at least half as many those that cover n with the least overlap, if it matters."""
    side = min(n, most)
    if -(-n // side) * side <= OVERLAP * n:
        return side
    return min(range(side, side // 2, -1), key=lambda one: -(-n // one) * one)


# --- the plan: index tensors


def _plan(net: ConvNet, x: Tensor, diagonal: bool) -> tuple[tuple[Indices, Indices], list[Step], list[int]]:
    """Pixels p and q of the input, all steps, and the number of pairs of pixels in the input and in each layer."""
    sides = x.shape[-2:]
    alone = [build_axis(net, side, diagonal=True) for side in sides]
    axes = alone if diagonal else [build_axis(net, side, diagonal=False) for side in sides]

    def both(arrays: list) -> Indices:
        rows, columns = (torch.as_tensor(array, dtype=torch.int32, device=x.device) for array in arrays)
        return rows, columns

    def at(layer: int, which: int) -> Indices:
        lists = zip(alone, axes, strict=True)
        return both([one.pairs[layer][0].searchsorted(axis.pairs[layer][which]) for one, axis in lists])

    steps = []
    for layer in range(net.depth):
        rows, columns = (_window(net, axis.taps[layer], x) for axis in axes)
        places, joins, enter_at = (at(layer + 1, 0), at(layer + 1, 1)), net.leaves_block(layer), None
        if joins and not all(_is_identity(axis, layer, net.skip) for axis in axes):
            enter_at = both([axis.shortcuts[layer] for axis in axes])
        project = joins and net.block_stride(layer) > 1
        steps.append(Step((rows, columns), *places, joins, project, enter_at, net.enters_block(layer + 1)))
    first = both([axis.pairs[0][0] for axis in axes]), both([axis.pairs[0][1] for axis in axes])
    sizes = [a.shape[1] * b.shape[1] for a, b in zip(axes[0].pairs, axes[1].pairs, strict=True)]
    return first, steps, sizes


def _is_identity(axis: Axis, layer: int, skip: int) -> bool:
    entry = axis.pairs[layer - skip + 1]
    return entry.shape == axis.pairs[layer + 1].shape and bool((entry == axis.pairs[layer + 1]).all())


def _window(net: ConvNet, taps: Taps, like: Tensor) -> Window:
    values = taps.valid * net.weight_variance**0.5 / net.kernel_size
    weight = torch.as_tensor(values, dtype=like.dtype, device=like.device)
    return Window(torch.as_tensor(taps.index, dtype=torch.int32, device=like.device), weight, taps.shifts)


# --- the recursion


def _products(x: Tensor, y: Tensor, first: tuple[Indices, Indices]) -> Tensor:
    """x_p · y_q / channels, (n, k, pairs of rows, pairs of columns), for x (n, channels, height, width)."""
    x, y = _select(x, first[0]), _select(y / y.shape[1], first[1])
    out = x[:, None, 0] * y[None, :, 0]
    for channel in range(1, x.shape[1]):
        out.addcmul_(x[:, None, channel], y[None, :, channel])
    return out


def _variances(net: ConvNet, x: Tensor) -> list[Tensor]:
    """`_scale` of Σ_xx[p, p] before each activation, (n, rows, columns), as far as the output depends on it."""
    first, steps, _ = _plan(net, x, diagonal=True)
    state, entry, out = Pair(_select((x * x).mean(1), first[0]), None), None, []
    for step in steps:
        before = _convolve(net, step, state, entry, first=False, fused=False)
        entry = before if step.enters else entry
        out.append(_scale(net, before.sigma))
        state = Pair(_second_moment(net, before.sigma), None)
    return out


def _wide(scales: list[Tensor], steps: list[Step], which: int) -> list[Tensor]:
    """Scales at the columns of the pairs of pixels; their rows are selected by each layer, which needs no memory."""
    return [scale.index_select(-1, (step.x_at, step.y_at)[which][1]) for scale, step in zip(scales, steps, strict=True)]


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
    x_scale, y_scale = (one.index_select(-2, at[0]) for one, at in zip(scale, (step.x_at, step.y_at), strict=True))
    sigma, slope = _expectations(net, before.sigma, x_scale[:, None], y_scale[None])
    after = Pair(sigma, None if before.theta is None else slope.mul_(before.theta))
    return before if step.enters else None, after


@cache
def _compiled_layer() -> Callable:
    # one kernel per kind of layer and shape of tile; the default limit of eight is too low for networks with strides
    # and no check of indices on the device, which are ours
    layer = torch.compile(_layer, dynamic=False, options={"assert_indirect_indexing": False})
    return torch._dynamo.config.patch(recompile_limit=64)(layer)


def _convolve(net: ConvNet, step: Step, state: Pair, entry: Pair | None, first: bool, fused: bool) -> Pair:
    """A convolution and its shortcut. `first`: Θ = 0 below the convolution, and is wanted above it."""
    mean = _mean_fused if fused else _mean
    sigma = mean(state.sigma, step.windows).add_(net.bias_variance)
    theta = sigma if first else None
    if state.theta is not None:
        theta = mean(state.theta, step.windows).add_(sigma)
    if not step.joins or entry is None:
        return Pair(sigma, theta)
    short_sigma, short_theta = _shortcut(net, step, entry)
    return Pair(sigma + short_sigma, None if theta is None or short_theta is None else theta + short_theta)


def _shortcut(net: ConvNet, step: Step, entry: Pair) -> Pair:
    """What a shortcut adds: its input, or a 1×1 convolution of it."""
    sigma, theta = entry
    if step.enter_at is not None:
        sigma = _select(sigma, step.enter_at)
        theta = None if theta is None else _select(theta, step.enter_at)
    if step.project:
        sigma = net.weight_variance * sigma + net.bias_variance
        theta = None if theta is None else sigma + net.weight_variance * theta
    return Pair(sigma, theta)


def _select(values: Tensor, at: Indices) -> Tensor:
    """Rows and columns (the last two dimensions) of `values`. Columns first: whole rows are copied faster."""
    return values.index_select(-1, at[1]).index_select(-2, at[0])


def _mean_fused(values: Tensor, windows: tuple[Window, Window]) -> Tensor:
    """σ_w² times the mean over a window, in one expression, from which a compiler makes one loop."""
    rows, columns = windows
    reach = [0 if window.shifts is None else max(map(abs, window.shifts)) for window in (columns, rows)]
    padded = pad(values, [reach[0], reach[0], reach[1], reach[1]])
    out = torch.zeros((), dtype=values.dtype, device=values.device)
    for i, row_weight in enumerate(rows.weight):
        row = _moved(padded, rows, i, -2)
        parts = [weight * _moved(row, columns, j, -1) for j, weight in enumerate(columns.weight)]
        out = out + row_weight[:, None] * sum(parts)
    return out


def _moved(padded: Tensor, window: Window, tap: int, dim: int) -> Tensor:
    """The inputs of one tap of the window. Slices of padded values are faster than indices."""
    if window.shifts is None:
        return padded.index_select(dim, window.source[tap])
    return padded.narrow(dim, max(map(abs, window.shifts)) + window.shifts[tap], window.source.shape[1])


def _mean(values: Tensor, windows: tuple[Window, Window]) -> Tensor:
    """σ_w² times the mean over a window, along rows and then along columns: fewer operations if not fused."""
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
    size, middle = values.shape[dim], window.shifts.index(0)
    out = values * weights[middle]
    for tap, (shift, weight) in enumerate(zip(window.shifts, weights, strict=True)):
        if tap == middle:
            continue
        start, length = max(0, -shift), size - abs(shift)
        part = weight.narrow(0, start, length)
        out.narrow(dim, start, length).addcmul_(values.narrow(dim, start + shift, length), part)
    return out


# --- activations: Gaussian expectations


def _second_moment(net: ConvNet, variance: Tensor) -> Tensor:
    """E[φ²]."""
    return variance / 2 if net.activation == "relu" else (2 * variance / (1 + 2 * variance)).arcsin() * (2 / pi)


def _scale(net: ConvNet, variance: Tensor) -> Tensor:
    """What E[φφ] needs of a variance: its root for ReLU, itself for erf."""
    if net.activation == "erf":
        return variance
    return variance.sqrt().clamp(min=torch.finfo(variance.dtype).tiny ** 0.5)  # no division by zero


def _expectations(net: ConvNet, xy: Tensor, x_scale: Tensor, y_scale: Tensor) -> tuple[Tensor, Tensor]:
    """E[φφ] and E[φ′φ′] for Gaussian pairs of covariance xy."""
    return (_relu if net.activation == "relu" else _erf)(xy, x_scale, y_scale)


def _relu(xy: Tensor, x_root: Tensor, y_root: Tensor) -> tuple[Tensor, Tensor]:
    norm = x_root * y_root
    gap = (xy / norm).neg_().add_(1).clamp_(max=2)  # 1 − cosine
    # rounding must not give equal vectors an angle, which is as large as the root of the gap
    torch.threshold_(gap, 4 * torch.finfo(xy.dtype).eps, 0)
    cosine = 1 - gap
    share = cosine.arccos().mul_(-1 / (2 * pi)).add_(0.5)
    sine = (1 + cosine).mul_(gap).sqrt_()
    return sine.mul_(1 / (2 * pi)).addcmul_(share, cosine).mul_(norm), share


def _erf(xy: Tensor, xx: Tensor, yy: Tensor) -> tuple[Tensor, Tensor]:
    norm = ((1 + 2 * xx) * (1 + 2 * yy)).sqrt()
    value = (2 * xy / norm).clamp_(-1, 1).arcsin_().mul_(2 / pi)
    # norm² − 4 xy², without cancelling large numbers
    spread = 1 + 2 * xx + 2 * yy + 4 * (xx * yy - xy * xy).clamp_(min=0)
    return value, (4 / pi) / spread.sqrt()
