"""Rows of large embeddings, kept as they are while they take less memory and time than their second moments would.

Only on GPUs, in half precision, and only if all of them are forgotten together (`SpectrumMonitor.reset`).
"""

import torch
from torch import Tensor

from stairwise.monitor.products import UNIT, halved, of_halves, power_of_two

PER_DIMENSION = 1.6  # number of rows that are kept at most


class Rows:
    """The first rows of a window, y = x / unit for x = u or v; those of batches that are left out are zero.

    Attributes:
        held: in float16, (capacity, d).
        counts: 1 for rows that count, 0 for those left out, (capacity,).
        number: of rows so far, known to the host.
    """

    def __init__(self, d: int, device: torch.device) -> None:
        capacity = most_rows(d)
        self.held = torch.empty(capacity, d, dtype=torch.float16, device=device)
        self.counts = torch.empty(capacity, device=device)
        self.number = 0

    def state(self) -> dict[str, Tensor]:
        """Tensors for `load`."""
        return {"rows": self.known(), "counts": self.counts[: self.number]}

    def load(self, rows: Tensor, counts: Tensor) -> None:
        self.held[: len(rows)], self.counts[: len(rows)], self.number = rows, counts, len(rows)

    def to(self, device: torch.device) -> None:
        self.held, self.counts = self.held.to(device), self.counts.to(device)

    def has_room(self, rows: int) -> bool:
        return self.number + rows <= len(self.held)

    def append(self, x: Tensor, usable: Tensor, unit: Tensor) -> None:
        """Keep batches x, (batches, rows, d), those that are not `usable` as zeros."""
        here = slice(self.number, self.number + x.shape[0] * x.shape[1])
        halved(x.flatten(0, 1), unit, out=self.held[here])
        self.counts[here] = usable[:, None].expand(x.shape[:2]).flatten()
        self.number = here.stop

    def known(self) -> Tensor:
        return self.held[: self.number]

    def times(self, q: Tensor, mean: Tensor, longest: Tensor) -> Tensor:
        """Σ (y − mean)(y − mean)ᵀ q over the rows that count, for q between −1 and 1; `longest` bounds ‖y − mean‖."""
        y, counts = self.known(), self.counts[: self.number]
        along = of_halves(y, halved(q, UNIT)).addr_(counts, mean @ q / UNIT, alpha=-1)
        scale = power_of_two(longest) * UNIT
        along = halved(along, scale / UNIT)
        return of_halves(y.T, along).addr_(mean, along.sum(dim=0, dtype=torch.float32), alpha=-1).mul_(scale)


def most_rows(d: int) -> int:
    """How many rows of d dimensions are kept."""
    return int(PER_DIMENSION * d)
