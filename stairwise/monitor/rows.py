"""Rows of large embeddings, kept as they are until a record is made, instead of their second moments.

While they are few this takes less time: a batch costs little more than its rounding, and products of rows with a basis
less than a matrix of moments. Only on GPUs, in half precision.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from stairwise.monitor.products import LARGEST, UNIT, add_product, halved, of_halves

MOST = 26 * 1024  # rows that are kept; 52 batches of 256 pairs
PARTS = 64  # of rows, whose sums are added in float64
DIFFERENCES = 2048  # of pairs, which are computed together, to save memory


class Rows:
    """The rows of a window, y = (x − centre) / unit: of z both views of each pair, one below the other, or of h.

    Attributes:
        held: in float16, (MOST, d).
        counts: 1 for rows that count, 0 for those of batches that are left out, in float16, (MOST,).
        number: of rows so far. The host knows it, and the next two.
        last: number of rows of the last batch.
        unchecked: number of rows of each of the last batches, which have not been checked.
    """

    def __init__(self, d: int, device: torch.device) -> None:
        self.held = torch.empty(MOST, d, dtype=torch.float16, device=device)
        self.counts = torch.empty(MOST, dtype=torch.float16, device=device)
        self.forget()

    def forget(self) -> None:
        self.number = self.last = 0
        self.unchecked: list[int] = []

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load`, after `check`."""
        return {"rows": self.known(), "counts": self.counts[: self.number]}

    def load(self, rows: Tensor, counts: Tensor) -> None:
        self.held[: len(rows)], self.counts[: len(rows)] = rows, counts
        self.number = self.last = len(rows)

    def to(self, device: torch.device) -> None:
        self.held, self.counts = self.held.to(device), self.counts.to(device)

    def has_room(self, rows: int) -> bool:
        return self.number + rows <= len(self.held)

    def append(self, x: Tensor, centre: Tensor, unit: Tensor) -> None:
        """Keep batches x, (batches, rows, d)."""
        start, self.number = self.number, self.number + x.shape[0] * x.shape[1]
        torch.addcmul(-centre / unit, x, 1 / unit, out=self.held[start : self.number].view(x.shape))
        self.last = x.shape[1]
        self.unchecked += x.shape[0] * [x.shape[1]]

    def check(self) -> Tensor:
        """Set rows of batches that cannot be used to zero; which of the new batches can be, (batches,).

        Those that can are finite and at most LARGEST long.
        """
        sizes, self.unchecked = self.unchecked, []
        here = slice(self.number - sum(sizes), self.number)
        new = self.held[here]
        squares = torch.linalg.vector_norm(new, dim=1, dtype=torch.float32).square_()
        flags, each, start = [], [], 0
        for size, alike in groupby(sizes):  # runs of batches of the same size
            end = start + sum(alike)
            flags.append(squares[start:end].view(-1, size).sum(dim=1) <= LARGEST**2)
            each.append(flags[-1].repeat_interleave(size))
            start = end
        counts = torch.cat(each)
        wide = new.view(torch.int64) if new.shape[1] % 4 == 0 else new  # four numbers at once
        wide.masked_fill_(~counts[:, None], 0)
        self.counts[here] = counts
        return torch.cat(flags)

    def known(self) -> Tensor:
        return self.held[: self.number]

    def pairs(self) -> Tensor:
        """Rows of z as pairs, (pairs, 2, d)."""
        return self.known().unflatten(0, (-1, 2))

    def some_pairs(self, which: slice) -> tuple[Tensor, Tensor]:
        """Some pairs, in float32, and whether they count, (pairs,)."""
        return self.pairs()[which].float(), self.counts[: self.number : 2][which] > 0

    def sums(self) -> Tensor:
        """Σ y², Σ y and the number of rows, (d, 3)."""
        y = self.known()
        squares, total = _squares(y), _sum(y)
        return torch.stack([squares, total, self.count().expand_as(total)], dim=1)

    def sums_of_pairs(self) -> tuple[Tensor, Tensor]:
        """The same of u = y_a + y_b and of v = y_a − y_b."""
        total_a, total_b = _sum(self.pairs())
        of_v = torch.zeros_like(total_a)
        for a, b in self.pairs().transpose(0, 1).split(DIFFERENCES, dim=1):
            of_v += _squares(a.float() - b)  # in float32, since the trace of C is the difference of both
        of_u = 2 * _squares(self.known()) - of_v
        n = (self.count() / 2).expand_as(total_a)
        u, v = (of_u, total_a + total_b, n), (of_v, total_a - total_b, n)
        return torch.stack(u, dim=1), torch.stack(v, dim=1)

    def add_moments(self, into: Sequence[Tensor]) -> None:
        """Add Σ y yᵀ to one matrix, or Σ u uᵀ and Σ v vᵀ to two, in the blocks on and above the diagonal.

        From products of y, because u and v would be rounded once more.
        """
        y = self.known() if self.held.is_cuda else self.known().float()
        add_product(into[0], y, y)
        if len(into) == 2:
            a, b = y.unflatten(0, (-1, 2)).unbind(1)
            add_product(into[1], a, b)
            add_product(into[1], b, a)
            into[0].add_(into[1])
            into[1].mul_(-2).add_(into[0])

    def times(self, q: Tensor, mean: Tensor, bound: Tensor, crossed: Sequence[bool] = (False,)) -> Tensor:
        """Σ (y − mean)(y − mean)ᵀ q over the rows that count, for several q between −1 and 1, (…, d, columns).

        Arguments:
            bound: a power of two that neither ‖y − mean‖ nor ‖mean‖ exceeds.
            crossed: for each q whether it is Σ (y − mean)(y′ − mean)ᵀ q instead, where y′ is the other view of y.
        """
        y, joined, scale = self.known(), torch.cat(list(q), dim=1), bound * UNIT
        half = self._along(joined, mean, scale, crossed)
        # rows that are left out are zero in y, but not in `half`
        rest = of_halves(self.counts[None, : self.number], half)[0]
        products = of_halves(y.T, half).addr_(mean, rest, alpha=-1).mul_(scale)
        return products.unflatten(1, (len(q), -1)).transpose(0, 1)

    def _along(self, q: Tensor, mean: Tensor, scale: Tensor, crossed: Sequence[bool]) -> Tensor:
        """(y − mean)ᵀ q / scale in float16, (rows, columns), of y′ instead of y in parts of the columns."""
        along = of_halves(self.known(), halved(q, UNIT))
        half = torch.empty(along.shape, dtype=torch.float16, device=along.device)
        shift, factor = -(mean / scale) @ q, UNIT / scale
        parts = (x.chunk(len(crossed), dim=-1) for x in (along, half, shift))
        for x, out, offset, cross in zip(*parts, crossed, strict=True):
            if cross:
                a, b = out.unflatten(0, (-1, 2)).unbind(1)
                views = zip(x.unflatten(0, (-1, 2)).unbind(1), (b, a), strict=True)
            else:
                views = zip((x,), (out,), strict=True)
            for view, place in views:
                torch.addcmul(offset, view, factor, out=place)
        return half

    def count(self) -> Tensor:
        """Number of rows that count."""
        return self.counts[: self.number].sum(dtype=torch.float32)


def _squares(y: Tensor) -> Tensor:
    """Σ y² over rows, (d,)."""
    return torch.linalg.vector_norm(_apart(y), dim=1, dtype=torch.float32).double().square_().sum(dim=0).float()


def _sum(y: Tensor) -> Tensor:
    """Σ y over rows."""
    return _apart(y).sum(dim=1, dtype=torch.float32).double().sum(dim=0).float()


def _apart(y: Tensor) -> Tensor:
    """The rows in parts of equal size, (parts, rows, …); long sums in float32 lose digits."""
    return y.unflatten(0, (math.gcd(len(y), PARTS), -1))
