"""What the pages say of small networks, and of untrained ones, is what is stored."""

import json
import re

import numpy as np
import pytest

from benchmarks import bench_byol, bench_initial_kernel, bench_overshoot, first_updates
from benchmarks.rows import keep, replaced, stored_rows
from stairwise.archives import load_arrays
from stairwise.files import save_json
from stairwise.paper.trained import METHODS
from stairwise.staircase.separation import LOW, RISEN, relative_variance, separation
from stairwise.theory import spectra
from tests.paper.test_results import RESULTS

OVERSHOOT = json.loads((RESULTS / "overshoot.json").read_text())["runs"]
STARTS = json.loads((RESULTS / "initial_scale.json").read_text())["networks"]


def words_of(name):
    return (RESULTS / f"{name}.md").read_text(encoding="utf-8").replace("\n", " ")


def overshoot(run, number):
    return [row[number] for row in OVERSHOOT if row["run"] == run and not row.get("diverged")]


def range_of(number, *runs, form=".2f"):
    values = [value for run in runs for value in overshoot(run, number)]
    return f"{min(values):{form}} to {max(values):{form}}"


def test_every_run_of_overshoot_is_on_the_page():
    assert [(row["run"], row["seed"]) for row in OVERSHOOT] == [
        (n, s) for n in bench_overshoot.VARIANTS for s in (3, 4, 5)
    ]
    page = words_of("sharpness")
    for row in bench_overshoot.table(OVERSHOOT):
        assert f"| {' | '.join(row)} |" in page


def test_overshoot_is_judged_as_predicted():
    """The six predictions of sharpness.md, from the stored numbers."""
    gap = {run: np.median(overshoot(run, "gap")) for run in bench_overshoot.VARIANTS if run != "vicreg-sgd"}
    rises = {run: np.array(overshoot(run, "rise")) for run in gap}
    judged = {
        "1, rise": (rises["paper"] >= 1000).sum() >= 2,
        "1, gap": gap["paper"] >= 2 * gap["lars"],
        "2, rise": ((rises["plain"] >= 10) & (rises["plain"] <= 1000)).sum() >= 2,
        "2, gap": gap["lars"] < gap["plain"] < gap["paper"],
        "3, rise": (rises["tenth"] < 30).sum() >= 2,
        "3, gap": abs(gap["tenth"] - gap["lars"]) <= 0.3,
        "4, rise": np.median(rises["warm"]) < 100,
        "4, gap": gap["warm"] <= gap["paper"] / 2,
        "5, rise": (rises["bt-sgd"] >= 1000).all(),
        "5, gap is decided": sum(n >= 3 for n in overshoot("bt-sgd", "rising")) >= 2,
        "5, VICReg": not overshoot("vicreg-sgd", "gap"),
        "6, rise": (rises["fast"] >= 1000).sum() >= 2,
        "6, gap": gap["fast"] >= min(overshoot("paper", "gap") + overshoot("warm", "gap")),
    }
    assert [words for words, met in judged.items() if not met] == ["3, rise", "4, rise", "5, gap is decided"]
    page = words_of("sharpness")
    for run in ("paper", "plain"):
        words = "{:,.0f}, {:,.0f} and {:,.0f}".format(*rises[run])
        assert f"The rises are {words}. The gap is {gap[run]:.2f}" in page
    assert "(38, 22 and 40; two below 30 were predicted), **met** in the gap (0.17)" in page
    assert [f"{x:.0f}" for x in rises["tenth"]] == ["38", "22", "40"]
    assert f"{gap['tenth']:.2f}" == "0.17"
    assert f"and {gap['lars']:.2f} with VICReg's optimizer" in page
    assert "({:,.0f}, {:,.0f} and {:,.0f}; below 100".format(*rises["warm"]) in page
    assert f"**met** in the gap ({gap['warm']:.2f})" in page
    assert f"by {range_of('rise_after_warmup', 'warm', form=',.0f')}" in page
    assert f"**met** in the rise (at least {rises['bt-sgd'].min():,.0f})" in page
    words = "{:,.0f}, {:,.0f} and {:,.0f}".format(*rises["fast"])
    single = range_of("gap", "fast")
    assert f"**Met**: the rises are {words}, and the gap is {gap['fast']:.2f} (single seeds: {single})" in page
    assert f"The gap of {gap['bt-sgd']:.2f} would be {gap['bt-sgd'] / gap['bt']:.1f} times the {gap['bt']:.2f}" in page


