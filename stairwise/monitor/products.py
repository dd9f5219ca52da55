"""Products of large matrices: on a GPU in half precision, on its tensor cores, with numbers scaled into their range.

Factors are rounded to 11 bits, products and sums are float32. That is TF32's precision and about ten times faster than
float32, and it leaves torch's settings for the whole process alone. On a CPU products are float32.

Of sums only the blocks on and above the diagonal are computed and kept. Matrices that are made of them for products
with a basis are complete, because one large product is faster than several of blocks.
"""

import torch
from torch import Tensor

BLOCKS, ROWS, ROWS_GPU = 8, 512, 1024  # number of row blocks, and the fewest rows per block
UNIT = 2.0**-14  # scale of numbers between −1 and 1
LARGEST = 2.0**15  # of numbers in float16
TYPICAL = 2.0**-10  # size of numbers that may grow to LARGEST; what is smaller than 2^-15 of it is lost
TINY = 2.0**-100  # shorter columns are zero
EXPONENT = 0x7F800000  # where float32 has its exponent
FINER = 2.0**11  # digits that rounding to float16 takes away, in units of the last one that stays
RETURNS_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()  # whether torch can multiply halves into float32 (2.8)


def uses_halves(x: Tensor) -> bool:
    """Whether products of this tensor are computed in half precision."""
    return x.is_cuda and x.dtype == torch.float32 and RETURNS_FLOAT32


def add_square(sums: Tensor, x: Tensor, keep: float = 1.0, unit: Tensor | None = None) -> None:
    """sums ← keep · sums + yᵀy for rows y = x / unit, (rows, d), in the blocks on and above the diagonal.

    On a GPU y is rounded to float16, in which no entry may be larger than LARGEST; x may be in float16 already.
    """
    if unit is not None:
        x = halved(x, unit) if uses_halves(x) else x / unit
    add_product(sums, x, x, keep)


def add_product(sums: Tensor, x: Tensor, y: Tensor, keep: float = 1.0) -> None:
    """sums ← keep · sums + xᵀy, likewise, for rows that are both in float16 or both not."""
    for start, end in _blocks(sums):
        into, left, right = sums[start:end, start:], x[:, start:end].T, y[:, start:]
        if x.dtype == torch.float16:
            add_of_halves(into, left, right, keep)
        else:
            into.addmm_(left, right, beta=keep)


class Symmetric:
    """Products with a symmetric matrix A, on a GPU as the sum of two matrices in float16.

    A takes the place of a matrix in float32, (d, d), whose blocks on and above the diagonal it may be made of: `fill`
    overwrites nothing but the rows it is given.

    Arguments:
        place: the matrix whose memory is used.
        largest: no entry of A is larger.
    """

    def __init__(self, place: Tensor, largest: Tensor) -> None:
        self.parts, self.scale = [place], None
        if uses_halves(place):  # A rounded, and the digits lost in rounding
            self.parts = list(place.view(torch.float16).chunk(2, dim=1))
            self.scale = power_of_two(largest) * UNIT

    def fill(self, start: int, rows: Tensor) -> None:
        """Set the rows of A from `start` on, given from the diagonal on."""
        here = slice(start, start + len(rows)), slice(start, None)
        if self.scale is not None:
            rows = rows * (1 / self.scale)
        for part in self.parts:
            part[here] = rows
            rows = rows - part[here] if part is not self.parts[-1] else rows

    def mirror(self) -> "Symmetric":
        """Fill the blocks below the diagonal, after all rows."""
        for part in self.parts:
            for start, end in _blocks(part):
                part[end:, start:end] = part[start:end, end:].T
        return self

    def times(self, q: Tensor, exact: bool = False) -> Tensor:
        """A q for q between −1 and 1; `exact`: with all digits of A, and those of q that are `representable`."""
        if self.scale is None:
            return self.parts[0] @ q
        right = halved(q, UNIT)
        out = of_halves(self.parts[0], right)
        if exact:
            out += of_halves(self.parts[1], right)
        return out.mul_(self.scale * UNIT)


