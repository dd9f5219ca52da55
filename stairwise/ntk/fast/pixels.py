"""1.3 × on a CPU (ResNet-18 of half the width, 32 px): convolutions on small images multiply pixels, not patches.

Patches share pixels: a_it·a_jt' = Σ_k x_i,t+k·x_j,t'+k, where k runs over the kernel. Each pair of pixels is multiplied
once, and the products are added up.
"""

from itertools import product

import torch
from torch import Tensor, nn

from stairwise.ntk.factors import BLOCKS, ENTRY, Contraction, Outer, Way, by_rows, unscaled

SHIFT = 22  # cost of adding an entry to another, in multiplications (rough)
CACHE = 1.6e7  # bytes of products that are added up at once

# Along one axis of the image: the number of positions, and for each kernel element the positions that see a pixel
# there, and these pixels.
Axis = tuple[int, list[tuple[slice, slice]]]


def propose(one: Outer, other: Outer, symmetric: bool, how: Contraction) -> Way | None:
    """This way to compute inner products; None if it does not apply."""
    (x, b), every = one.parts[0], (*one.parts, *other.parts)
    if not isinstance(one.module, nn.Conv1d | nn.Conv2d) or one.module.groups > 1 or x.is_cuda:
        return None
    if isinstance(one.module.padding, str) or one.module.padding_mode != "zeros":
        return None
    n, m, (q, positions), pixels = one.samples, other.samples, b.shape[2:], x[0, 0].numel()
    row_bytes = 4 * x.element_size() * m * max(pixels, positions) ** 2
    if len({part.shape[2:] for part, _ in every}) > 1 or row_bytes > how.slice_bytes:
        return None
    multiplications = pixels**2 * x.shape[1] + positions**2 * q
    sums = positions**2 * (ENTRY + SHIFT * one.module.weight[0, 0].numel())
    share = (1 + 1 / min(n, BLOCKS)) / 2 if symmetric else 1.0
    return Way("pixels", multiplications, (multiplications + sums) * share * n * m, _gram)


def _gram(mine: Outer, theirs: Outer | None, how: Contraction) -> Tensor:
    x, b, scale = how.scaled(*mine.whole())
    x2, b2, their_scale = (x, b, scale) if theirs is None else how.scaled(*theirs.whole())
    axes, seen = _axes(mine.module, x), x.shape[2:]
    positions = [count for count, _ in axes]
    size = len(x2) * max(seen.numel(), b.shape[3]) ** 2 * max(4, x.element_size())
    x, b = (v.transpose(1, 2).contiguous() for v in (x.flatten(2), b[:, 0]))  # (n, T, q)
    # (T, m, q): samples come last in the products, which makes their rows long
    x2, b2 = (v.permute(2, 0, 1).contiguous() for v in (x2.flatten(2), b2[:, 0]))

    def block(i: slice, j: slice) -> Tensor:
        m = j.stop - j.start
        pixels = how.product(x[i].flatten(0, 1), x2[:, j].flatten(0, 1)).view(-1, *seen, *seen, m)
        total = how.product(b[i].flatten(0, 1), b2[:, j].flatten(0, 1)).view(-1, *positions, *positions, m)
        sums = torch.zeros_like(total)
        for along in product(*(elements for _, elements in axes)):
            there, here = zip(*along, strict=True)
            sums[:, *there, *there] += pixels[:, *here, *here]
        return total.mul_(sums).flatten(1, -2).sum(1)

    rows = max(1, int(CACHE / size))
    return unscaled(by_rows(len(x), x2.shape[1], rows, theirs is None, False, block), scale, their_scale)


def _axes(module: nn.Module, x: Tensor) -> list[Axis]:
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    assert not isinstance(module.padding, str)
    axes = []
    options = (module.kernel_size, module.stride, module.padding, module.dilation)
    for pixels, size, stride, padding, dilation in zip(x.shape[2:], *options, strict=True):
        count = (pixels + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        elements = []
        for first in range(-padding, dilation * size - padding, dilation):  # pixels that the first position sees
            low, high = max(0, -(first // stride)), min(count, (pixels - 1 - first) // stride + 1)
            if low < high:
                pixel = slice(first + stride * low, first + stride * (high - 1) + 1, stride)
                elements.append((slice(low, high), pixel))
        axes.append((count, elements))
    return axes
