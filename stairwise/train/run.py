"""A run on disk: what was asked for, what was measured, what was learned."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.monitor.log import read_log
from stairwise.monitor.sinks import METRICS
from stairwise.nets.encoder import Network
from stairwise.train import checkpoint
from stairwise.train.recipe import Recipe
from stairwise.train.schedule import Schedule

__all__ = ["CHECKPOINTS", "RECIPE", "WEIGHTS", "Run"]

RECIPE, CHECKPOINTS, WEIGHTS = "recipe.json", "checkpoints", "weights"
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Run:
    """The folder of a run, finished or not.

    Example:
        run = sw.train("photos-bt")
        run.times, run.series("loss"), run.series("eigenvalues")
    """

    folder: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """recipe.json: the recipe, the α that was used, commit, versions, device."""
        try:
            found: dict[str, Any] = json.loads((self.folder / RECIPE).read_text(encoding="utf-8"))
            return found
        except FileNotFoundError:
            raise InputError("run", "must be a folder made by `stairwise train`", self.folder) from None
        except ValueError as error:
            raise InputError(str(self.folder / RECIPE), "must be whole JSON", error) from error

    @cached_property
    def recipe(self) -> Recipe:
        """What was asked for."""
        if "recipe" not in self.facts:
            raise InputError(str(self.folder / RECIPE), "must hold a recipe", None, "train the run again")
        return Recipe().with_settings(self.facts["recipe"])

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl, line by line; damaged lines are left out."""
        return read_log(self.folder / METRICS)[0]

    @property
    def times(self) -> Floats:
        """t = Σ lr at every record with a spectrum, (T,)."""
        return self.series("t")

    def series(self, name: str) -> Floats:
        """A measured quantity over the records that have a spectrum: (T,), or (T, d) for spectra."""
        measured = [r for r in self.records if "eigenvalues" in r]
        if not measured or name not in measured[0]:
            known = sorted(measured[0]) if measured else []
            raise InputError("series", "must have been measured", repr(name), f"measured: {', '.join(known)}")
        return np.array([r[name] for r in measured], dtype=np.float64)

    def probes(self, name: str) -> tuple[Floats, Floats]:
        """Times and accuracies of a probe, or times and a spectrum of `held_out` images."""
        found = [(r["t"], r[name]) for r in self.records if name in r]
        return np.array([t for t, _ in found]), np.array([a for _, a in found])

    def planned(self) -> Floats:
        """t = Σ lr after every step of the schedule, (steps,)."""
        recipe, steps = self.recipe, int(self.facts["steps"])
        warmup = round(recipe.warmup_epochs * (int(self.facts["training_images"]) // int(self.facts["batch"])))
        schedule = Schedule(recipe.schedule, steps, warmup, recipe.final_lr)
        return np.asarray(recipe.lr * np.cumsum([schedule.factor(i) for i in range(steps)]))

    def network(self) -> Network:
        """The network of the newest checkpoint, in evaluation mode on the CPU."""
        from stairwise.train.loop import rebuild

        state = checkpoint.newest(self.folder / CHECKPOINTS)
        if state is None:
            raise InputError("run", "must have a checkpoint", self.folder, "let it train for a while")
        return rebuild(self.recipe, state)

    def kept(self) -> Iterator[tuple[int, float, Network]]:
        """Step, t and network at every time at which the recipe's `keep` had the weights kept."""
        from stairwise.train.loop import rebuild

        for path in reversed(checkpoint.every(self.folder / WEIGHTS)):
            state = checkpoint.load(path)
            yield state.facts["step"], state.facts["t"], rebuild(self.recipe, state)