def test_what_overshoot_says_of_simclr():
    page, index = words_of("sharpness"), words_of("README")
    lowered, both = ("plain", "tenth"), ("paper", "warm", "fast")
    rise = max(value for run in lowered for value in overshoot(run, "rise_after_warmup"))
    most = max(value for run in lowered for value in overshoot(run, "gap"))
    assert f"rises by {rise:.0f} at most, gaps are at most {most:.2f} decades" in page
    assert f"and {range_of('grown', *lowered, form='d')} modes grow" in page
    least = min(value for run in both for value in overshoot(run, "rise_after_warmup"))
    assert f"rises by {least:,.0f} or more, gaps are {range_of('gap', *both)}" in page
    assert (range_of("grown", *both, form="d"), "and four to eight modes grow" in page) == ("4 to 8", True)
    losses = (range_of("loss", *runs, form=".1f") for runs in (lowered, both, ("lars",)))
    assert "at {} without overshoot and at {} with it. (With VICReg's optimizer it ends at {}".format(*losses) in page
    assert f"has {range_of('gap', 'bt')} after a rise of about 20" in page
    too_large, others = range_of("gap", *both), range_of("gap", *lowered, "lars")
    assert f"too large, and then have gaps of {too_large} decades; if not, {others} |" in index


@pytest.mark.parametrize(("recipe", "page"), [("simclr-small", "(SimCLR)"), ("vicreg-small", "(VICReg)")])
def test_initial_eigenvalues(recipe, page):
    """Three untrained networks per recipe."""
    largest = [row["largest"] for row in STARTS if row["recipe"] == recipe]
    assert len(largest) == 3
    assert f"{short(min(largest))} to {short(max(largest))} {page}" in words_of("stl10")


def short(x):
    """As the pages write it: 5.2e-4."""
    return f"{x:.1e}".replace("e-0", "e-")


def test_alpha_by_the_papers_rule():
    bt = [row["largest"] for row in STARTS if row["recipe"] == "bt-small"]
    assert f"{short(min(bt))} to {short(max(bt))} (Barlow Twins; three seeds each" in words_of("stl10")
    first = {row["recipe"]: row for row in STARTS if row["seed"] == 0}
    names = ("simclr-small", "vicreg-small", "bt-small")
    rule = [f"{first[name]['by_rule']:g}" for name in names]
    papers = [f"{first[name]['alpha']:g}" for name in names]
    assert "α = {}, {} and {} where the paper has {}, {} and {}".format(*rule, *papers) in words_of("stl10")


BYOL = json.loads(str(load_arrays(RESULTS / "byol_small.npz")["rows"]))
SEEDS = 3


def byol(run, number, part="online"):
    found = [row[number] for row in BYOL if (row["run"], row["part"]) == (run, part)]
    assert len(found) == SEEDS
    return np.array(found)


def test_every_run_of_byol_is_on_the_page():
    assert {row["run"] for row in BYOL} == set(bench_byol.NAMES)
    for row in bench_byol.table(BYOL):
        assert f"| {' | '.join(row)} |" in words_of("byol")


def test_byol_is_judged_as_predicted():
    """The four predictions of byol.md, and the two of the longer runs."""
    gap = {run: np.median(byol(run, "gap")) for run in bench_byol.NAMES}
    starts = ("standard", "small")
    judged = {
        "1": (byol("small", "steps") >= 3).sum() >= 2,
        "2": all(gap["small"] < gap[loss] for loss in METHODS),
        "3": gap["standard"] < 0.5,
        "4": all((abs(byol(run, "steps", "target") - byol(run, "steps")) <= 1).all() for run in starts),
        "5": (byol("long", "level") < 4).sum() >= 2,
        "6": gap["long"] < 0.5 and (byol("long", "clean") == 0).sum() >= 2,
    }
    assert {number for number, met in judged.items() if not met} == {"2", "3"}
    page = words_of("byol")
    for number, met in judged.items():
        assert f"| {number} | **{'met' if met else 'missed'}**" in page


def test_what_byol_says():
    page, index = words_of("byol"), words_of("README")
    steps = [byol(run, "steps") for run in ("standard", "small", "long")]
    short = np.concatenate(steps[:2])
    assert f"`detect_steps` finds {short.min()} to {short.max()} [steps]" in page
    gaps = np.concatenate([byol(run, "gap") for run in ("standard", "small", "long")])
    assert f"gaps are {gaps.min():.2f} to {gaps.max():.2f} decades" in page
    said = f"when a mode of the online embeddings rises, the next is {gaps.min():.2f} to {gaps.max():.2f} decades below"
    assert f"{said}, and no step is clean" in index
    assert f"the next is a factor of {10 ** gaps.min():.1f} to {10 ** gaps.max():.1f} below it" in page
    assert not any(byol(run, "clean").any() for run in bench_byol.STARTS)
    assert sum(int((byol(run, "clean", "predictor") == 1).sum()) for run in bench_byol.STARTS) == 5
    assert "five of nine runs have one clean step" in page
    alike = [byol(run, "steps") - byol(run, "steps", "target") for run in ("standard", "small")]
    assert sorted(np.concatenate(alike)) == [0, 0, 0, 0, 0, 1]
    assert "in 5 runs of six, and one fewer in the other" in page
    loss = load_arrays(RESULTS / "byol_small.npz")["small-1.loss"]
    assert (f"{loss.min():.1f}", f"{loss[loss.argmin() :].max():.1f}") == ("0.5", "1.4")
    for run in ("small", "long"):
        level = byol(run, "level")
        assert f"{level.min():.3g} to {level.max():.3g} times" in page
    others = np.concatenate([byol(loss, "level") for loss in METHODS])
    assert f"(the other losses: {others.min():.1f} to {others.max():.1f})" in page
    assert f"and {steps[2].min()} to {steps[2].max()} in the longer runs" in page
    assert f"{byol('long', 'grown').min()} to {byol('long', 'grown').max()} modes have [grown]" in page


