"""Table 2: do the three methods learn the same span? Alignment of their embeddings on the same pairs.

    stairwise reproduce table2                    uses the runs of table1
    stairwise reproduce table2 --data cifar10
    stairwise reproduce table2 --set methods=vicreg --set alone=true    one method; --store FOLDER --join adds it
    stairwise reproduce table2 --smoke            seconds on a CPU, photographs; its numbers mean nothing

Embeddings of the 1000 pairs of Table 1, d = 50, the same views for all methods. Orthonormal bases of their spans are
stored in few bits, leading modes first, so that methods trained at different times can be compared. The spread is a
jackknife's over ten groups of pairs. Modes that have not grown are whatever they were at initialization, so the grown
modes of one method are also looked for in all modes of the other. Expected: well above chance, d/2n.
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
from stairwise.paper.table1 import TITLES
from stairwise.paper.trained import about, methods_in, runs_table
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.table import Table
from stairwise.theory.spectra import grown, subspace_alignment

SMOKE = table1.SMOKE
GROUPS = 10
LEVELS = 40  # of an entry of a stored basis, to each side of zero: alignments change by a thousandth of their value
ALT = "Alignment of embeddings, method against method."


@dataclass(frozen=True)
class Config(table1.Config):
    """E9 of the paper; alone: take a single method, to be joined with others."""

    alone: bool = False


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Bases of the spans of all methods, and their alignments."""
    if not config.alone and len(set(config.chosen())) < 2:
        raise InputError("methods", "must be at least two, for a comparison", config.methods, "or set alone=true")
    runs, results = table1.studies(config, progress)
    arrays: dict[str, Any] = about(runs)
    for method, (_, kept) in results.items():
        arrays |= _stored_basis(method, kept["embeddings"].astype(np.float64))
    return arrays | joined(arrays)


def _stored_basis(method: str, z: np.ndarray) -> dict[str, Any]:
    """An orthonormal basis of the span, leading modes first, rounded; and the number of grown modes."""
    U = np.linalg.svd(z, full_matrices=False)[0]
    count = grown(np.linalg.svd(z - z.mean(axis=0), compute_uv=False) ** 2)[0]
    rounded = (LEVELS * U / np.abs(U).max(axis=0)).round().astype(np.int8)
    return {f"{method}.basis": rounded, f"{method}.count": np.array(count)}


def _bases(arrays: Arrays) -> list[np.ndarray]:
    return [arrays[f"{m}.basis"].astype(np.float64) for m in methods_in(arrays)]


def joined(arrays: Arrays) -> Arrays:
    """Alignments of all methods, their jackknife spread, and shares of the grown modes of one in all of another."""
    bases = _bases(arrays)
    if len({len(one) for one in bases}) > 1:
        sizes = ", ".join(f"{m} {len(one) // 2}" for m, one in zip(methods_in(arrays), bases, strict=True))
        raise InputError("n", "must be the same for all methods", sizes, "study them on the same pairs")
    counts = [int(arrays[f"{m}.count"]) for m in methods_in(arrays)]
    leading = [[subspace_alignment(a[:, :k], b) for b in bases] for a, k in zip(bases, counts, strict=True)]
    found = {"alignments": _alignments(bases), "spread": _spread(bases), "grown_in": np.array(leading)}
    return found | {"points": np.array(len(bases[0]))}


def _alignments(z: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([[subspace_alignment(a, b) for b in z] for a in z])


def _spread(bases: Sequence[np.ndarray]) -> np.ndarray:
    """Standard errors by leaving out one tenth of the pairs at a time."""
    n = len(bases[0]) // 2
    groups = np.arange(n) * GROUPS // n
    kept = [np.flatnonzero(np.tile(groups != g, 2)) for g in range(GROUPS)]
    draws = np.array([_alignments([one[rows] for one in bases]) for rows in kept])
    return np.asarray(np.sqrt((GROUPS - 1) * draws.var(axis=0)))


def check(arrays: Arrays) -> list[Claim]:
    methods, kept = methods_in(arrays), _bases(arrays)
    d = kept[0].shape[1]
    cases = (("", arrays["alignments"], int(arrays["points"])), (", stored bases", _alignments(kept), len(kept[0])))
    return [
        Claim(
            f"{TITLES[a]} and {TITLES[b]}{which}",
            alignments[i, j],
            f"> {2 * d / points:.3f}, twice chance",
            alignments[i, j] > 2 * d / points,
        )
        for which, alignments, points in cases
        for (i, a), (j, b) in combinations(enumerate(methods), 2)
    ] or [Claim.note(f"{TITLES[methods[0]]}: grown modes", int(arrays[f"{methods[0]}.count"]))]


def grown_table(arrays: Arrays) -> Table:
    """Empty for results that do not have them."""
    names = [TITLES[m] for m in methods_in(arrays)] if "grown_in" in arrays else []
    rows = [
        [f"{name}, {int(arrays[f'{m}.count'])} grown", *(f"{v:.3f}" for v in row)]
        for name, m, row in zip(names, methods_in(arrays), arrays.get("grown_in", ()), strict=False)
    ]
    return Table("Grown modes of one method within all of another", ["", *names], rows)


def table(arrays: Arrays) -> Table:
    names, values = [TITLES[m] for m in methods_in(arrays)], arrays["alignments"]
    errors = arrays.get("spread", np.full(values.shape, np.nan))
    texts = [
        [f"{v:.3f}" if np.isnan(e) else f"{v:.3f} ± {e:.3f}" for v, e in zip(*row, strict=True)]
        for row in zip(values, errors, strict=True)
    ]
    rows = [[name, *row] for name, row in zip(names, texts, strict=True)]
    return Table("Span of one method's embeddings within another's", ["", *names], rows)


def draw(arrays: Arrays) -> Figure:
    names = [TITLES[m] for m in methods_in(arrays)]
    d = arrays[f"{methods_in(arrays)[0]}.basis"].shape[1]
    return draw_matrix(names, arrays["alignments"], d / int(arrays["points"]))


def page(arrays: Arrays) -> Page:
    return Page(
        "Do the methods learn the same span?",
        "Alignment of the spans of embeddings by different methods, on the same pairs of views.",
        [],
        [table(arrays), grown_table(arrays), runs_table(arrays)],
    )
