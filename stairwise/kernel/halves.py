"""Long products on a GPU: sums in float64 of short pieces, and float32 values as pairs of half-precision numbers.

A GPU adds up the terms of a float32 product one after the other, so rounding grows with their number; here at most
PIECE of them are added in float32. Its tensor cores multiply half precision (11 bits) ten times faster than float32,
but they cut off the sum after every 16 terms instead of rounding it: 2048 terms lose 1e-5 of it. So two of these
numbers hold 22 bits in the memory of one float32; rough products read only the first, exact ones join both.
"""

from dataclasses import dataclass
from functools import cache
from math import frexp

import torch
from torch import Tensor

PIECE = 2048  # terms that are added up in float32
SHIFT = 2.0**11  # the second number holds the bits below the 11 of the first
TOP = 14  # the largest value is scaled to between 2^13 and 2^14; half precision ends at 2^16
EPS = 2.0**-22
ALIGNED = 8  # columns: 16 bytes


@dataclass(frozen=True, eq=False)
class Halves:
    """values · scale = high + low / SHIFT."""

    high: Tensor
    low: Tensor
    scale: float


def halved(values: Tensor) -> Halves:
    """A matrix of float32 as halves."""
    low, top = torch.aminmax(values)
    largest = max(-float(low), float(top))
    scale = 2.0 ** (TOP - min(max(frexp(largest)[1], -100), 100))
    scaled = values * scale
    high = _half(scaled)
    return Halves(high, _half(scaled.sub_(high).mul_(SHIFT)), scale)


def half_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix of float64 in half precision, and the scale of each row."""
    scale = torch.exp2(TOP - torch.log2(values.abs().amax(1, keepdim=True).clamp(min=1e-250)).ceil())
    return _half(values * scale), scale


def _half(values: Tensor) -> Tensor:
    rows, columns = values.shape
    room = values.new_empty(rows, -(-columns // ALIGNED) * ALIGNED, dtype=torch.float16)
    return room[:, :columns].copy_(values)


def joined(values: Halves) -> Tensor:
    """values · scale in float32."""
    # of float32 and not a number, so that all is computed in float32, and at once
    shift = torch.full((1, 1), 1 / SHIFT, device=values.high.device)
    return torch.addcmul(values.high, values.low, shift)


def long_product(left: Tensor, right: Tensor) -> Tensor:
    """left right in float64, where at most PIECE terms are added up in float32."""
    sums = [_in_pieces(left, right, at).sum(0, dtype=torch.float64) for at in _pieces(left.shape[1])]
    return sums[0] if len(sums) == 1 else sums[0].add_(sums[1])


def _pieces(terms: int) -> list[slice]:
    """As many pieces as fit, and the rest."""
    whole = terms - terms % PIECE
    return [at for at in (slice(0, whole), slice(whole, terms)) if at.stop > at.start]


def _in_pieces(left: Tensor, right: Tensor, at: slice) -> Tensor:
    """Products of the columns and rows `at`, (pieces, rows, columns) in float32."""
    length = min(PIECE, at.stop - at.start)
    return _products(left[:, at].unflatten(1, (-1, length)).movedim(1, 0), right[at].unflatten(0, (-1, length)))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """A batch of products, in float32."""
    if left.dtype == torch.float16 and left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


@cache
def supported(device: torch.device) -> bool:
    """Whether this torch multiplies half precision with float32 results on this device."""
    if device.type != "cuda":
        return False
    try:
        return float(_products(*(torch.ones(1, 8, 8, dtype=torch.float16, device=device) for _ in "ab")).sum()) == 512
    except (RuntimeError, TypeError):
        return False