def test_the_kernel_at_initialization():
    """Judged for the seeds that had not been seen."""
    rows = json.loads((RESULTS / "initial_kernel.json").read_text())["runs"]
    assert [row["seed"] for row in rows] == [1, 2, 3]
    page = (RESULTS.parent / "ntk.md").read_text(encoding="utf-8")
    for cells in bench_initial_kernel.table(rows):
        assert f"| {' | '.join(cells)} |" in page
    updated, plain = ([bench_initial_kernel.ratios(row, kind) for row in rows] for kind in ("updated", "as it is"))
    new = np.concatenate(updated[1:])
    assert new.min() < 10, "the first prediction is missed"
    assert f"{new.min():.1f} to {new.max():.0f} times too early" in page
    assert f"differ by up to {max(r.max() / r.min() for r in updated[1:]):.1f}" in page
    early, never = np.concatenate(updated), 1 / np.concatenate(plain)
    said = f"{early.min():.1f} to {early.max():.0f} times too early, if batch norms have seen data first; if not, "
    assert f"{said}{never.min():.0f} to {never.max():,.0f} times too late" in words_of("README")
    late = 1 / np.concatenate(plain[1:])
    assert late.min() >= 1000, "the second one is met"
    assert [word for word in ("missed", "met") for _ in range(page.count(f" is **{word}**"))] == [
        "missed",
        "met",
        "met",
    ]
    assert "**Measured.** 1 is **missed**" in page
    assert "{:,d} to {:,d} times too late".format(*(int(float(f"{x:.2g}")) for x in (late.min(), late.max()))) in page
    assert max(abs(row["updated"]["share"] - row["as it is"]["share"]) for row in rows[1:]) < 0.0015
    every = np.concatenate(updated)
    assert f"predicted {every.min():.1f} to {every.max():.0f} times too early" in words_of("README")


def test_first_updates_of_the_papers_network():
    """Predicted: SimCLR overshoots where updates are large, and nowhere else; and what the page says of it."""
    rows = json.loads((RESULTS / "first_updates.json").read_text())["runs"]
    assert [row["run"] for row in rows] == list(first_updates.VARIANTS)
    assert all(row["updates"] == list(range(40)) for row in rows)
    rise = {row["run"]: max(row["rise"]) for row in rows}
    assert min(rise["paper"], rise["fast"]) >= 1000
    assert max(rise["plain"], rise["tenth"]) <= rise["paper"] / 100
    page = words_of("sharpness")
    for cells in first_updates.table(rows):
        assert f"| {' | '.join(cells)} |" in page
    said = "largest variance rises by {:,.0f} and the loss.* at 5 and no momentum it rises by {:,.0f}; "
    said += "after two updates it is {:,.0f}. Without momentum it rises by {:.0f}, .* tenth of the rate by {:.1f}; "
    second = next(row["rise"][2] for row in rows if row["run"] == "fast")
    assert re.search(said.format(rise["paper"], rise["fast"], second, rise["plain"], rise["tenth"]), page)
    loss = {row["run"]: np.array(row["loss"]) for row in rows}
    assert abs(loss["paper"][2:] - np.log(511)).max() < 1e-3, "stays at ln 511"
    for run in ("plain", "tenth"):
        assert loss[run][:12].mean() > 6.2 > loss[run][20:].max(), "it falls after the first dozen"
    assert f"to {loss['plain'][-1]:.2f} and {loss['tenth'][-1]:.2f}." in page
    assert f"a factor of {rise['plain']:.0f} instead of {rise['paper']:,.0f}, at a tenth" in words_of("stl10")


