"""What a convolutional network of infinite width is, and which pairs of pixels its kernel needs.

The covariance of two images x, y is a number per pair of pixels, Σ[p, q]. A convolution moves both pixels together:
Σ ← σ_w² mean_δ Σ[p + δ, q + δ] + σ_b². So rows and columns are independent, and on each axis a list of the pairs
(p, q) that the output depends on is enough: p = q for a flattened head; all pairs for global average pooling, of which
strides leave only offsets q − p that are their multiples.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, number, one_of, positive_int

ACTIVATIONS = ("relu", "erf")
HEADS = ("gap", "flatten")
PADDINGS = ("same", "valid", "circular")

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ConvNet:
    """Architecture of a convolutional network; its width is infinite.

    `depth` convolutions with an activation after each, a head and a linear readout.

    Attributes:
        depth: number of convolutions; the readout is not counted.
        kernel_size: side of the filters, odd.
        strides: of the first convolutions; all others have stride 1.
        padding: "same": kernel_size // 2 zeros on each side. "valid": none. "circular": the opposite border.
        activation: "relu" or "erf".
        skip: a shortcut around each `skip` convolutions after the first, x ← x + branch(x), where the branch begins
            with an activation; a 1×1 convolution where the branch has strides. 0: no shortcuts.
        head: "flatten", or "gap", global average pooling, which costs height × width times as much.
        weight_variance, bias_variance: σ_w², divided by the number of inputs of a unit, and σ_b².
    """

    depth: int = 4
    kernel_size: int = 3
    strides: tuple[int, ...] = ()
    padding: str = "same"
    activation: str = "relu"
    skip: int = 0
    head: str = "flatten"
    weight_variance: float = 2.0
    bias_variance: float = 0.0

    def check(self) -> None:
        """Raise InputError if a field is not valid."""
        depth, size = positive_int(self.depth, "depth", 1000), positive_int(self.kernel_size, "kernel_size")
        one_of(self.padding, "padding", PADDINGS)
        one_of(self.activation, "activation", ACTIVATIONS)
        one_of(self.head, "head", HEADS)
        most = 1e30 ** (1 / (depth + 1)) if self.activation == "relu" else 1e8  # beyond, outputs of float32 overflow
        number(self.weight_variance, "weight_variance", least=1e-6, most=most)
        number(self.bias_variance, "bias_variance", least=0, most=1e8)
        if size % 2 == 0:
            raise InputError("kernel_size", "must be odd", size)
        if not isinstance(self.strides, tuple) or len(self.strides) > depth:
            raise InputError("strides", f"must be at most {depth} in a tuple, one per convolution", self.strides)
        for stride in self.strides:
            positive_int(stride, "strides")
        if isinstance(self.skip, bool) or not isinstance(self.skip, int) or self.skip < 0:
            raise InputError("skip", "must be a whole number of at least 0", self.skip)
        if self.skip and (depth - 1) % self.skip:
            raise InputError("skip", f"must divide the {depth - 1} convolutions after the first", self.skip)
        if self.skip and self.padding == "valid":
            raise InputError("padding", "must keep the size where there are shortcuts", "'valid'", 'use "same"')

    def stride(self, layer: int) -> int:
        """Stride of convolution number `layer`, from 0."""
        return self.strides[layer] if layer < len(self.strides) else 1

    def enters_block(self, layer: int) -> bool:
        """Whether the input of this convolution is also the input of a shortcut."""
        return bool(self.skip) and 0 < layer < self.depth and (layer - 1) % self.skip == 0

    def leaves_block(self, layer: int) -> bool:
        """Whether a shortcut is added to the output of this convolution."""
        return bool(self.skip) and layer > 0 and layer % self.skip == 0

    def block_stride(self, layer: int) -> int:
        """Stride of the shortcut that is added to the output of this convolution."""
        return prod(self.stride(inner) for inner in range(layer - self.skip + 1, layer + 1))


@dataclass(frozen=True, eq=False)
class Taps:
    """A convolution along one axis, on lists of pairs: output i is the sum of inputs index[δ, i] with valid[δ, i]."""

    index: Indices  # (taps, outputs); taps that are outside for all outputs are left out
    valid: NDArray[np.bool_]
    inputs: int

    @property
    def shifts(self) -> tuple[int, ...] | None:
        """The constant index[δ, i] − i of each δ, one of which is 0; None if they are not constant."""
        if self.index.shape[1] != self.inputs:
            return None
        steps = self.index - np.arange(self.inputs)
        each = [np.unique(row[good]) for row, good in zip(steps, self.valid, strict=True)]
        if any(one.size > 1 for one in each) or not any(one[0] == 0 for one in each):
            return None
        return tuple(int(one[0]) for one in each)


@dataclass(frozen=True, eq=False)
class Axis:
    """Pairs of positions on one axis.

    Attributes:
        pairs: (2, n) positions p in x and q in y: of the input, then of the output of each convolution.
        taps: one per convolution.
        shortcuts: for each convolution to whose output a shortcut is added, the index of its pairs in the input of the
            shortcut.
    """

    pairs: list[Indices]
    taps: list[Taps]
    shortcuts: dict[int, Indices]


def build_axis(net: ConvNet, size: int, diagonal: bool) -> Axis:
    """The pairs that the output needs, from the last layer back to the input; only p = q if `diagonal`."""
    sizes = [size]
    for layer in range(net.depth):
        sizes.append(_output_size(net, layer, sizes[-1]))
    every = np.arange(sizes[-1])
    first, second = (every, every) if diagonal else map(np.ravel, np.meshgrid(every, every, indexing="ij"))
    pairs = [_ordered(np.stack([first, second]), sizes[-1])]
    taps: list[Taps] = []
    for layer in reversed(range(net.depth)):
        below, taps_here = _needed(net, layer, sizes[layer], pairs[0])
        pairs.insert(0, below)
        taps.insert(0, taps_here)
    shortcuts = {}
    for layer in range(1, net.depth):
        if net.leaves_block(layer):
            entry = layer - net.skip + 1
            moved = pairs[layer + 1] * net.block_stride(layer)
            shortcuts[layer] = np.searchsorted(_key(pairs[entry], sizes[entry]), _key(moved, sizes[entry]))
    return Axis(pairs, taps, shortcuts)


def _output_size(net: ConvNet, layer: int, size: int) -> int:
    room = size - 1 if net.padding != "valid" else size - net.kernel_size
    if room < 0:
        remedy = f'convolution {layer + 1} has {size} pixels left: use padding="same" or fewer layers'
        raise InputError("depth", 'is too large for these images with padding="valid"', net.depth, remedy)
    return room // net.stride(layer) + 1


def _needed(net: ConvNet, layer: int, size: int, pairs: Indices) -> tuple[Indices, Taps]:
    """Pairs below a convolution with an input of `size` pixels, and how the given pairs follow from them."""
    steps = np.arange(net.kernel_size) - (0 if net.padding == "valid" else net.kernel_size // 2)
    moved = pairs[:, None] * net.stride(layer) + steps[:, None]  # (2, kernel_size, outputs)
    if net.padding == "circular":
        moved = moved % size
    valid = np.asarray(((moved >= 0) & (moved < size)).all(0))
    below = _ordered(moved[:, valid], size)
    index = np.searchsorted(_key(below, size), _key(moved, size))
    used = valid.any(1)
    return below, Taps(np.where(valid, index, 0)[used], valid[used], below.shape[1])


def _ordered(pairs: Indices, size: int) -> Indices:
    """Different pairs, sorted by offset q − p and then by p, so that neighbours (p ± 1, q ± 1) stand side by side."""
    _, first = np.unique(_key(pairs, size), return_index=True)
    return pairs[:, first]


def _key(pairs: Indices, size: int) -> Indices:
    return (pairs[1] - pairs[0]) * size + pairs[0]
