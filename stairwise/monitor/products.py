"""Matrix products of large sums: on a GPU in half precision, on its tensor cores, with numbers scaled into their range.

Factors are rounded to 11 bits, products and sums are float32. That is TF32's precision and about ten times faster than
float32, and it leaves torch's settings for the whole process alone. On a CPU products are float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 15  # scaled numbers are below 2^15; the largest of float16 is almost 2^16
BLOCKS = 4  # row blocks of a symmetric product, of which only the upper half is computed: saves three eighths
RETURNS_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()  # whether torch can multiply halves into float32 (2.8)


def uses_halves(x: Tensor) -> bool:
    """Whether products of this tensor are computed in half precision."""
    return x.is_cuda and x.dtype == torch.float32 and RETURNS_FLOAT32


def halved(x: Tensor) -> tuple[Tensor, Tensor]:
    """x ≈ scale · half, with half in float16 and scale a power of two, a tensor of shape ().

    >>> half, scale = halved(torch.tensor([[3.0, -1e-6]]))
    >>> half.dtype, float(scale), bool(((scale * half.float() - torch.tensor([[3.0, -1e-6]])).abs() < 1e-9).all())
    (torch.float16, 0.0001220703125, True)
    """
    peak = torch.linalg.vector_norm(x, torch.inf)
    scale = torch.exp2(torch.floor(torch.log2(peak)) + 1 - LARGEST)
    scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
    half = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return torch.mul(x, scale.reciprocal(), out=half), scale  # without a copy in float32


def add_square(sums: Tensor, x: Tensor, keep: float) -> None:
    """sums ← keep · sums + xᵀx for rows x, (rows, d), in the blocks on and above the diagonal; see `mirror`."""
    half, scale = halved(x) if uses_halves(x) else (x, None)
    for start, end in _blocks(len(sums)):
        into, left, right = sums[start:end, start:], half[:, start:end].T, half[:, start:]
        if scale is None:
            into.addmm_(left, right, beta=keep)
            continue
        if keep != 1:
            into.mul_(keep)
        into.addcmul_(torch.mm(left, right, out_dtype=torch.float32), scale.square())


def mirror(sums: Tensor) -> None:
    """Copy the blocks above the diagonal to those below."""
    for start, end in _blocks(len(sums)):
        sums[end:, start:end] = sums[start:end, end:].T


def multiplier(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """The function q → matrix · q."""
    if not uses_halves(matrix):
        return lambda q: matrix @ q
    half, scale = halved(matrix)

    def product(q: Tensor) -> Tensor:
        right, of_q = halved(q)
        return torch.mm(half, right, out_dtype=torch.float32) * (scale * of_q)

    return product


def representable(q: Tensor) -> Tensor:
    """q, rounded so that products with it are exact in q."""
    if not uses_halves(q):
        return q
    half, scale = halved(q)
    return half.float() * scale


def _blocks(d: int) -> list[tuple[int, int]]:
    size = -(-d // BLOCKS)
    size += -size % 8  # aligned, which is faster on GPUs
    return [(start, min(start + size, d)) for start in range(0, d, size)]
