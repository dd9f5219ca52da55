"""Replay the corpus record by record, and count how often the words are right.

    python -m benchmarks.corpus.score [eleventh | tenth | … | first]

Prints, for a part of the corpus (by default the last one; from the tenth on, the quarter whose curves are stored): the
confusion matrix, the shares that are promised with 95 % binomial intervals, stricter shares, false alarms per run, and
the delay until a fault is named; one line of JSON last.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import beta

from benchmarks.corpus.store import CorpusRun, read
from benchmarks.corpus.truth import LATE, Truth, truth
from stairwise.staircase.advice import STATES, Judge

STORED = Path(__file__).parents[2] / "docs" / "results"
NAMES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh")
PARTS = {name: path for name in NAMES if (path := STORED / f"corpus_{name}.npz").exists()}
LAST = list(PARTS)[-1]
# of parts whose curves are not all stored
TRUTHS = {name: path for name in PARTS if (path := STORED / f"corpus_{name}_truth.npz").exists()}
BAD = ("collapsing", "collapsed")
MOSTLY = 0.9  # share of the later records at which a collapse must be named to count as kept
SOON = 0.1  # share of the run within which a collapse must be named, and after which "cannot tell yet" is wrong


@dataclass
class Share:
    """A number of cases out of a total."""

    hits: int = 0
    total: int = 0

    def add(self, hit: bool) -> None:
        self.hits, self.total = self.hits + bool(hit), self.total + 1

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper and Pearson's 95 % interval.

        >>> low, high = Share(0, 300).interval
        >>> low, round(high, 3)
        (0.0, 0.012)
        """
        k, n = self.hits, self.total
        low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
        return low, float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:5.1f} %  ({self.hits} of {self.total}; {100 * low:.1f} to {100 * high:.1f} %)"


@dataclass
class Score:
    """Counts over runs."""

    right: Share = field(default_factory=Share)
    wrong_stops: Share = field(default_factory=Share)
    accused: Share = field(default_factory=Share)
    named: Share = field(default_factory=Share)
    finished: Share = field(default_factory=Share)
    alone: Share = field(default_factory=Share)
    kept: Share = field(default_factory=Share)
    ends: Share = field(default_factory=Share)
    by_run: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {"right": [], "wrong_stops": []})
    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    delays: list[int] = field(default_factory=list)
    alarms: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def replay(run: CorpusRun) -> list[str]:
    """What is said at each record; nothing where the records are not stored."""
    if not len(run.lam):
        return []
    judge = Judge(run.scalars["t"], run.lam, run.level, run.signs())
    return [judge.says(i).state for i in range(len(run.lam))]


def score(
    runs: Sequence[CorpusRun], said: Iterable[Sequence[str]] | None = None, truths: Iterable[Truth] | None = None
) -> Score:
    """Counts over runs; `said` is what is said at each record of each run, and `truths` what is true, if known.

    Runs of which it is not known what is said do not count.
    """
    total = Score()
    said = map(replay, runs) if said is None else said
    for run, words, known in zip(runs, said, map(truth, runs) if truths is None else truths, strict=True):
        if not words:
            continue
        total.kinds[known.kind] += 1
        before = {name: (getattr(total, name).hits, getattr(total, name).total) for name in total.by_run}
        count_records(total, known, words)
        for name, (hits, records) in before.items():
            total.by_run[name].append((getattr(total, name).hits - hits, getattr(total, name).total - records))
        if known.kind != "unknown":
            count_run(total, run, known, words)
    return total


def count_records(total: Score, known: Truth, words: Sequence[str]) -> None:
    for i, (states, word) in enumerate(zip(known.states, words, strict=True)):
        if states is None:
            continue
        right = word in states or (word == "cannot tell yet" and i < SOON * len(words))
        total.right.add(right)
        if len(states) == 1 or states == frozenset(BAD):
            total.alone.add(word in states)
        label = next(iter(states)) if len(states) == 1 else "several are right"
        label = "collapsed" if states == frozenset(BAD) else label
        total.confusion[label, word] += 1
    for later, word in zip(known.later, words, strict=True):
        if later:
            total.wrong_stops.add(word == "finished")


