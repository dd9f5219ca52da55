"""What the headline of a run said, and when: the advice is given again for earlier records."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.advice import Advice
from stairwise.staircase.steps import FEWEST

Floats = NDArray[np.float64]
Memory = dict[tuple[int, int], Advice]  # (number of records, their checksum) → what was said about them
MOST, LEAST = 60, 8  # looks back
EFFORT = 150_000  # eigenvalues per look × looks; more would make the page slow


@dataclass(frozen=True)
class Look:
    """What was said when the run had this many records, the last of them at `step` and `t`."""

    records: int
    step: float
    t: float
    advice: Advice


def look_back(
    t: Floats, step: Floats, spectra: Floats, judge: Callable[[int], Advice], memory: Memory | None = None
) -> list[Look]:
    """What `judge(n)` says about the first n records, for at most `MOST` numbers n, the last of which is all records.

    Half of the looks are evenly spaced; the others halve the gaps in which the state, or else the number of learned
    dimensions, changes. The past does not change, so `memory` holds what was said before: a live page judges only new
    records, and shows all that it has said.
    """
    memory = {} if memory is None else memory
    total, checks = len(t), _checksums(t, spectra)
    seen = {n: advice for (n, check), advice in memory.items() if n <= total and checks[n] == check}

    def look(n: int) -> None:
        if n not in seen:
            seen[n] = memory[n, checks[n]] = judge(n)

    most = int(np.clip(EFFORT // max(1, spectra.size), LEAST, MOST))
    first = min(FEWEST, total)  # before, there is nothing to say
    for n in (first, *(n for n in evenly(total, most // 2) if n > first), total):
        look(n)
    while len(seen) < most and (gap := _widest_change(seen)):
        look(sum(gap) // 2)
    return [Look(n, float(step[n - 1]), float(t[n - 1]), seen[n]) for n in sorted(seen)]


def changes(looks: Iterable[Look]) -> list[Look]:
    """The looks at which the state differs from the one before, and the first."""
    kept: list[Look] = []
    for look in looks:
        if not kept or look.advice.state != kept[-1].advice.state:
            kept.append(look)
    return kept


def evenly(total: int, most: int) -> range:
    """At most `most` multiples of a power of two up to `total`; when a run grows, they are among the earlier ones.

    >>> list(evenly(20, 6)), list(evenly(30, 6))
    ([4, 8, 12, 16, 20], [8, 16, 24])
    """
    stride = 1
    while total // stride > most:
        stride *= 2
    return range(stride, total + 1, stride)


def _widest_change(seen: dict[int, Advice]) -> tuple[int, int] | None:
    """The widest gap between two looks that differ: in their states, or else in the number of learned dimensions."""
    gaps = [(a, b) for a, b in pairwise(sorted(seen)) if b - a > 1]
    by_state = [(a, b) for a, b in gaps if seen[a].state != seen[b].state]
    by_count = [(a, b) for a, b in gaps if seen[a].learned != seen[b].learned]
    return max(by_state or by_count, key=lambda gap: gap[1] - gap[0], default=None)


def _checksums(t: Floats, spectra: Floats) -> list[int]:
    """Checksum of the first n records, for n = 0 to all: memory of another run in the same folder is not used."""
    checks = [0]
    for time, row in zip(t, spectra, strict=True):
        checks.append(crc32(np.append(row, time).tobytes(), checks[-1]))
    return checks
