"""Table 2: do the three methods learn the same span? Alignment of their embeddings on the same pairs.

    stairwise reproduce table2                    uses the runs of table1, which must all be in one folder
    stairwise reproduce table2 --set large=true   Barlow Twins at batch 256 instead of 64
    stairwise reproduce table2 --data cifar10
    stairwise reproduce table2 --smoke            seconds on a CPU, photographs; its numbers mean nothing

Embeddings of three draws of 1000 pairs, those of Table 1, d = 50: one tensor of views for all methods. It reads them
from the studies that `table1` leaves in RUN/ntk, so that runs without their weights can be compared. Mean and standard
deviation are over the draws. Modes that have not grown are whatever they were at initialization, so the grown modes of
one method are also looked for in all modes of the other. Expected: well above chance, d/2n.
"""

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
from stairwise.paper.trained import about, methods_in, runs_table, spread
from stairwise.progress import Progress
from stairwise.report.page import Page
from stairwise.table import Table
from stairwise.theory.spectra import grown, subspace_alignment

SMOKE = table1.SMOKE
ALT = "Alignment of embeddings, method against method."


@dataclass(frozen=True)
class Config(table1.Config):
    """E9 of the paper."""


def compute(config: Config, progress: Progress) -> dict[str, Any]:
    """Alignments of all methods for every draw of pairs, (draws, methods, methods)."""
    if len(set(config.chosen())) < 2:
        raise InputError("methods", "must be at least two, for a comparison", config.methods)
    runs, draws = table1.studies(config, progress)
    found = [compared([kept["embeddings"].astype(np.float64) for _, kept in one.values()]) for one in draws]
    points, d = next(iter(draws[0].values()))[1]["embeddings"].shape
    arrays = {name: np.array([one[name] for one in found]) for name in found[0]}
    return about(runs) | arrays | {"points": np.array(points), "d": np.array(d)}


def compared(z: list[np.ndarray]) -> Arrays:
    """Alignments of spans, the share of the grown modes of one in all of another, (methods, methods), and numbers of
    grown modes."""
    modes = [np.linalg.svd(one, full_matrices=False)[0] for one in z]
    counts = [grown(np.linalg.svd(one - one.mean(axis=0), compute_uv=False) ** 2)[0] for one in z]
    leading = [[subspace_alignment(a[:, :k], b) for b in modes] for a, k in zip(modes, counts, strict=True)]
    alignments = [[subspace_alignment(a, b) for b in modes] for a in modes]
    return {"alignments": np.array(alignments), "grown_in": np.array(leading), "counts": np.array(counts)}


def joined(arrays: Arrays) -> Arrays:
    """The same; refuses alignments of other methods than those that are named."""
    if arrays["alignments"].shape[-1] != len(methods_in(arrays)):
        rule = "cannot add methods to Table 2, which stores alignments but not spans"
        raise InputError(
            "--join", rule, ", ".join(methods_in(arrays)), "put all runs into one folder, and leave it out"
        )
    return arrays


def over_draws(arrays: Arrays, name: str = "alignments") -> np.ndarray:
    """(draws, methods, methods); results of one draw may lack the first axis."""
    values = arrays[name]
    return values if values.ndim == 3 else values[None]


def _dimensions(arrays: Arrays) -> int:
    return int(arrays["d"]) if "d" in arrays else arrays[f"{methods_in(arrays)[0]}.basis"].shape[1]


def check(arrays: Arrays) -> list[Claim]:
    chance = _dimensions(arrays) / int(arrays["points"])
    claims = []
    for (i, a), (j, b) in combinations(enumerate(methods_in(arrays)), 2):
        draws = over_draws(arrays)[:, i, j]
        expected = f"> {2 * chance:.3f}, twice chance" + (", in every draw" if len(draws) > 1 else "")
        text = f"{TITLES[a]} and {TITLES[b]}"
        claims.append(Claim(text, float(draws.mean()), expected, bool((draws > 2 * chance).all())))
        if "grown_in" in arrays:
            for (k, one), (m, other) in (((i, a), (j, b)), ((j, b), (i, a))):
                leading = over_draws(arrays, "grown_in")[:, k, m]
                text = f"grown modes of {TITLES[one]} within {TITLES[other]}"
                claims.append(Claim(text, float(leading.mean()), expected, bool((leading > 2 * chance).all())))
    return claims + _from_bases(arrays)


def _from_bases(arrays: Arrays) -> list[Claim]:
    """The alignments once more, computed from the spans that older results hold, for fewer points."""
    methods = [m for m in methods_in(arrays) if f"{m}.basis" in arrays]
    claims = []
    for a, b in combinations(methods, 2):
        one, other = (arrays[f"{m}.basis"].astype(np.float64) for m in (a, b))
        bar, found = 2 * one.shape[1] / len(one), subspace_alignment(one, other)
        claims.append(
            Claim(f"{TITLES[a]} and {TITLES[b]}, stored bases", found, f"> {bar:.3f}, twice chance", found > bar)
        )
    return claims


def grown_table(arrays: Arrays) -> Table:
    """Empty for results that do not have them."""
    names = [TITLES[m] for m in methods_in(arrays)] if "grown_in" in arrays else []
    counts = arrays["counts"] if names else np.zeros((0, 0))
    rows = [
        [f"{name}, {_range(counts[:, i])} grown", *map(spread, over_draws(arrays, "grown_in")[:, i].T)]
        for i, name in enumerate(names)
    ]
    return Table("Grown modes of one method within all of another", ["", *names], rows)


def _range(counts: np.ndarray) -> str:
    return f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"


def table(arrays: Arrays) -> Table:
    names = [TITLES[m] for m in methods_in(arrays)]
    rows = [[name, *map(spread, over_draws(arrays)[:, i].T)] for i, name in enumerate(names)]
    return Table("Span of one method's embeddings within another's", ["", *names], rows)


def draw(arrays: Arrays) -> Figure:
    names = [TITLES[m] for m in methods_in(arrays)]
    return draw_matrix(names, over_draws(arrays).mean(axis=0), _dimensions(arrays) / int(arrays["points"]))


def page(arrays: Arrays) -> Page:
    return Page(
        "Do the methods learn the same span?",
        "Alignment of the spans of embeddings by different methods, on the same pairs of views.",
        [],
        [one for one in (table(arrays), grown_table(arrays), runs_table(arrays)) if one.rows],
    )
