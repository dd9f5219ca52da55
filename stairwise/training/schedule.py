"""Learning rate and size of views as functions of the step."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError, number, one_of, shown

SCHEDULES = ("constant", "cosine")
LARGEST_SIDE = 10**5  # pixels


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0 over `warmup` steps, then constant, or half a cosine down to `final` at step `total`.

    This follows the published code of Barlow Twins; `factor(step)` multiplies the learning rate of every group.

    >>> s = Schedule("cosine", total=100, warmup=10, final=0.001)
    >>> [round(s.factor(i), 4) for i in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.5005, 0.001]
    """

    kind: str
    total: int
    warmup: int = 0
    final: float = 0.001

    def __post_init__(self) -> None:
        one_of(self.kind, "schedule", SCHEDULES)
        number(self.final, "final_lr", least=0)

    def factor(self, step: int) -> float:
        """Factor of the base learning rate at step number `step` (from 0)."""
        if step < self.warmup:
            return step / self.warmup
        if self.kind == "constant":
            return 1.0
        share = (step - self.warmup) / max(1, self.total - self.warmup)
        q = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        return q + self.final * (1 - q)

    def times(self, lr: float) -> NDArray[np.float64]:
        """t = Σ lr after every step, (total,), for this base learning rate."""
        return np.asarray(lr * np.cumsum([self.factor(i) for i in range(self.total)]), dtype=np.float64)


class Sizes:
    """Side of views: `sizes` holds [share of the training, pixels], each valid from its share on; none: always `full`.

    Attributes:
        starts, sides: the first step (from 0) of every phase, and the side of its views.

    >>> sizes = Sizes([[0.0, 20], [0.5, 32]], total=100, full=32)
    >>> sizes.at(49), sizes.at(50)
    (20, 32)
    """

    def __init__(self, sizes: list[list[float]], total: int, full: int) -> None:
        phases = {round(share * total): int(side) for share, side in sizes} or {0: full}
        self.starts, self.sides = list(phases), list(phases.values())

    def at(self, step: int) -> int:
        """Side of the views of step number `step` (from 0)."""
        return self.sides[bisect_right(self.starts, step) - 1]


def check_sizes(sizes: list[list[float]], fixed_views: bool = False) -> None:
    """Refuse `sizes` of a recipe that do not say the side of views for all steps, or of views that are drawn once."""
    if sizes and fixed_views:
        raise InputError("sizes", "must be empty with fixed_views", shown(sizes), "set fixed_views=false")
    remedy = "for example [[0.0, 20], [0.5, 32]]"
    for phase in sizes:
        if len(phase) != 2:
            raise InputError("sizes", "must hold pairs of a share of the training and a side", shown(phase), remedy)
        number(phase[0], "a share in sizes", least=0, below=1)
        if phase[1] != int(number(phase[1], "a side in sizes", least=1, most=LARGEST_SIDE)):
            raise InputError("a side in sizes", "must be a whole number", phase[1])
    shares = [share for share, _ in sizes]
    if shares and (shares[0] != 0 or any(late <= early for early, late in pairwise(shares))):
        raise InputError("sizes", "must have shares that begin at 0 and increase", shown(sizes), remedy)
