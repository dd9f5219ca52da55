"""Small and standard initialization in small networks: the pages of Figs. 5 and 7 say what is stored."""

import json

import numpy as np

from benchmarks import bench_starts
from benchmarks.bench_starts import STARTS, together
from stairwise.paper.trained import METHODS
from tests.paper.test_results import RESULTS
from tests.paper.test_small_networks import words_of

ROWS = json.loads((RESULTS / "starts.json").read_text())["runs"]
SEEDS = (6, 7, 8)


def gaps():
    """Points of the logistic probe, standard less small initialization, of every seed."""
    found = {(row["run"], row["seed"]): 100 * row["logistic"] for row in ROWS}
    return {m: np.array([found[f"{m} standard", s] - found[f"{m} small", s] for s in SEEDS]) for m in METHODS}


def test_every_run_is_on_the_pages():
    assert [(row["run"], row["seed"]) for row in ROWS] == [(n, s) for n in bench_starts.NAMES for s in SEEDS]
    for row, cells in zip(ROWS, bench_starts.table(ROWS), strict=True):
        assert f"| {' | '.join(cells[:7])} |" in words_of("fig7")
        if row["run"].endswith(STARTS[0]):
            scored = [cells[0], cells[2], cells[6], str(row["scored"]), *cells[7:]]
            assert f"| {' | '.join(scored)} |" in words_of("fig5")


def test_judged_as_predicted():
    """Three predictions on each page."""
    z, weaker, elsewhere = (together(ROWS, score) for score in ("share", "without_best", "elsewhere"))
    mean = {method: gap.mean() for method, gap in gaps().items()}
    judged = {
        "fig5, 1": all(z[m] >= 4 for m in METHODS),
        "fig5, 2": all(weaker[m] >= 2 for m in METHODS),
        "fig5, 3": all(elsewhere[m] < z[m] / 2 for m in METHODS),
        "fig7, 1": 0 <= mean["bt"] <= 8,
        "fig7, 2": 2 <= mean["vicreg"] <= 10,
        "fig7, 3": -15 <= mean["simclr"] <= 2,
    }
    for name, met in judged.items():
        page, number = name.split(", ")
        section = words_of(page).partition("## Small networks")[2].partition("What came of it")[2]
        assert f"{number}. **{'Met' if met else 'Missed'}" in section, name


def test_what_the_pages_say():
    page = words_of("fig5").partition("## Small networks")[2]
    for score, words in (("share", "z of three seeds together is {}"), ("own", "itself has {}")):
        found = together(ROWS, score)
        numbers = "{:.1f} (Barlow Twins), {:.1f} (SimCLR) and {:.1f} (VICReg)".format(*(found[m] for m in METHODS))
        assert words.format(numbers) in page
    for method, gap in gaps().items():
        single = ", ".join(f"{x:.1f}" for x in gap)
        assert f"{METHODS[method]}: {gap.mean():.1f} points ({single})".replace("-", "−") in words_of("fig7")
    means = "{bt:.1f} (Barlow Twins), {simclr:.1f} (SimCLR) and {vicreg:.1f} points (VICReg)"
    said = means.format(**{method: gap.mean() for method, gap in gaps().items()})
    assert f"three seeds: {said}".replace("-", "−") in words_of("README")
