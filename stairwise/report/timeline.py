"""What the headline of a run said, and when: every record is judged as if it were the newest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stairwise.staircase.advice import Advice, Judge

Floats = NDArray[np.float64]
MOST = 400  # looks back
BRIEF = 2  # a state that is said at fewer looks in a row is not listed, unless it is an alarm
ALARMS = ("finished", "collapsing", "collapsed", "diverged")


@dataclass(frozen=True)
class Look:
    """What was said when the run had this many records, the last of them at `step` and `t`."""

    records: int
    step: float
    t: float
    advice: Advice


def look_back(judge: Judge, step: Floats, now: Advice) -> list[Look]:
    """What is said of every record, or of `MOST` of them at equal distances; of the last one, `now`."""
    total = len(judge.times)
    numbers = np.unique(np.linspace(0, total - 1, min(total, MOST)).round().astype(int))
    looks = [Look(i + 1, float(step[i]), float(judge.times[i]), _first_words(judge.says(i))) for i in numbers[:-1]]
    return [*looks, Look(total, float(step[-1]), float(judge.times[-1]), now)]


def _first_words(advice: Advice) -> Advice:
    """The advice without its outlook, which would need a forecast for every record."""
    return replace(advice, evidence=advice.evidence[:1])


def changes(looks: Sequence[Look]) -> list[Look]:
    """The looks at which the state differs from the one before, and the first; brief states are left out."""
    starts = [i for i, look in enumerate(looks) if i == 0 or look.advice.state != looks[i - 1].advice.state]
    lengths = np.diff([*starts, len(looks)])
    kept: list[Look] = []
    for i, length in zip(starts, lengths, strict=True):
        state = looks[i].advice.state
        last = i + length == len(looks)
        if (length >= BRIEF or state in ALARMS or last or i == 0) and (not kept or state != kept[-1].advice.state):
            kept.append(looks[i])
    return kept
