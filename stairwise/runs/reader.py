"""Read a run: its recipe and its records, without torch."""

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

from stairwise.checks import InputError, instance, positive_int
from stairwise.files import regular
from stairwise.runs.folder import METRICS, RECIPE
from stairwise.runs.log import read_log
from stairwise.runs.record import SIZES, Record, spectrum_of_loss

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or not, in a folder written by `stairwise train` or by a monitor.

    Example:
        run = sw.train("photos-bt")  # or sw.Run("runs/photos-bt")
        run.times, run.series("loss"), run.series("eigenvalues")
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(instance(self.folder, "folder", (str, Path))))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Contents of recipe.json: recipe, α, commit, versions, device."""
        path, repair = self.folder / RECIPE, f"stairwise repair {self.folder}"
        try:
            facts = json.loads(regular(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError("run", "must be a folder made by `stairwise train`", self.folder) from None
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            raise InputError(str(path), "must be valid JSON", error, repair) from error
        if not isinstance(facts, dict):
            given = "null" if facts is None else f"a {type(facts).__name__}"
            raise InputError(str(path), "must hold an object, as `stairwise train` writes it", given, repair)
        return facts

    def count(self, name: str, most: int | None = None) -> int:
        """A number of `facts`, such as "steps" or "training_images"."""
        return positive_int(self.facts.get(name), f"{self.folder / RECIPE}: {name}", most, "train the run again")

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The recipe as plain values; `training.recipe.recipe_of` converts it to a Recipe."""
        recipe = self.facts.get("recipe")
        if not isinstance(recipe, dict):
            remedy = f"stairwise repair {self.folder}"
            raise InputError(str(self.folder / RECIPE), "must contain a recipe", recipe, remedy)
        return recipe

    @cached_property
    def log(self) -> tuple[list[Record], int]:
        """Records, and the number of damaged lines, which are skipped."""
        return read_log(self.folder / METRICS)

    @property
    def records(self) -> list[Record]:
        """All measurements, in order."""
        return self.log[0]

    @property
    def followed(self) -> str:
        """The spectrum in which this run takes its steps; "covariance" if the loss is unknown."""
        if not (self.folder / RECIPE).is_file():
            return "covariance"
        return spectrum_of_loss(self.recipe["loss"], self.recipe.get("loss_options"))

    @property
    def times(self) -> Floats:
        """t = Σ lr at every record with a spectrum, (T,)."""
        return self.series("t")

    def series(self, name: str) -> Floats:
        """A quantity at all records that have a spectrum: (T,), or (T, d) for spectra.

        If records hold leading eigenvalues only, it is (T, k), with k as in the record that holds the fewest.
        """
        measured = self._measured
        values = [record.value(name) for record in measured]
        if not measured or values[0] is None:
            known = sorted(measured[0].as_json()) if measured else []
            raise InputError("series", "must have been measured", repr(name), f"measured: {', '.join(known)}")
        if name in SIZES and len({record.size(name) for record in measured}) == 1:
            fewest = min(len(value) for value in values)
            values = [value[:fewest] for value in values]
        return np.array(values, dtype=np.float64)

    def totals(self, name: str) -> Floats:
        """Sum of all eigenvalues of a spectrum at the records of `series`, (T,), also of those not recorded."""
        self.series(name)
        return np.array([record.total(name) for record in self._measured])

    def dimensions(self, name: str) -> int:
        """Number of all eigenvalues of a spectrum, also of those not recorded."""
        self.series(name)
        return self._measured[-1].size(name)

    @property
    def _measured(self) -> list[Record]:
        """Records that have a spectrum."""
        return [r for r in self.records if r.eigenvalues is not None or r.covariance is not None]

    def probes(self, name: str) -> tuple[Floats, Floats]:
        """Times and accuracies of a probe, or times and spectra of `held_out` images."""
        measured = [(record.t, value) for record in self.records if (value := record.value(name)) is not None]
        return np.array([t for t, _ in measured]), np.array([value for _, value in measured])


def consistent(records: Sequence[Record], spectrum: str) -> list[Record]:
    """Records whose spectrum is finite and of the usual number of dimensions, restricted to increasing times.

    All of them hold as many leading eigenvalues as the one that holds the fewest; what is cut off stays in their
    totals. Records of too few pairs (`Record.wanted`) that hold even fewer are left out.
    """
    finite = [record for record in records if record.spectrum(spectrum) is not None]
    sizes = Counter(record.size(spectrum) for record in finite)
    usual = sizes.most_common(1)[0][0] if sizes else 0
    kept = [record for record in finite if record.size(spectrum) == usual]
    lengths = [len(record.value(spectrum)) for record in kept]
    trusted = [length for length, record in zip(lengths, kept, strict=True) if record.wanted is None]
    fewest = min(trusted or lengths, default=0)
    if max(lengths, default=0) > fewest:
        kept = [record.cut(spectrum, fewest) for record in kept if len(record.value(spectrum)) >= fewest]
    return _increasing([record for record in kept if len(record.value(spectrum)) == fewest])


def _increasing(records: list[Record]) -> list[Record]:
    """The longest subsequence of increasing times (patience sorting), so that one wrong time costs one record."""
    tails: list[float] = []
    ends: list[int] = []
    before: list[int] = []
    for i, record in enumerate(records):
        pile = bisect_left(tails, record.t)
        before.append(ends[pile - 1] if pile else -1)
        tails[pile : pile + 1] = [record.t]
        ends[pile : pile + 1] = [i]
    kept, i = [], ends[-1] if ends else -1
    while i >= 0:
        kept.append(records[i])
        i = before[i]
    return kept[::-1]
