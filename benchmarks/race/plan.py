"""Which runs come next: a function of the results so far, so that the race can stop and continue anywhere.

The rules were fixed before the first final run:

1. tune: every method tries four learning rates, spaced by a fixed factor, in short runs. If the best of a baseline
   lies at the edge of its grid, the next one outwards is tried too, at most twice; Muon has no such second chance.
   Where every rate diverges, lower ones are tried until one does not, at most six (a rule that came later, when two
   losses of the appendix had diverged at all six rates that they had).
2. long: the best three baseline trials of a loss (at most two of one method) are repeated with L steps, Muon's best two
   with L/3 steps; settings are then fixed. Both stages train on nine tenths of the training images and are judged by
   a logistic probe on the last tenth.
3. final: five seeds on all training images, judged on the test images. The best baseline with L steps; Muon with L/3
   and L/2, then L/4 and L; then the other baselines with L. Their curves are over views.
4. clock: 300 steps alone on the machine, for seconds per step, of methods without any run that was alone.

Grids were first of five rates; after SimCLR's trials and some of VICReg's they were centred and cut to four.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.race.entrants import BASELINES, METHODS, RACED, RaceRun
from benchmarks.race.store import Result

CLOCK = 300
FIRST, THEN = (3, 2), (4, 1)  # Muon's lengths are L divided by these
EXTENSIONS, RESCUES = 2, 6  # rates beyond an edge of the grid, and below a grid that diverged
SAME = 2  # at most so many of the trials that are repeated with more steps are of one method
MUON = "muon"
STAGES = ("tune", "long", "final", "clock")


@dataclass(frozen=True)
class Rules:
    """The size of a race: L, the steps of a trial, the seeds, and settings that differ from the recipes; only runs of
    these stages are made. `lengths`: Muon's final runs have L divided by these; `kept`: trials that are repeated with
    more steps, of the baselines together and of Muon; if it is one, that trial decides and is not repeated."""

    length: int = 2700
    trial: int = 600
    seeds: int = 5
    data: str = "cifar10"
    losses: tuple[str, ...] = RACED
    methods: tuple[str, ...] = (*BASELINES, MUON)
    start: str = "standard"
    changes: dict[str, Any] = field(default_factory=dict)
    stages: tuple[str, ...] = STAGES
    lengths: tuple[int, ...] = (*FIRST, *THEN)
    kept: tuple[int, int] = (3, 2)

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(m for m in self.methods if not m.startswith(MUON))

    @property
    def fast(self) -> tuple[str, ...]:
        """Muon and its variants."""
        return tuple(m for m in self.methods if m.startswith(MUON))

    def run(self, stage: str, loss: str, method: str, lr: float, steps: int, seed: int = 0) -> RaceRun:
        return RaceRun(stage, self.data, loss, method, lr, steps, seed, self.start)


class Race:
    """The rules applied to the results so far."""

    def __init__(self, rules: Rules, results: dict[str, Result]) -> None:
        self.rules, self.results = rules, results
        self.key = cache(lambda run: run.key(rules.changes))
        self.trials = cache(self._trials)
        self.long_trials = cache(self._long_trials)

    def result(self, run: RaceRun) -> Result | None:
        return self.results.get(self.key(run))

    def score(self, run: RaceRun) -> float | None:
        """Accuracy of the logistic probe at the end; 0 if training diverged, None if it was not run."""
        result = self.result(run)
        if result is None:
            return None
        return result["logistic"][-1] if result["logistic"] and not result["diverged"] else 0.0

    def pending(self) -> list[RaceRun]:
        """All runs that can be started now and have no result, the most important first."""
        wanted = dict.fromkeys(self.wanted())  # the best baseline is wanted twice
        return [run for run in wanted if run.stage in self.rules.stages and self.result(run) is None]

    def wanted(self) -> Iterator[RaceRun]:
        """All runs that the results so far ask for, the most important first."""
        rules = self.rules
        for loss in rules.losses:
            for method in rules.methods:
                yield from self.trials(loss, method)
        for loss in rules.losses:
            yield from self.long_trials(loss, rules.baselines)
            for method in rules.fast:
                yield from self.long_trials(loss, (method,))
        for seed in range(rules.seeds):
            for loss in rules.losses:
                yield from self.finals(loss, self.best_baseline(loss), (1,), seed)
                for method in rules.fast:
                    yield from self.finals(loss, method, FIRST, seed)
        for loss in rules.losses:
            yield from self.clocks(loss)
        for seed in range(rules.seeds):
            for loss in rules.losses:
                for method in rules.fast:
                    yield from self.finals(loss, method, THEN, seed)
        for seed in range(rules.seeds):
            for loss in rules.losses:
                for method in rules.baselines:
                    yield from self.finals(loss, method, (1,), seed)

    # tuning

    def _trials(self, loss: str, method: str) -> list[RaceRun]:
        """Short trials: the grid, what lies beyond an edge that was best, and lower rates if all diverged."""
        rates = list(METHODS[method].rates_for(loss))
        for extra in range(0 if method in self.rules.fast else RESCUES):
            runs = [self.rules.run("tune", loss, method, lr, self.rules.trial) for lr in rates]
            scores = [self.score(run) for run in runs]
            if None in scores or (any(scores) and extra >= EXTENSIONS):
                return runs
            best = max(range(len(rates)), key=lambda i: scores[i] or 0.0)
            if best == len(rates) - 1:
                rates.append(_rounded(rates[-1] ** 2 / rates[-2]))
            elif best == 0:
                rates.insert(0, _rounded(rates[0] ** 2 / rates[1]))
        return [self.rules.run("tune", loss, method, lr, self.rules.trial) for lr in rates]

    def _long_trials(self, loss: str, methods: tuple[str, ...]) -> list[RaceRun]:
        """The best short trials of these methods, with more steps; none before all short trials are done."""
        trials = [run for method in methods for run in self.trials(loss, method)]
        scores = {run: self.score(run) for run in trials}
        if None in scores.values() or not trials:
            return []
        rules, muon = self.rules, methods[0] in self.rules.fast
        kept: list[RaceRun] = []
        for run in sorted(trials, key=lambda r: -(scores[r] or 0.0)):
            if scores[run] and sum(k.method == run.method for k in kept) < SAME:
                kept.append(run)
        if rules.kept[muon] == 1:
            return kept[:1]
        steps = rules.length // FIRST[0] if muon else rules.length
        return [rules.run("long", loss, r.method, r.lr, steps) for r in kept[: rules.kept[muon]]]

    # finals

    def best_baseline(self, loss: str) -> str | None:
        """The method of the best long trial of a baseline; None before all are done."""
        best = self._best(self.long_trials(loss, self.rules.baselines))
        return best.method if best else None

    def chosen_rate(self, loss: str, method: str) -> float | None:
        """The learning rate of the best long trial of a method, or of its best short one if it had no long one."""
        group = (method,) if method in self.rules.fast else self.rules.baselines
        long = self.long_trials(loss, group)
        if not long or any(self.score(run) is None for run in long):
            return None
        best = self._best([run for run in long if run.method == method] or self.trials(loss, method))
        return best.lr if best else None

    def finals(self, loss: str, method: str | None, parts: tuple[int, ...], seed: int) -> Iterator[RaceRun]:
        rate = self.chosen_rate(loss, method) if method in self.rules.methods and method else None
        if method and rate:
            lengths = self.rules.lengths if method in self.rules.fast else (1,)
            for part in (p for p in parts if p in lengths):
                yield self.rules.run("final", loss, method, rate, self.rules.length // part, seed)

    def clocks(self, loss: str) -> Iterator[RaceRun]:
        timed = {r["method"] for r in self.results.values() if r["loss"] == loss and _was_timed(r, self.rules.data)}
        for method in self.rules.methods:
            rate = self.chosen_rate(loss, method)
            if rate and method not in timed:
                yield self.rules.run("clock", loss, method, rate, min(CLOCK, self.rules.length))

    def _best(self, runs: list[RaceRun]) -> RaceRun | None:
        scores = {run: self.score(run) for run in runs}
        if not scores or None in scores.values():
            return None
        best = max(runs, key=lambda run: scores[run] or 0.0)
        return best if scores[best] else None


def _was_timed(result: Result, data: str) -> bool:
    return result["data"] == data and result["alone"] and result["stage"] != "clock" and any(result["seconds"])


def _rounded(lr: float) -> float:
    return float(f"{lr:.3g}")
