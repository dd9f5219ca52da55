"""Products of large matrices: on a GPU in half precision, on its tensor cores, with numbers scaled into their range.

Factors are rounded to 11 bits, products and sums are float32. That is TF32's precision and about ten times faster than
float32, and it leaves torch's settings for the whole process alone. On a CPU products are float32.

Of symmetric matrices only the blocks on and above the diagonal are computed, kept and used.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]

BLOCKS, ROWS, ROWS_GPU = 4, 512, 2048  # number of row blocks, and the fewest rows per block
UNIT = 2.0**-14  # scale of numbers between −1 and 1
RETURNS_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()  # whether torch can multiply halves into float32 (2.8)


def uses_halves(x: Tensor) -> bool:
    """Whether products of this tensor are computed in half precision."""
    return x.is_cuda and x.dtype == torch.float32 and RETURNS_FLOAT32


def add_square(sums: Tensor, x: Tensor, keep: float) -> None:
    """sums ← keep · sums + xᵀx for rows x, (rows, d), in the blocks on and above the diagonal."""
    scale = None
    if uses_halves(x):
        length = torch.linalg.vector_norm(x)  # no entry is longer, so none overflows
        scale = power_of_two(torch.maximum(length / 2**15, length / (8 * x.numel() ** 0.5)))
        x = _halved(x, scale)
    for start, end in _blocks(sums):
        into, left, right = sums[start:end, start:], x[:, start:end].T, x[:, start:]
        if scale is None:
            into.addmm_(left, right, beta=keep)
            continue
        if keep != 1:
            into.mul_(keep)
        into.addcmul_(_of_halves(left, right), scale.square())


class Symmetric:
    """Products of A = S − w wᵀ with q; S is symmetric, known in the blocks on and above the diagonal, and A positive.

    >>> A = Symmetric(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 0.0]))
    >>> A.times(torch.tensor([[1.0], [0.0]]))
    tensor([[1.],
            [1.]])
    """

    def __init__(self, known: Tensor, w: Tensor) -> None:
        self.known, self.w = known, w
        self.blocks, self.scale = _blocks(known), None
        if uses_halves(known):  # no entry is larger than the largest on the diagonal
            self.scale = scale = power_of_two((known.diagonal() - w.square()).max()) * UNIT
            self.rounded, self.lost = zip(*(self._split(*block, scale) for block in self.blocks), strict=True)

    def times(self, q: Tensor, exact: bool = False) -> Tensor:
        """A q for q between −1 and 1; `exact`: with all digits of A, and those of q that are `representable`."""
        out = torch.zeros_like(q)
        if self.scale is None:
            for start, end in self.blocks:
                _add_products(out, self.known[start:end, start:], q, start, torch.matmul)
            return out.sub_(torch.outer(self.w, self.w @ q))
        right = _halved(q, UNIT)
        for halves in (self.rounded, self.lost) if exact else (self.rounded,):
            for (start, _), block in zip(self.blocks, halves, strict=True):
                _add_products(out, block, right, start, _of_halves)
        return out.mul_(self.scale * UNIT)

    def _split(self, start: int, end: int, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of A from start to end, from the diagonal on, in float16, and the digits lost in rounding."""
        rows = torch.addcmul(self.known[start:end, start:], self.w[start:end, None], self.w[start:], value=-1)
        rounded = rows.mul_(1 / scale).half()
        return rounded, rows.sub_(rounded).half()


def _add_products(out: Tensor, block: Tensor, right: Tensor, start: int, product: Product) -> None:
    """Add to A q what a block of rows of A, from `start` and from the diagonal on, and its mirror image contribute."""
    end = start + len(block)
    out[start:end] += product(block, right[start:])
    if end < len(out):
        out[end:] += product(block[:, end - start :].T, right[start:end])


def representable(q: Tensor) -> Tensor:
    """q, between −1 and 1, rounded so that products with it are exact in q."""
    return _halved(q, UNIT).float() * UNIT if uses_halves(q) else q


def power_of_two(x: Tensor) -> Tensor:
    """The next larger power of two; 1 instead of 0 and of what is not finite.

    >>> power_of_two(torch.tensor([3.0, 0.0]))
    tensor([4., 1.])
    """
    power = torch.exp2(torch.floor(torch.log2(x)) + 1)
    return torch.where(torch.isfinite(power) & (power > 0), power, 1.0)


def _halved(x: Tensor, scale: Tensor | float) -> Tensor:
    """x / scale in float16, without a copy in float32."""
    return torch.mul(x, 1 / scale, out=torch.empty(x.shape, dtype=torch.float16, device=x.device))


def _of_halves(left: Tensor, right: Tensor) -> Tensor:
    """Product in float32 of matrices in float16; only on GPUs."""
    return torch.mm(left, right, out_dtype=torch.float32)


def _blocks(matrix: Tensor) -> list[tuple[int, int]]:
    d = len(matrix)
    size = max(-(-d // BLOCKS), ROWS_GPU if matrix.is_cuda else ROWS)
    size += -size % 8  # aligned, which is faster on GPUs
    return [(start, min(start + size, d)) for start in range(0, d, size)]
