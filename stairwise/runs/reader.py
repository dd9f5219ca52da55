"""Reading a run: what was asked for and what was measured, without torch."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stairwise.checks import InputError
from stairwise.runs.folder import METRICS, RECIPE
from stairwise.runs.log import read_log
from stairwise.runs.record import Record, spectrum_of_loss

__all__ = ["Run", "consistent"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Run:
    """The folder of a run, finished or not: of `stairwise train`, or one that a monitor writes to.

    Example:
        run = sw.train("photos-bt")  # or sw.Run("runs/photos-bt")
        run.times, run.series("loss"), run.series("eigenvalues")
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """recipe.json: the recipe, the α that was used, commit, versions, device."""
        path = self.folder / RECIPE
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError("run", "must be a folder made by `stairwise train`", self.folder) from None
        except ValueError as error:
            raise InputError(str(path), "must be whole JSON", error) from error
        if not isinstance(facts, dict):
            raise InputError(str(path), "must be as `stairwise train` wrote it", type(facts).__name__)
        return facts

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """What was asked for, as plain values; `training.recipe.recipe_of` makes a Recipe of it."""
        recipe = self.facts.get("recipe")
        if not isinstance(recipe, dict):
            raise InputError(str(self.folder / RECIPE), "must hold a recipe", recipe, "train the run again")
        return recipe

    @cached_property
    def log(self) -> tuple[list[Record], int]:
        """Records, and the number of damaged lines, which are left out."""
        return read_log(self.folder / METRICS)

    @property
    def records(self) -> list[Record]:
        """All measurements, in order."""
        return self.log[0]

    @property
    def followed(self) -> str:
        """The spectrum in which this run takes its steps; "covariance" where the loss is not known."""
        if not (self.folder / RECIPE).is_file():
            return "covariance"
        return spectrum_of_loss(self.recipe["loss"], self.recipe.get("loss_options"))

    @property
    def times(self) -> Floats:
        """t = Σ lr at every record with a spectrum, (T,)."""
        return self.series("t")

    def series(self, name: str) -> Floats:
        """A measured quantity over the records that have a spectrum: (T,), or (T, d) for spectra."""
        measured = [record for record in self.records if record.eigenvalues is not None]
        values = [record.value(name) for record in measured]
        if not measured or values[0] is None:
            known = sorted(measured[0].as_json()) if measured else []
            raise InputError("series", "must have been measured", repr(name), f"measured: {', '.join(known)}")
        return np.array(values, dtype=np.float64)

    def probes(self, name: str) -> tuple[Floats, Floats]:
        """Times and accuracies of a probe, or times and a spectrum of `held_out` images."""
        measured = [(record.t, value) for record in self.records if (value := record.value(name)) is not None]
        return np.array([t for t, _ in measured]), np.array([value for _, value in measured])


def consistent(records: Sequence[Record], spectrum: str) -> list[Record]:
    """Records whose spectrum is finite and of the usual length, in the longest row of increasing times."""
    finite = [record for record in records if record.spectrum(spectrum) is not None]
    lengths = Counter(len(record.value(spectrum)) for record in finite)
    usual = lengths.most_common(1)[0][0] if lengths else 0
    return _increasing([record for record in finite if len(record.value(spectrum)) == usual])


def _increasing(records: list[Record]) -> list[Record]:
    """The longest subsequence of increasing times (patience sorting): one wild time costs one record."""
    tails: list[float] = []
    ends: list[int] = []
    before: list[int] = []
    for i, record in enumerate(records):
        place = bisect_left(tails, record.t)
        before.append(ends[place - 1] if place else -1)
        tails[place : place + 1] = [record.t]
        ends[place : place + 1] = [i]
    kept, i = [], ends[-1] if ends else -1
    while i >= 0:
        kept.append(records[i])
        i = before[i]
    return kept[::-1]