def test_small_eigenvalues_are_no_rounding_errors():
    """Of a small network, down to about 1e-8 of the largest; and of SimCLR's run, how many are above that."""
    facts, log = json.loads((RESULTS / "rounding.json").read_text()), words_of("../log")
    least = facts["smallest over largest"]
    said = "by {:.1g} % and {:.1g} % at most, down to {:.1e}".replace("e-08", "e-8")
    errors = [100 * facts[f"largest relative error, {kind}"] for kind in ("bf16", "float32")]
    assert said.format(*errors, least).replace("e-08", "e-8") in log
    lam = load_arrays(RESULTS / "fig3.npz")["simclr-covariance.last"].astype(float)
    assert round((lam[8:] / lam[0] > 1e-8).mean(), 2) == 0.73, "three quarters, says the log"


@pytest.mark.parametrize("cut", [1e-3, 1e-4, 1e-7, 1e-11])
def test_what_is_cut_off_does_not_change_how_many_modes_of_simclr_have_grown(monkeypatch, cut):
    monkeypatch.setattr(spectra, "WAITING", cut)
    lam = load_arrays(RESULTS / "fig3.npz")["simclr-covariance.last"].astype(float)
    assert (spectra.grown(lam)[0], round(spectra.bimodality(lam), 2)) == (8, 1.0)
    assert "does not matter for this (1e-3 to 1e-11 of the largest)" in words_of("fig3")


@pytest.mark.parametrize(
    ("spectrum", "factor"), [("bt-normalized", 5.7), ("bt-eigenvalues", 1.1), ("vicreg-covariance", 1.3)]
)
def test_a_few_at_a_time(spectrum, factor):
    every = load_arrays(RESULTS / "fig3.npz")[f"{spectrum}.every"].astype(float)
    assert round(10 ** separation(every[:, 0], relative_variance(every[:, 1:])).gap, 1) == factor
    for page in ("fig3", "README"):
        assert re.search(rf"\b{factor}\b", words_of(page))
    gap = separation(every[:, 0], relative_variance(every[:, 1:])).gap
    assert spectrum != "bt-normalized" or f"{gap:.2f} for Barlow Twins (0.60 if" in words_of("sharpness")


def test_rows_of_other_runs_are_kept(tmp_path):
    assert stored_rows(None) == stored_rows(tmp_path / "none.json") == []
    old = [{"run": "a", "seed": 0, "x": 1}, {"run": "a", "seed": 1, "x": 2}, {"run": "b", "seed": 0, "x": 3}]
    save_json(tmp_path / "rows.json", {"runs": old})
    new = [{"run": "a", "seed": 1, "part": part, "x": 4} for part in "pq"]
    assert replaced(stored_rows(tmp_path / "rows.json"), new, ["b", "a"]) == [old[2], old[0], *new]
    keep(old, new[0], ["b", "a"], tmp_path / "rows.json")
    assert stored_rows(tmp_path / "rows.json") == [old[2], old[0], new[0]]


@pytest.mark.parametrize(
    ("spectrum", "said"),
    [
        ("bt-normalized", "{:.1f} in the mean and {} at most for Barlow Twins (C after batch norm"),
        ("bt-eigenvalues", "; {:.1f} and {} in C)"),
        ("vicreg-covariance", "{:.1f} and {} for VICReg"),
    ],
)
def test_how_many_modes_are_on_their_way(spectrum, said):
    stored = load_arrays(RESULTS / "fig3.npz")
    t, lam = (stored[f"{spectrum}.{key}"].astype(float) for key in ("t", "lam"))
    x = relative_variance(lam)[t > t[-1] / 20]
    between = ((x > LOW) & (x < RISEN)).sum(axis=1)
    assert said.format(between.mean(), between.max()) in words_of("fig3")
    if spectrum != "bt-eigenvalues":
        assert f"{between.mean():.1f} of {'512' if spectrum[0] == 'b' else '128'}" in words_of("README")


def test_how_far_simclrs_upper_band_is_above_the_rest():
    spectra_at = load_arrays(RESULTS / "fig4.npz")["simclr.lam"].astype(float)
    factors = [lam[count - 1] / lam[count] for lam in spectra_at for count in [spectra.grown(lam)[0]]]
    said = f"a factor of {factors[-1]:,.0f} above the rest"
    assert f"{said} at the end, and of {min(factors[:-1]):.0f} or more before" in words_of("fig4")
    assert said in words_of("fig3")
    last = load_arrays(RESULTS / "fig3.npz")["simclr-covariance.every"][-20:, 8:10].astype(float)
    ratios = last[:, 0] / last[:, 1]
    assert f"({ratios.min():,.0f} to {ratios.max():,.0f} in the last 20 records)" in words_of("fig3")
    about = f"a factor of about {round(factors[-1], -4):,.0f}"
    assert f"{about} above the rest" in words_of("README")
    assert about in (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
