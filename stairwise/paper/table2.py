"""Table 2: do the three methods learn the same span? Alignment of their embeddings on the same pairs.

    stairwise reproduce table2                    uses the runs of table1
    stairwise reproduce table2 --data cifar10
    stairwise reproduce table2 --smoke            seconds on a CPU, photographs; its numbers mean nothing

Embeddings of the 1000 pairs of Table 1, d = 50. Those of the first 250 are stored, so that the check can be repeated on
them. Expected: well above chance, d/2n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from stairwise.checks import InputError
from stairwise.figures.tangent import draw_matrix
from stairwise.paper import table1
from stairwise.paper.harness import Arrays, Claim
from stairwise.paper.trained import METHODS, about, methods_in, runs_table
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.table import Table
from stairwise.theory.spectra import subspace_alignment

SMOKE = table1.SMOKE
KEPT = 250  # number of pairs whose embeddings are stored
ALT = "Alignment of embeddings, method against method."


@dataclass(frozen=True)
class Config(table1.Config):
    """E9 of the paper."""


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Alignments, and embeddings of the first pairs."""
    if len(set(config.chosen())) < 2:
        raise InputError("methods", "must be at least two, for a comparison", config.methods)
    runs, results = table1.studies(config, progress)
    z = {method: arrays["embeddings"].astype(np.float64) for method, (_, arrays) in results.items()}
    first = np.r_[: min(KEPT, config.n), config.n : config.n + min(KEPT, config.n)]
    # rescaled to fit float16; spans do not depend on the scale
    kept = {f"{m}.z": (v[first] / np.maximum(np.abs(v).max(axis=0), 1e-300)).astype(np.float16) for m, v in z.items()}
    return {**about(runs), **kept, "alignments": _alignments(list(z.values())), "points": 2 * config.n}


def _alignments(z: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([[subspace_alignment(a, b) for b in z] for a in z])


def check(arrays: Arrays) -> list[Claim]:
    methods = methods_in(arrays)
    kept = [arrays[f"{m}.z"].astype(np.float64) for m in methods]
    d = kept[0].shape[1]
    cases = (("", arrays["alignments"], int(arrays["points"])), (", kept pairs", _alignments(kept), len(kept[0])))
    return [
        Claim(
            f"{METHODS[a]} and {METHODS[b]}{which}",
            alignments[i, j],
            f"> {2 * d / points:.3f}, twice chance",
            alignments[i, j] > 2 * d / points,
        )
        for which, alignments, points in cases
        for (i, a), (j, b) in combinations(enumerate(methods), 2)
    ]


def table(arrays: Arrays) -> Table:
    names = [METHODS[m] for m in methods_in(arrays)]
    rows = [[name, *(f"{v:.3f}" for v in row)] for name, row in zip(names, arrays["alignments"], strict=True)]
    return Table("Span of one method's embeddings within another's", ["", *names], rows)


def draw(arrays: Arrays) -> Figure:
    d = arrays[f"{methods_in(arrays)[0]}.z"].shape[1]
    return draw_matrix([METHODS[m] for m in methods_in(arrays)], arrays["alignments"], d / int(arrays["points"]))


def page(arrays: Arrays) -> Page:
    return Page(
        "Do the methods learn the same span?",
        "Alignment of the spans of embeddings by different methods, on the same pairs of views.",
        [],
        [table(arrays), runs_table(arrays)],
    )
