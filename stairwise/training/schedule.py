"""Learning rate as a function of the step."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import number, one_of

SCHEDULES = ("constant", "cosine")


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
