"""What the results of the race say: groups of seeds, and how much sooner Muon arrives."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.race.entrants import BASELINES
from benchmarks.race.store import Result


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only."""

    data: str
    loss: str
    method: str
    lr: float
    steps: int
    runs: tuple[Result, ...]

    @property
    def views(self) -> int:
        return 2 * int(self.runs[0]["batch"]) * self.steps

    @property
    def diverged(self) -> int:
        return sum(bool(run["diverged"]) for run in self.runs)

    def ends(self, name: str) -> np.ndarray:
        """The last value of every run that did not diverge."""
        return np.array([run[name][-1] for run in self.runs if not run["diverged"] and run.get(name)], dtype=float)

    def mean(self, name: str = "logistic") -> float:
        """Mean over the seeds; 0 if one of them diverged, so that an unstable setting cannot win."""
        return 0.0 if self.diverged or not len(self.ends(name)) else float(self.ends(name).mean())

    def words(self, name: str = "logistic") -> str:
        """Mean ± standard deviation of an accuracy, in percent."""
        values = 100 * self.ends(name)
        if self.diverged or not len(values):
            return f"{self.diverged} of {len(self.runs)} diverged"
        return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def groups(results: Iterable[Result], stage: str = "final", start: str = "standard") -> list[Group]:
    """Results of a stage, by loss, method, learning rate and length."""
    found: dict[tuple[str, str, str, float, int], list[Result]] = {}
    for run in results:
        if run["stage"] == stage and run["start"] == start:
            found.setdefault((run["data"], run["loss"], run["method"], run["lr"], run["steps"]), []).append(run)
    return [Group(*about, tuple(sorted(runs, key=lambda run: run["seed"]))) for about, runs in sorted(found.items())]


@dataclass(frozen=True)
class Verdict:
    """The best baseline of a loss, Muon's shortest length that is as good on average, and what that saves.

    `views` and `seconds` are Muon's share of the baseline's; `shortest` is None if no length of Muon is as good,
    `seconds` if no run was alone on the machine. `below` is Muon's longest length that is not as good.
    """

    baseline: Group
    shortest: Group | None
    below: Group | None
    seconds: float | None

    @property
    def views(self) -> float | None:
        return None if self.shortest is None else self.shortest.views / self.baseline.views


def verdict(results: dict[str, Result], data: str, loss: str, seeds: int = 5) -> Verdict | None:
    """None before baseline and Muon have their seeds. The best baseline is the best on the test images, which is not
    easier to beat than the one that was chosen on held-out images."""
    full = [g for g in groups(results.values()) if (g.data, g.loss) == (data, loss) and len(g.runs) >= seeds]
    longest = max((g.steps for g in full if g.method in BASELINES), default=0)
    baselines = [g for g in full if g.method in BASELINES and g.steps == longest]
    muon = sorted((g for g in full if g.method == "muon"), key=lambda g: g.steps)
    if not baselines or not muon:
        return None
    best = max(baselines, key=Group.mean)
    good = [g for g in muon if g.mean() >= best.mean()]
    shortest = good[0] if good else None
    below = [g for g in muon if g.mean() < best.mean() and (shortest is None or g.steps < shortest.steps)]
    seconds = None
    if shortest is not None:
        times = [seconds_per_step(results, data, loss, g.method) for g in (shortest, best)]
        if times[0] and times[1]:
            seconds = times[0] * shortest.steps / (times[1] * best.steps)
    return Verdict(best, shortest, below[-1] if below else None, seconds)


def seconds_per_step(results: dict[str, Result], data: str, loss: str, method: str) -> float | None:
    """Median over the runs that had the machine to themselves; None if there is none."""
    times = [
        run["seconds"][-1] / run["step"][-1]
        for run in results.values()
        if run["alone"] and (run["data"], run["loss"], run["method"]) == (data, loss, method)
        if run["step"] and run["seconds"][-1]
    ]
    return float(np.median(times)) if times else None


def at_equal_modes(slow: Group, fast: Group) -> list[tuple[int, float, float]]:
    """Number of modes in use, and accuracy of two methods with that many, along the runs of their first seeds.

    The slow one is interpolated between its checkpoints, and only where it has had that many modes.
    """
    first, other = fast.runs[0], slow.runs[0]
    if first["diverged"] or other["diverged"] or len(other["grown"]) < 2:
        return []
    order = np.argsort(other["grown"], kind="stable")
    modes, scores = np.array(other["grown"])[order], np.array(other["logistic"])[order]
    return [
        (count, float(np.interp(count, modes, scores)), score)
        for count, score in zip(first["grown"], first["logistic"], strict=True)
        if modes[0] <= count <= modes[-1]
    ]