def centred(sums: Tensor, w: Tensor) -> Symmetric:
    """S − w wᵀ, positive, in the place of the sums S.

    >>> A = centred(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 0.0]))
    >>> A.times(torch.tensor([[1.0], [0.0]]))
    tensor([[1.],
            [1.]])
    """
    A = Symmetric(sums, _largest(sums, w))
    for start, end in _blocks(sums):
        A.fill(start, _centred_rows(sums, w, start, end))
    return A.mirror()


def centred_pair(first: Tensor, second: Tensor, w: Tensor) -> tuple[Symmetric, Symmetric]:
    """A + T and A − T, where A = S − w wᵀ and T are positive, in the places of the sums S and T."""
    largest = _largest(first, w) + second.diagonal().max()
    both, difference = Symmetric(first, largest), Symmetric(second, largest)
    for start, end in _blocks(first):
        A, T = _centred_rows(first, w, start, end), second[start:end, start:]
        both.fill(start, A + T)
        difference.fill(start, A.sub_(T))
    return both.mirror(), difference.mirror()


def _largest(sums: Tensor, w: Tensor) -> Tensor:
    """A bound of the entries of S − w wᵀ, where S is rounded off its diagonal."""
    return torch.maximum((sums.diagonal() - w.square()).max(), 2**-10 * sums.diagonal().max())


def _centred_rows(sums: Tensor, w: Tensor, start: int, end: int) -> Tensor:
    """Rows of S − w wᵀ, from the diagonal on."""
    return torch.addcmul(sums[start:end, start:], w[start:end, None], w[start:], value=-1)


def representable(q: Tensor) -> Tensor:
    """q, between −1 and 1, rounded so that products with it are exact in q."""
    return halved(q, UNIT).float() * UNIT if uses_halves(q) else q


def overlaps(p: Tensor, x: Tensor) -> Tensor:
    """pᵀ x in float64, for p that is `representable`, (d, columns) each.

    On a GPU the columns of x, made one long, are sums of two matrices in float16, if x is not p.
    """
    if not uses_halves(p):
        return p.double().T @ x.double()
    left = halved(p, UNIT)
    if x is p:
        return of_halves(left.T, left).double().mul_(UNIT**2)
    lengths = torch.linalg.vector_norm(x, dim=0).clamp_(min=TINY)
    x = x / (lengths * UNIT)
    first = x.half()
    rest = x.sub_(first).mul_(FINER).half()
    out = of_halves(left.T, first).add_(of_halves(left.T, rest), alpha=1 / FINER)
    return out.double().mul_(lengths * UNIT**2)


def power_of_two(x: Tensor) -> Tensor:
    """The next larger power of two of numbers in float32, if it is between 2⁻¹⁰⁰ and 2¹⁰⁰, else the bound.

    >>> power_of_two(torch.tensor([3.0, 0.25]))
    tensor([4.0000, 0.5000])
    """
    bits = x.clamp(2.0**-100, 2.0**100).view(torch.int32) & EXPONENT
    return bits.view(torch.float32) * 2


def halved(x: Tensor, scale: Tensor | float) -> Tensor:
    """x / scale in float16, without a copy in float32."""
    return torch.mul(x, 1 / scale, out=torch.empty(x.shape, dtype=torch.float16, device=x.device))


def add_of_halves(into: Tensor, left: Tensor, right: Tensor, keep: float) -> None:
    """into ← keep · into + left right, in float32, of matrices in float16; only on GPUs."""
    torch.addmm(into, left, right, beta=keep, out_dtype=torch.float32, out=into)


def of_halves(left: Tensor, right: Tensor) -> Tensor:
    """Product in float32 of matrices in float16; only on GPUs."""
    return torch.mm(left, right, out_dtype=torch.float32)


def _blocks(matrix: Tensor) -> list[tuple[int, int]]:
    d = len(matrix)
    size = max(-(-d // BLOCKS), ROWS_GPU if matrix.is_cuda else ROWS)
    size += -size % 8  # aligned, which is faster on GPUs
    return [(start, min(start + size, d)) for start in range(0, d, size)]
