"""Predictions that were written before the runs are judged by the code of their figures, from the data."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from stairwise.archives import load_arrays
from stairwise.paper import byol, fig1cd, fig2cf, fig7
from stairwise.paper.harness import Claim, run
from stairwise.staircase.separation import relative_variance, separation
from stairwise.theory.spectra import grown
from stairwise.training.recipe import load_recipe
from stairwise.training.setup import Calendar
from tests.paper.test_figures import invented

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = (RESULTS / "predictions.md").read_text(encoding="utf-8")
PREDICTED = PAGE.partition("### Before the runs")[2].partition("### Added later")[0]


def modes(count):
    """Growth rates of a run in which so many modes grow and ten do not."""
    return np.concatenate([1 / np.linspace(1, 9, count), np.full(10, 1e-4)])


def predicted(claims):
    return {claim.text: claim.holds for claim in claims if claim.text.endswith("predicted")}


def row(name):
    (line,) = (line for line in PREDICTED.splitlines() if line.startswith(f"| `{name}`"))
    return line


@pytest.mark.parametrize("kind", ["x4", "x8"])
def test_the_code_judges_what_the_page_says(kind):
    says = row(f"stl10-bt-small-{kind}")
    low, high = fig1cd.PREDICTED[kind]
    assert f"{low} to {high} grown modes" in says
    bounds = [100 * x for x in fig7.PREDICTED["bt", kind]]
    assert ("{:g} to {:g} points below".format(*bounds) if len(bounds) == 2 else "no gap") in says
    assert {"`fig1cd`", "`fig7`"} <= set(re.findall(r"`fig\w+`", says))


def test_the_gap_of_vicreg_is_what_the_page_says():
    low, high = (100 * x for x in fig7.PREDICTED["vicreg", "small"])
    assert f"the logistic probe is {low:g} to {high:g} points lower from small initialization" in PAGE


def test_later_predictions_are_what_the_page_says():
    says = PAGE.partition("**2026-11-19, after the runs")[2]
    steps, modes_of_simclr = fig2cf.STEPS["vicreg"], fig2cf.GROWN["simclr-x4"]
    vicreg, simclr = ([100 * x for x in fig7.LATER[pair]] for pair in (("vicreg", "small"), ("simclr", "x4")))
    assert "at its end: {} to {} steps".format(*steps) in says
    assert "{} to {} grown modes".format(*modes_of_simclr) in says
    assert "{:g} to {:g} points below `stl10-vicreg`".format(*vicreg) in says
    assert "`stl10-simclr` ends {:g} to {:g} points *below*".format(*(-x for x in reversed(simclr))) in says
    assert f"at least {['no', 'one', 'two', 'three'][byol.PREDICTED]} steps" in says
    page = (RESULTS / "fig7.md").read_text(encoding="utf-8")
    ends = {kind: load_arrays(RESULTS / "fig7.npz")[f"bt.{kind}.accuracy"][-1] for kind in ("standard", "x4")}
    apart = ends["standard"] - ends["x4"]
    assert fig7.LATER["bt", "plain"] == pytest.approx((apart - 0.015, apart + 0.015), abs=5e-4)
    assert f"within 1.5 points of {100 * ends['x4']:.1f} %, the start is not the reason" in page


@pytest.mark.parametrize(("end", "holds"), [(0.554, False), (0.57, True), (0.60, False)])
def test_the_control_of_the_start(end, holds):
    claims = fig7.check(probes("bt", {"standard": 0.624, "plain": end}))
    assert [(claim.judged, claim.holds) for claim in claims] == [(False, True), (True, holds)]
    small, plain = (load_recipe(f"stl10-bt{kind}").plain() for kind in ("-small-x4", "-plain-x4"))
    assert {key for key in plain if plain[key] != small[key]} == {"label", "alpha", "keep", "follow"}


def test_the_gap_that_byol_is_compared_with_is_the_least_of_stored_runs():
    gaps = []
    for figure, key in (("fig1cd", "covariance"), ("fig2cf", "simclr"), ("fig2cf", "vicreg")):
        every = load_arrays(RESULTS / f"{figure}.npz")[f"{key}.every"].astype(float)
        gaps.append(separation(every[:, 0], relative_variance(every[:, 1:])).gap)
    assert min(gaps) == gaps[0] == pytest.approx(byol.OTHERS, abs=0.006)


@pytest.mark.parametrize(
    ("gaps", "steps", "holds"),
    [([0.2, 0.9, 0.3], 3, [True, True]), ([1.0, 1.1, 0.3], 2, [False, False]), ([0.1, 0.2], 3, [True, False])],
)
def test_what_is_predicted_of_byol(gaps, steps, holds):
    arrays = {"about": np.array(json.dumps({"small": {"steps": 100, "data": "stl10", "seed": 0}}))}
    for part in byol.PARTS:
        arrays |= {f"small.{part}.gaps": np.array(gaps), f"small.{part}.steps": np.zeros(steps)}
    claims = [claim for claim in byol.check(arrays) if claim.judged]
    assert [claim.holds for claim in claims] == holds
    arrays["about"] = np.array(json.dumps({"small": {"steps": 100, "reached": 50, "data": "stl10", "seed": 0}}))
    assert not [claim for claim in byol.check(arrays) if claim.judged], "not before its end"


def test_five_steps_are_what_the_page_says():
    assert fig2cf.PREDICTED == 5
    assert "at least five steps each" in row("stl10-simclr-small")
    assert '"no gap" means at most 0.6 points' in PAGE.replace("\n", " ")


def test_what_is_expected_of_simclr_comes_from_stored_runs():
    ends = []
    for file in ("staircases", "forecasts", "forecasts_new"):
        stored = load_arrays(RESULTS / f"{file}.npz")
        names = [
            name.removesuffix(".times") for name in stored if name.startswith("simclr") and name.endswith(".times")
        ]
        ends += [(stored[f"{name}.times"][-1], grown(stored[f"{name}.spectra"][-1])[0]) for name in names]
    t, counts = zip(*ends, strict=True)
    says = f"{len(ends)} runs from small initialization ended with {min(counts)} to {max(counts)} grown modes"
    assert says in PAGE
    assert f"at t from {min(t):.0f} to {max(t):.0f}" in PAGE
    recipe = load_recipe("stl10-simclr-d50")
    calendar = Calendar(recipe, recipe.pretrain, recipe.batch)
    assert f"It now has lr {recipe.lr:g}, so that t is {calendar.total * recipe.lr:g}." in PAGE


@pytest.mark.parametrize(("count", "holds"), [(16, False), (17, True), (19, True), (20, False)])
def test_grown_modes_at_four_times_the_rate(tmp_path, count, holds):
    invented(tmp_path / "runs" / "stl10-bt-small-x4", "stl10-bt-small-x4", modes(count))
    result = run("fig1cd", tmp_path, {"runs": str(tmp_path / "runs"), "only": "x4"})
    assert predicted(result.claims) == {"four times the rate: grown modes of C, predicted": holds}
    recorded = json.loads((result.folder / "check.json").read_text())["claims"]
    assert predicted([Claim(**one) for one in recorded]) == predicted(result.claims)


@pytest.mark.parametrize(
    ("kind", "gap", "holds"),
    [
        ("x4", 0.005, False),
        ("x4", 0.006, True),
        ("x4", 0.025, True),
        ("x4", 0.026, False),
        ("x8", -0.02, True),
        ("x8", 0.006, True),
        ("x8", 0.007, False),
    ],
)
def test_gaps_at_higher_rates(kind, gap, holds):
    arrays = probes("bt", {"standard": 0.624, kind: 0.624 - gap})
    claims = fig7.check(arrays)
    assert list(predicted(claims).values()) == [holds]
    assert len(claims) == 2, "the bar of 5 points stays"
    assert predicted(fig7.check(probes("bt", {kind: 0.6}))) == {}, "there is nothing to compare with"


def probes(method, at_end, **about):
    """Arrays of Fig. 7: accuracies at half and at the end of each run."""
    arrays = {
        "about": np.array(
            json.dumps(
                {
                    f"{method} {kind}": {"steps": 100, "data": "stl10", "seed": 0} | about.get(kind, {})
                    for kind in at_end
                }
            )
        )
    }
    for kind, accuracy in at_end.items():
        arrays |= {f"{method}.{kind}.accuracy": np.array([accuracy - 0.1, accuracy])}
        arrays |= {f"{method}.{kind}.progress": np.array([0.5, 1.0])}
    return arrays


def test_what_was_predicted_for_stl10_is_not_asked_of_other_images():
    ends = {"standard": 0.66, "small": 0.62}
    assert len([c for c in fig7.check(probes("vicreg", ends)) if "predicted" in c.text]) == 2
    for other in ({"data": "cifar10"}, {"seed": 1}):
        (claim,) = fig7.check(probes("vicreg", ends, standard=other, small=other))
        assert "predicted" not in claim.text


@pytest.mark.parametrize(
    ("gap", "holds"), [(0.0, True), (0.049, True), (0.051, False), (-0.049, True), (-0.051, False)]
)
def test_a_few_percent_are_meant_either_way(gap, holds):
    other = {"seed": 1}
    (claim,) = fig7.check(probes("vicreg", {"standard": 0.65, "small": 0.65 - gap}, standard=other, small=other))
    assert claim.holds == holds


@pytest.mark.parametrize(
    ("reached", "count", "judged"), [(10, 2, []), (10, 4, [True]), (10, 6, [True] * 2), (90, 2, [])]
)
def test_steps_of_a_run_that_has_not_ended_are_judged_once_there_are_enough(tmp_path, reached, count, judged):
    invented(tmp_path / "runs" / "stl10-vicreg-small", "stl10-vicreg-small", modes(count))
    arrays = run("fig2cf", tmp_path, {"runs": str(tmp_path / "runs"), "methods": "vicreg"}).arrays
    about = json.loads(str(arrays["about"]))
    about["vicreg"]["reached"] = reached
    claims = fig2cf.check(arrays | {"about": np.array(json.dumps(about))})
    assert [claim.holds for claim in claims if claim.judged] == judged
    assert all(claim.holds for claim in claims)


def test_runs_that_have_not_ended_are_compared_where_both_have_been():
    arrays = probes("vicreg", {"standard": 0.66, "small": 0.62}, standard={"reached": 45})
    arrays |= {"vicreg.standard.accuracy": np.array([0.6, 0.63]), "vicreg.standard.progress": np.array([0.2, 0.4])}
    arrays |= {"vicreg.small.accuracy": np.array([0.5, 0.61, 0.7]), "vicreg.small.progress": np.array([0.2, 0.4, 0.6])}
    (claim,) = fig7.check(arrays)
    assert claim.text == "VICReg: standard less small, after 40 % of the training"
    assert claim.measured == pytest.approx(0.02)
    assert claim.holds
    assert not predicted([claim]), "what was predicted is judged at the end"


@pytest.mark.parametrize(("count", "holds"), [(4, False), (7, True)])
def test_steps_on_stl10(tmp_path, count, holds):
    for method in ("simclr", "vicreg"):
        rates = np.concatenate([1 / 1.5 ** np.arange(count), np.full(10, 1e-4)])
        invented(tmp_path / "runs" / f"stl10-{method}-small", f"stl10-{method}-small", rates)
    result = run("fig2cf", tmp_path, {"runs": str(tmp_path / "runs")})
    assert predicted(result.claims) == {f"steps of {name}, predicted": holds for name in ("SimCLR", "VICReg")}
    assert all(claim.holds for claim in result.claims if "predicted" not in claim.text), "four steps are enough here"