def count_run(total: Score, run: CorpusRun, known: Truth, words: Sequence[str]) -> None:
    n = len(words)
    healthy = n if known.kind in ("healthy", "idle") else round(np.ceil(run.settings["fault_at"] * n))
    healthy = healthy if known.doubtful is None else min(healthy, known.doubtful)
    if healthy and known.kind != "diverged":
        alarms = sum(word in BAD for word in words[:healthy])
        total.accused.add(alarms > 0)
        total.alarms.append(alarms)
        if alarms:
            total.notes.append(f"accused: {run.name}, {alarms} records")
    if known.kind == "collapse" and known.real < n * (1 - SOON):
        _count_collapse(total, run, known, words)
    if known.finished is not None:
        window = words[known.finished : known.finished + round(LATE * n) + 1]
        total.finished.add("finished" in window)
        if "finished" not in window:
            total.notes.append(f"finish not seen: {run.name}, finished at {known.finished}")


def _count_collapse(total: Score, run: CorpusRun, known: Truth, words: Sequence[str]) -> None:
    n, fault = len(words), round(np.ceil(run.settings["fault_at"] * len(words)))
    first = next((i for i in range(max(known.real - round(LATE * n), fault), n) if words[i] in BAD), n)
    due = max(known.real, 3) + SOON * n  # the first three records are too few to tell anything
    total.named.add(first <= due)
    total.delays.append(first - known.real)
    if first > due:
        total.notes.append(f"not named: {run.name} ({run.settings['fault']}), real at {known.real}, named at {first}")
    later = [word in BAD for word in words[int(due) :]]
    total.kept.add(first <= due and float(np.mean(later)) >= MOSTLY)
    total.ends.add(later[-1])
    if first <= due and not later[-1]:
        total.notes.append(f"revoked: {run.name} ({run.settings['fault']}), ends as {words[-1]}")


def resampled(runs: Sequence[tuple[int, int]], rounds: int = 2000) -> tuple[float, float]:
    """95 % interval of a share of records if whole runs are drawn again (bootstrap), of which (hits, total) are given.

    >>> resampled([(1, 2), (1, 2)])
    (0.5, 0.5)
    """
    counts, rng = np.array(runs), np.random.default_rng(0)
    sums = np.array([counts[rng.integers(len(counts), size=len(counts))].sum(axis=0) for _ in range(rounds)])
    low, high = np.quantile(sums[:, 0] / np.maximum(sums[:, 1], 1), [0.025, 0.975])
    return float(low), float(high)


def table(total: Score) -> str:
    """The confusion matrix: what was true in rows, what was said in columns."""
    rows = [*STATES, "several are right"]
    lines = [" " * 18 + "".join(f"{word[:10]:>11}" for word in STATES)]
    for row in rows:
        counts = [total.confusion[row, word] for word in STATES]
        if sum(counts):
            lines.append(f"{row:18}" + "".join(f"{c:11d}" for c in counts))
    return "\n".join(lines)


PROMISES = {
    "state right": "right",
    "finished said although more came": "wrong_stops",
    "healthy runs accused of collapse": "accused",
    "collapses named in time": "named",
    "finishes named in time": "finished",
}
STRICTER = {
    "state right, where only one is right": "alone",
    "collapses named in time, and in 90 % of later records": "kept",
    "collapses named at the last record": "ends",
}


def show(total: Score) -> None:
    """Print all counts."""
    print(table(total))
    print(f"\nruns: {', '.join(f'{v} {k}' for k, v in total.kinds.most_common())}")
    for label, name in (PROMISES | STRICTER).items():
        print(f"{label:54} {getattr(total, name)}")
    if total.delays:
        middle, most = np.quantile(total.delays, [0.5, 0.95])
        print(f"delay until a collapse is named: median {middle:.0f}, 95 % within {most:.0f} records")
    if total.alarms:
        print(f"false alarms per healthy run: {np.mean(total.alarms):.3f} records")
    print(*total.notes, sep="\n")
    print(
        json.dumps(
            {name: [getattr(total, name).hits, getattr(total, name).total] for name in (PROMISES | STRICTER).values()}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default=LAST, choices=PARTS)
    parser.add_argument("--file", type=Path, help="another file of runs")
    choice = parser.parse_args()
    show(score(read(choice.file or PARTS[choice.part])))


if __name__ == "__main__":
    main()
