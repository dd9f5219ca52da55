"""Table 2: do the three methods learn the same span? Alignment of their embeddings of the same pairs.

    stairwise reproduce table2                    the runs of table1, which it shares
    stairwise reproduce table2 --data cifar10
    stairwise reproduce table2 --smoke            seconds on a CPU, photographs; numbers without meaning

Embeddings of the first 250 of Table 1's pairs, d = 50. Expected: well above chance, d/2n.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.experiments import table1
from stairwise.experiments.experiment import Arrays, Claim, Progress, claims_table
from stairwise.experiments.runs import METHODS, methods_in, runs_table
from stairwise.figures.tangent import draw_matrix
from stairwise.report.page import Page, Picture, Table
from stairwise.theory.spectra import subspace_alignment

SMOKE = table1.SMOKE


@dataclass(frozen=True)
class Config(table1.Config):
    """E9 of the paper."""


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Embeddings of every method."""
    found = table1.compute(config, progress)
    return {name: value for name, value in found.items() if name == "about" or name.endswith(".z")}


def alignments(arrays: Arrays) -> np.ndarray:
    """Method against method, (methods, methods)."""
    z = [arrays[f"{m}.z"].astype(np.float64) for m in methods_in(arrays)]
    return np.array([[subspace_alignment(a, b) for b in z] for a in z])


def check(arrays: Arrays) -> list[Claim]:
    """Above chance."""
    methods, found = methods_in(arrays), alignments(arrays)
    points, d = arrays[f"{methods[0]}.z"].shape
    return [
        Claim(
            f"{METHODS[a]} and {METHODS[b]}",
            found[i, j],
            f"> {1.5 * d / points:.3f}",
            found[i, j] > 1.5 * d / points,
            d / points,
        )
        for (i, a), (j, b) in combinations(enumerate(methods), 2)
    ]


def table(arrays: Arrays) -> Table:
    """Method against method."""
    names = [METHODS[m] for m in methods_in(arrays)]
    rows = [[name, *(f"{v:.3f}" for v in row)] for name, row in zip(names, alignments(arrays), strict=True)]
    return Table("Span of one method's embeddings within another's", ["", *names], rows)


def draw(arrays: Arrays) -> Figure:
    """A matrix."""
    points, d = arrays[f"{methods_in(arrays)[0]}.z"].shape
    return draw_matrix([METHODS[m] for m in methods_in(arrays)], alignments(arrays), d / points)


def page(arrays: Arrays, claims: list[Claim], picture: Path, facts: dict[str, str]) -> Page:
    """The table and its picture."""
    return Page(
        "Do the methods learn the same?",
        "Alignment of the spans of embeddings that different methods give to the same pairs of views; predicted is "
        "chance.",
        [],
        [table(arrays), runs_table(arrays), claims_table(claims)],
        [Picture(picture, "Alignment of embeddings, method against method.")],
        facts,
    )
