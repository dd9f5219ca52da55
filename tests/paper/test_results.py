"""The stored results in docs/results agree with their pages."""

import json
import re
import shutil
import tomllib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom

import stairwise as sw
from benchmarks import bench_coming, bench_spectral
from benchmarks.bench_forecast import score
from benchmarks.corpus.score import Share
from stairwise.archives import load_arrays
from stairwise.figures.style import style
from stairwise.figures.training import Course, draw_courses
from stairwise.ntk.coming import KERNELS, TANGENT
from stairwise.paper import batch, byol, coming, fig1cd, fig2ab, fig3, fig4, fig5, fig7, table1, table2, width
from stairwise.paper.harness import CATALOG, LARGEST, Claim, from_stored, stored_names
from stairwise.paper.trained import METHODS, RATES, steps_of, steps_table
from stairwise.staircase.noise import carried_by
from stairwise.staircase.separation import relative_variance, separation
from stairwise.theory.spectra import grown
from stairwise.training.recipe import load_recipe
from stairwise.training.setup import Calendar
from tests.command_lines import stairwise

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAPER = tomllib.loads((RESULTS / "paper_values.toml").read_text(encoding="utf-8"))
PLACES = [RESULTS, *sorted(p for p in RESULTS.iterdir() if p.is_dir() and not p.name.startswith("seed"))]  # by data
STORED = [pytest.param(p, n, id=n if p == RESULTS else f"{p.name}:{n}") for p in PLACES for n in stored_names(p)]
SHARED = {"table1": "tables", "table2": "tables", "coming": "tables"}  # pages of several results
LOSSES = {"barlow_twins": "C", "simclr": "Cov z", "vicreg": "Cov z"}
NAMES = {"barlow_twins": "Barlow Twins", "simclr": "SimCLR", "vicreg": "VICReg"}
CLEAN = {"barlow_twins": (18, 16), "simclr": (7, 7), "vicreg": (6, 6)}  # of two seeds, as the page says
PAGE = (RESULTS / "staircases.md").read_text(encoding="utf-8")


def clean_steps(spectra):
    """Number of modes that rise from below 1 % to half of their plateau while the next one is below 10 % of its own."""
    count = 0
    for j in range(spectra.shape[1] - 1):
        plateau = np.median(spectra[:, j][spectra[:, j] > 0.2 * spectra[:, j].max()])
        if plateau < 0.1 * np.median(spectra[-20:, 0]):
            break
        at = int(np.argmax(spectra[:, j] > plateau / 2))
        if spectra[: at + 1, j].min() < 0.01 * plateau and spectra[at, j + 1] < 0.1 * spectra[at, j]:
            count += 1
    return count


def stored_run(loss, seed):
    of_resnet50 = {"stl10": "", **{f"stl10, {words}": f"{kind} " for kind, words in RATES.items()}}
    if loss in of_resnet50:
        every = load_arrays(RESULTS / "fig1cd.npz")[f"{of_resnet50[loss]}C.every"].astype(float)
        return every[:, 0], every[:, 1:]
    stored = load_arrays(RESULTS / "staircases.npz")
    name = loss if seed == 0 else f"{loss}.seed{seed}"
    return stored[f"{name}.times"].astype(float), stored[f"{name}.spectra"].astype(float)


@pytest.mark.parametrize("loss", LOSSES)
def test_staircases_on_cifar10(loss):
    assert tuple(clean_steps(stored_run(loss, seed)[1]) for seed in (0, 1)) == CLEAN[loss]
    assert f" | {CLEAN[loss][0]} | {CLEAN[loss][1]} | " in PAGE


@pytest.mark.parametrize(
    ("loss", "seed", "row"),
    [
        ("barlow_twins", 0, "29 | 21 % | 83 %"),
        ("vicreg", 0, "5 | 6 % | 60 %"),
        ("barlow_twins", 1, "29 | 13 % | 79 %"),
        ("vicreg", 1, "5 | 15 % | 80 %"),
        ("simclr", 0, "6 | 20 % | 83 %"),
        ("simclr", 1, "6 | 21 % | 83 %"),
        ("stl10", 0, "7 | 22 % | 100 %"),
        ("stl10, twice the rate", 0, "10 | 19 % | 80 %"),
        ("stl10, four times the rate", 0, "10 | 59 % | 50 %"),
        ("stl10, eight times the rate", 0, "9 | 25 % | 67 %"),
    ],
)
def test_forecasts_of_real_networks(loss, seed, row):
    errors, inside = forecasts_of(*stored_run(loss, seed), followed=LOSSES.get(loss, "C"))
    found = f"{len(errors)} | {100 * np.median(errors):.0f} % | {100 * np.mean(inside):.0f} %"
    assert found == row
    assert f"| {row} |" in PAGE


def test_forecasts_at_high_rates_judged_by_crossings():
    kinds = ("stl10", *(f"stl10, {words}" for words in RATES.values()))
    scores = [score(*stored_run(kind, 0), fitted=False) for kind in kinds]
    off, hold = ([f"{100 * f(one[i]):.0f}" for one in scores] for i, f in enumerate((np.median, np.mean)))
    assert f"median errors are {off[2]} and {off[3]} %, and {hold[2]} and {hold[3]} % hold" in PAGE
    assert f"(in the two slower runs {off[0]} and {off[1]} %, and {hold[0]} and {hold[1]} %)" in PAGE


def forecasts_of(t, lam, followed):
    """Forecasts made when a mode reaches a hundredth of its plateau: errors relative to the time left; do they hold?"""
    return score(t, lam, 1.0 if followed == "C" else None)


@pytest.mark.parametrize("loss", [*LOSSES, "stl10"])
def test_forecasts_of_each_loss_meet_the_goal(loss):
    """Both runs together: the median error is at most 25 % of the time left, and 80 % intervals hold 70 to 90 %."""
    runs = [("stl10", 0), ("stl10, twice the rate", 0)] if loss == "stl10" else [(loss, 0), (loss, 1)]
    scores = [forecasts_of(*stored_run(*run), followed=LOSSES.get(loss, "C")) for run in runs]
    errors, inside = (np.concatenate(parts) for parts in zip(*scores, strict=True))
    assert np.median(errors) <= 0.25
    assert 0.7 <= np.mean(inside) <= 0.9
    row = f"{len(errors)} | {100 * np.median(errors):.0f} % | {100 * np.mean(inside):.0f} %"
    assert f"| {row} |" in PAGE
    assert f"| {row} |" in (RESULTS.parent / "staircase.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["forecasts", "forecasts_new"])
@pytest.mark.parametrize("loss", LOSSES)
def test_forecasts_of_more_networks(loss, file):
    """As the page says, and each loss meets the goal."""
    stored = load_arrays(RESULTS / f"{file}.npz")
    names = sorted(key.removesuffix(".times") for key in stored if key.startswith(loss) and key.endswith(".times"))
    arrays = ((stored[f"{name}.{key}"].astype(float) for key in ("times", "spectra")) for name in names)
    scores = [forecasts_of(*run, followed=LOSSES[loss]) for run in arrays]
    errors, inside = (np.concatenate(parts) for parts in zip(*scores, strict=True))
    found = f"{len(names)} | {len(errors)} | {100 * np.median(errors):.0f} % | {100 * np.mean(inside):.0f} %"
    assert f"| {found} |" in PAGE
    assert np.median(errors) <= 0.25
    assert 0.7 <= np.mean(inside) <= 0.9


def test_the_ten_new_runs_one_by_one():
    """Of each run, and intervals of each loss: Clopper and Pearson's for shares, order statistics for medians."""
    stored = load_arrays(RESULTS / "forecasts_new.npz")
    pools = {}
    for name in sorted(key.removesuffix(".times") for key in stored if key.endswith(".times")):
        loss = name.split(".")[0]
        errors, inside = score(*(stored[f"{name}.{k}"].astype(float) for k in ("times", "spectra")), level_of(loss))
        pools.setdefault(loss, ([], []))[0].extend(errors)
        pools[loss][1].extend(inside)
        if errors:
            assert f"{name} {100 * np.median(errors):.0f} % ({sum(inside)} of {len(inside)} hold)" in PAGE
        else:
            assert f"{name} has no step to forecast" in PAGE
    for loss, (errors, inside) in pools.items():
        low, high = (100 * x for x in Share(sum(inside), len(inside)).interval)
        first, last = (int(k) for k in binom.ppf([0.025, 0.975], len(errors), 0.5))
        ends = 100 * np.sort(errors)[[max(first - 1, 0), min(last, len(errors) - 1)]]
        assert f"{NAMES[loss]} {ends[0]:.0f} to {ends[1]:.0f} % and {low:.0f} to {high:.0f} %" in PAGE


def level_of(loss):
    return 1.0 if LOSSES[loss] == "C" else None


def test_forecasts_from_the_covariance_are_worse():
    """As the page says."""
    stored = load_arrays(RESULTS / "fig1cd.npz")
    runs = (stored[f"{kind}covariance.every"].astype(float) for kind in ("", "fast "))
    scores = [forecasts_of(every[:, 0], every[:, 1:], followed="Cov z") for every in runs]
    errors, inside = (np.concatenate(parts) for parts in zip(*scores, strict=True))
    found = f"the median error is {100 * np.median(errors):.0f} %, and the intervals hold {100 * np.mean(inside):.0f} %"
    assert found in PAGE


def crossings(every):
    """When each mode first passes one half, linear between records."""
    t, lam = every[:, 0], every[:, 1:]
    first = [int(np.argmax(mode > 0.5)) for mode in lam.T if (mode > 0.5).any()]
    return np.array([np.interp(0.5, lam[[i - 1, i], j], t[[i - 1, i]]) for j, i in enumerate(first)])


def named(claim, words, place):
    """Whether a page names a claim: *claim*, or *claim* (cifar10) for results in docs/results/cifar10."""
    other = "|".join(rf" \({re.escape(p.name)}\)" for p in PLACES[1:])
    end = f"(?!{other})" if place == RESULTS else rf" \({re.escape(place.name)}\)"
    return re.search(rf"\*{re.escape(claim.text)}\*{end}", words) is not None


@pytest.mark.parametrize(("place", "name"), STORED)
def test_stored_claims_hold_and_figures_are_drawn_again(place, name, tmp_path):
    result = from_stored(name, tmp_path, place)
    page = RESULTS / f"{SHARED.get(name, name)}.md"
    words = page.read_text(encoding="utf-8").replace("\n", " ") if page.is_file() else ""
    for claim in result.claims:
        assert named(claim, words, place) != claim.holds, "what does not hold is named on the figure's page"
    on_page = [from_stored(name, tmp_path, other) for other in PLACES if name in stored_names(other)]
    assert ("**Does not agree" in words) != all(one.holds for one in on_page) or name in SHARED
    assert "**Does not agree" in words or result.holds
    assert (result.folder / "figure.png").stat().st_size > 20_000
    assert (place / f"{name}.npz").stat().st_size <= LARGEST
    assert (place / f"{name}.png").is_file()


def test_claims_are_named_by_place():
    claim, cifar = Claim.note("theory", 0.1), RESULTS / "cifar10"
    assert cifar in PLACES
    assert named(claim, "it misses *theory*, as", RESULTS)
    assert not named(claim, "it misses *theory* (cifar10), as", RESULTS)
    assert named(claim, "it misses *theory* (cifar10), as", cifar)
    assert not named(claim, "it misses *theory*, as", cifar)


@pytest.mark.parametrize(
    ("name", "module"), [("fig1cd", fig1cd), ("fig3", fig3), ("fig4", fig4), ("fig5", fig5), ("fig7", fig7)]
)
def test_numbers_on_the_pages_of_the_stl10_runs(name, module):
    arrays = load_arrays(RESULTS / f"{name}.npz")
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8").replace("\n", " ")
    if name == "fig1cd":
        (ratio, matched), (fast, more) = (fig1cd.sharper(arrays, f"{r}C", f"{r}covariance") for r in ("", "fast "))
        assert f"rise time in C is {ratio:.2f} times that in the covariance" in page
        assert f"at twice the rate {fast:.2f} times." in page
        assert (matched, more) == (5, 5), "the page says five"
        assert all(arrays[f"{r}C.grown"][0] - arrays[f"{r}covariance.grown"][0] == 1 for r in ("", "fast "))
        rows = steps_table(arrays, {"C": "C", "fast C": "C, twice the rate"}).rows
        assert len(rows) == 9 + 13
        passed = {kind: crossings(arrays[f"{kind}C.every"].astype(float)) for kind in ("", "fast ", "x4 ", "x8 ")}
        late = []
        for kind in ("x4 ", "x8 "):
            assert ", ".join(f"{t:.0f}" for t in passed[kind]) in page
            late.append(max(steps_of(arrays, f"{kind}C").times[:12] - passed[kind]))
        assert "places some of them late, by up to {:.0f} and {:.0f}".format(*late) in page
        ninth = [f"{times[8]:,.0f}" for times in passed.values()]
        assert f"the ninth mode passes ½ at {', '.join(ninth[:3])} and {ninth[3]}" in page
        counts = [arrays[f"{kind}C.grown"][0] for kind in ("", "x8 ")]
        assert (
            f"from 9 to 20 modes in eight times the t it is t^{np.log(counts[1] / counts[0]) / np.log(8):.2f}" in page
        )
        for run, steps, next_one in (("C", 9, 0.005), ("fast C", 13, 0.02)):
            lam = arrays[f"{run}.lam"]
            passed = [int(np.argmax(lam[:, j] > 0.5)) for j in range(steps)]
            assert max(lam[i, j + 1] for j, i in enumerate(passed)) < next_one
    elif name == "fig7":
        rows = []
        kinds = ("standard", "small", "fast")
        at_end = [100 * float(arrays[f"bt.{kind}.accuracy"][-1]) for kind in kinds]
        modes = [arrays[f"bt.{kind}.grown"] for kind in kinds]
        ends = "{1} have grown where the standard run has {0}, and {2} at twice the rate"
        assert ends.format(*(m[-1] for m in modes)) in page
        assert "{:.1f} % against {:.1f} %, {:.1f} points".format(*at_end[:2], at_end[0] - at_end[1]) in page
        assert f"{at_end[2]:.1f} %, {at_end[0] - at_end[2]:.1f} points less" in page
        pairs = [
            100 * abs(slow - fast)
            for k, slow in zip(modes[1], arrays["bt.small.accuracy"], strict=True)
            for m, fast in zip(modes[2], arrays["bt.fast.accuracy"], strict=True)
            if k == m
        ]
        assert f"they differ by {max(pairs):.1f} points at most" in page
        twelve = 100 * arrays["bt.fast.accuracy"][modes[2] == 12]
        assert f"from {twelve[0]:.1f} to {twelve.max():.1f} % while twelve modes have grown" in page
        ends = [100 * arrays[f"bt.{kind}.accuracy"][-1] for kind in ("fast", "x4", "x8")]
        assert "{:.1f}, {:.1f} and {:.1f} % at two, four and eight times the rate".format(*ends) in page
        fifteen = [100 * arrays[f"bt.{kind}.accuracy"][arrays[f"bt.{kind}.grown"] == 15] for kind in ("x8", "x4")]
        text = "at eight times the rate 15 modes go with {} %, at four times with {} %"
        assert text.format(*(f"{found.min():.1f} to {found.max():.1f}" for found in fifteen)) in page
        for method, small in (("vicreg", "small"), ("simclr", "x4")):
            standard, small = (
                [100 * arrays[f"{method}.{kind}.accuracy"], arrays[f"{method}.{kind}.grown"]]
                for kind in ("standard", small)
            )
            lower = standard[0] - small[0]
            assert f"is {lower[-1]:.1f} points lower ({standard[0][-1]:.1f} against {small[0][-1]:.1f} %)" in page
            assert f"with {small[1][-1]} grown modes where the standard run has {standard[1][-1]}" in page
            assert f"the difference is between {lower.min():.1f} and {lower.max():.1f} points" in page
        then = load_arrays(RESULTS / "fig2cf.npz")
        lam = then["simclr.lam"][np.searchsorted(then["simclr.t"], 112)].astype(float)  # after 11,200 updates at 0.01
        counts = grown(lam)[0], standard[1][-1]
        assert "it had {} modes, the standard run {}. (".format(*counts) in page
        index, howto = (
            (RESULTS / name).read_text(encoding="utf-8") for name in ("README.md", "../howto/which-learning-rate.md")
        )
        assert "SimCLR: {} and {} modes after as many updates".format(*counts) in index
        assert f"updates; {counts[0]} in 11,200 |" in howto
        four = small[0][small[1] == 4]
        assert f"{four[0]:.1f} to {four[-1]:.1f} % while four modes have grown" in page
        early = 100 * float(arrays["bt.standard.accuracy"][0])
        assert f"{modes[0][0]} modes after a twentieth of the training, with {early:.1f} %" in page
    else:
        rows = module.table(arrays).rows
    if name == "fig5":
        rows += fig5.events_table(arrays).rows
        held = [np.median(np.nanmean(fig5.along(arrays, m).around()[1][:, :9], axis=1)) for m in ("bt-x4", "bt-x8")]
        assert held == pytest.approx([1 / 3, 1 / 2], abs=0.02), "a third to a half, says the page"
        few, many = (steps_of(arrays, f"{m}.h").rise_times for m in ("bt", "bt-fast"))
        assert (len(few), len(many)) == (4, 8)
        assert f"rise times of {few.min():.0f} to {few.max():.0f}, and eight in the second" in page
        assert f"{many.min():.0f} to {many.max():.0f}, where the embeddings' are 3 to 17" in page
    for row in rows:
        assert "| " + " | ".join(row) + " |" in page


def test_numbers_on_the_page_of_simclr_on_stl10():
    arrays = load_arrays(RESULTS / "fig2cf.npz")
    page = (RESULTS / "fig2cf.md").read_text(encoding="utf-8").replace("\n", " ")
    for row in steps_table(arrays, {"simclr": "SimCLR"}).rows:
        assert "| " + " | ".join(row) + " |" in page
    assert arrays["simclr.grown"][0] == 13, "thirteen in all"
    every = arrays["simclr.every"].astype(float)
    t, lam = every[:, 0], every[:, 1:]
    x = lam / ((lam**2).sum(axis=1) / lam.sum(axis=1))[:, None]
    passed = [int(np.argmax(x[:, j] > 0.5)) for j in range(11)]
    assert t[passed[3]] < 21
    assert max(x[passed[j], j + 1] for j in range(3, 11)) < 0.003
    errors, inside = forecasts_of(t, lam, followed="Cov z")
    row = f"{len(errors)} | {100 * np.median(errors):.0f} % | {100 * np.mean(inside):.0f} %"
    assert f"| SimCLR, ResNet-50 on STL-10 | {row} |" in PAGE
    assert f"with a median error of {100 * np.median(errors):.0f} % of the remaining time; six of eight" in page


def test_numbers_on_the_page_of_vicreg_on_stl10():
    arrays = load_arrays(RESULTS / "fig2cf.npz")
    page = (RESULTS / "fig2cf.md").read_text(encoding="utf-8").replace("\n", " ")
    rows = steps_table(arrays, {"vicreg": "VICReg"}).rows
    assert [row[1] for row in rows] == [str(mode) for mode in range(1, 15)], "fourteen, one for each mode"
    assert all("| " + " | ".join(row) + " |" in page for row in rows)
    assert arrays["vicreg.grown"][0] == 14
    every = arrays["vicreg.every"].astype(float)
    t, lam = every[:, 0], every[:, 1:]
    x = lam / ((lam**2).sum(axis=1) / lam.sum(axis=1))[:, None]
    following = {j + 1: x[int(np.argmax(x[:, j] > 0.5)), j + 1] for j in range(1, 11)}
    assert max(value for mode, value in following.items() if mode != 10) < 0.105, "at most 0.10, says the page"
    assert f"after mode 10 (mode 11: {following[10]:.2f})" in page
    again = {j + 1: np.flatnonzero((x[1:, j] > 0.5) & (x[:-1, j] <= 0.5)) + 1 for j in range(1, 11)}
    assert [mode for mode, rows in again.items() if len(rows) > 1] == [7, 8, 9, 10, 11]
    last = {mode: x[rows[-1], mode] for mode, rows in again.items()}
    said = "at {7:.2f} for mode 7, {10:.2f} for mode 10, {8:.2f} for mode 8, and below 0.07 for modes 9 and 11"
    assert said.format(*(last.get(mode) for mode in range(12))) in page
    assert max(last[9], last[11]) < 0.07
    errors, inside = forecasts_of(t, lam, followed="Cov z")
    assert (len(errors), sum(inside), len(inside)) == (10, 6, 10)
    assert f"ten modes with a median error of {100 * np.median(errors):.0f} %, and six of ten intervals hold" in page
    row = f"{len(errors)} | {100 * np.median(errors):.0f} % | {100 * np.mean(inside):.0f} %"
    assert f"| VICReg, ResNet-50 on STL-10 | {row} |" in PAGE


def test_numbers_on_the_page_of_simclr_at_four_times_the_rate():
    arrays = load_arrays(RESULTS / "fig2cf.npz")
    page = (RESULTS / "fig2cf.md").read_text(encoding="utf-8").replace("\n", " ")
    rows = steps_table(arrays, {"simclr-x4": "SimCLR, four times the rate"}).rows
    assert (len(rows), arrays["simclr-x4.grown"][0]) == (3, 4), "three steps and four grown modes"
    assert all("| " + " | ".join(row) + " |" in page for row in rows)
    fast, slow = (arrays[f"{run}.every"].astype(float) for run in ("simclr-x4", "simclr"))
    longest = fast[fast[:, 1].argmax()]
    assert f"rises to {float(f'{longest[1]:.3g}'):,.0f} by t = {longest[0]:.0f}" in page
    assert slow[:, 1].max() < 70
    assert 1900 < fast[-1, 4] < fast[-1, 1] < 2500, "near 2000"
    assert round(slow[-1, 1], 1) == 1.3
    errors, inside = forecasts_of(fast[:, 0], fast[:, 1:], followed="Cov z")
    assert (len(errors), sum(inside), sum(np.isinf(errors))) == (3, 0, 2), "as the page says"


def test_numbers_on_the_page_of_byol_on_stl10():
    arrays = load_arrays(RESULTS / "byol.npz")
    page = (RESULTS / "byol.md").read_text(encoding="utf-8").replace("\n", " ")
    for row in byol.table(arrays).rows:
        assert "| " + " | ".join(row) + " |" in page
    assert all(len(arrays[f"{kind}.{part}.gaps"]) == 1 for kind in ("small", "standard") for part in byol.PARTS)
    level = [lam[0] / lam[3] for lam in (arrays[f"{kind}.z"][-1] for kind in ("small", "standard"))]
    assert "is {:.1f} (small initialization) and {:.1f} times (standard) the fourth".format(*level) in page
    others = [
        lam[1] / lam[4] for lam in (load_arrays(RESULTS / "fig2cf.npz")[f"{m}.every"][-1] for m in ("simclr", "vicreg"))
    ]
    assert "(SimCLR and VICReg from small initialization: {:.2f} and {:.2f}.)".format(*others) in page
    facts = []
    for kind in ("small", "standard"):
        t, loss = arrays[f"{kind}.t"], arrays[f"{kind}.loss"]
        first = int(loss[: len(t) // 4].argmin())
        second = first + int(loss[first:].argmax())
        facts.append((loss[first], t[first], loss[second], t[second], loss[-1]))
    assert "to {:.2f} at t = {:.0f} (small initialization), rises to {:.2f} at t = {:.0f}".format(*facts[0][:4]) in page
    said = "it falls to {:.2f}, rises to {:.2f}, and is {:.2f} at the end"
    assert said.format(*(facts[1][i] for i in (0, 2, 4))) in page
    assert f"the first variance is {arrays['small.z'][-1, 0]:.3f} at the end" in page


def test_numbers_on_the_page_of_simclr_at_standard_initialization():
    arrays = load_arrays(RESULTS / "fig3.npz")
    page = (RESULTS / "fig3.md").read_text(encoding="utf-8").replace("\n", " ")
    every = arrays["simclr-covariance.every"].astype(float)
    t, x = every[:, 0], relative_variance(every[:, 1:])
    passed = [t[int(np.argmax(x[:, j] > 0.5))] for j in range(8)]
    said = "by t = {:,.0f}, the next four at t = {:,.0f}, {:,.0f}, {:,.0f} and {:,.0f}"
    assert said.format(max(passed[:4]), *passed[4:]) in page
    lam = arrays["simclr-covariance.last"].astype(float)
    assert f"spread over {np.log10(lam[8] / lam[-1]):.1f} decades" in page
    assert f"the leading variance grows to {every[t < 40, 1].max():.1e}".replace("e+08", "e8") in page
    assert np.log10(lam[7]) == pytest.approx(5, abs=0.2), "near 1e5"


def test_the_ends_of_the_stl10_runs_at_batch_256():
    """The page and the labels of the recipes agree with the runs that are behind figures and tables."""
    page = (RESULTS / "stl10.md").read_text(encoding="utf-8")
    arrays = load_arrays(RESULTS / "table1.npz")
    with_d50 = json.loads(str(arrays["about"]))
    complete = [json.loads(str(load_arrays(RESULTS / "fig2cf.npz")["about"]))["simclr"], *with_d50.values()]
    assert len(complete) == 4
    for one in complete:
        label = load_recipe(one["recipe"]).label.replace("\n", " ")
        says = "kNN {:.1f} %, logistic {:.1f} %".format(*(100 * one["end"][k] for k in ("knn", "logistic")))
        assert says in page
        assert says in label
        assert f"{one['seconds']:.0f} s" in page
        assert f"{one['seconds'] / 60:.0f} minutes" in label
    counts = [f"{arrays[f'{m}.hidden'][0, table1.FACTS.index('grown')]:.0f}" for m in with_d50]
    assert f"| grown modes of the covariance | 39 (also of C) | {' | '.join(counts)} |" in page
    assert f"| variances above 0.1 | | {' | '.join(str(arrays[f'{m}.carried'][2]) for m in with_d50)} |" in page


def test_settings_on_the_page_of_the_stl10_runs_are_those_of_the_recipes():
    page = (RESULTS / "stl10.md").read_text(encoding="utf-8").partition("## Settings")[2].partition("## All runs")[0]
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in page.splitlines()}
    for i, method in enumerate(("bt", "simclr", "vicreg", "byol")):
        standard, small = (load_recipe(f"stl10-{method}{kind}") for kind in ("", "-small"))
        cells = {name: values[i].rstrip("*") for name, values in rows.items() if len(values) == 4}
        assert cells["rate, standard initialization"] == f"{standard.lr:g}"
        assert cells["rate, small initialization"] == f"{small.lr:g}"
        biases = cells["rate of biases and batch norms"]
        assert biases == ("as above" if standard.lr_bias in (None, 0) else f"{standard.lr_bias:g}")
        assert cells["weight decay"] == f"{standard.weight_decay:g}".replace("e-0", "e-")
        assert cells["batch"] == str(standard.batch) == str(small.batch)
        (scaled,) = (value for name, value in cells.items() if name.startswith("small initialization:"))
        assert scaled == f"{small.alpha:g}"
        assert (standard.alpha, small.scope) == (1, "all")
        updates = [f"{Calendar(r, r.pretrain, r.batch).total}" for r in (standard, small)]
        said = cells["updates"].replace(",", "")
        assert said == (updates[0] if len(set(updates)) == 1 else f"{updates[0]}; small: {updates[1]}")
        assert cells["optimizer"] == f"{standard.optimizer.upper()}, momentum {standard.momentum:g}"
        assert cells["schedule"].endswith(standard.schedule)
        warmup = int(re.match(r"\d+|constant", cells["schedule"])[0].replace("constant", "0"))
        assert warmup == standard.warmup_epochs == small.warmup_epochs
        assert cells["views"].endswith({"barlow": "Barlow Twins", "simclr": "SimCLR"}[standard.views])
        assert " → ".join(map(str, (*standard.hidden, standard.d))) in cells["hidden layers of the head → d"]


def test_the_ends_of_simclr_vicreg_and_byol():
    """The page and the labels of the recipes agree with the runs that are behind figures."""
    page = (RESULTS / "stl10.md").read_text(encoding="utf-8")
    arrays = {name: load_arrays(RESULTS / f"{name}.npz") for name in ("fig3", "fig2cf", "byol")}
    abouts = {name: json.loads(str(found["about"])) for name, found in arrays.items()}
    runs = [abouts["fig3"]["simclr"], abouts["fig2cf"]["simclr-x4"], abouts["fig3"]["vicreg"]]
    runs += [abouts["fig2cf"]["vicreg"], abouts["byol"]["standard"], abouts["byol"]["small"]]
    section = page.partition("## SimCLR, VICReg and BYOL")[2]
    head, *rows = ([c.strip() for c in line.split("|")[2:-1]] for line in section.splitlines() if line[:1] == "|")
    assert [one["recipe"] in cell for one, cell in zip(runs, head, strict=True)] == [True] * 6
    _, _, _, updates, ends, modes = rows[:6]
    assert updates == [f"{one['steps']:,}" if one["steps"] > 9999 else f"{one['steps']}" for one in runs]
    for one, cell in zip(runs, ends, strict=True):
        probes = "kNN {:.1f} %, logistic {:.1f} %".format(*(100 * one["end"][k] for k in ("knn", "logistic")))
        assert cell == f"loss {one['end']['loss']:.2f}, {probes}"
        label = load_recipe(one["recipe"]).label.replace("\n", " ")
        assert probes in label
        assert f"{one['seconds'] / 60:.0f} minutes" in label
        assert f"`{one['recipe']}` {one['seconds']:.0f} s" in page
    unseen = {m: arrays["fig3"][f"{m}-unseen"][1] for m in ("simclr", "vicreg")}
    assert [modes[0], modes[2]] == ["{}, {}".format(*unseen[m]) for m in ("simclr", "vicreg")]
    counts = [f"{arrays['fig2cf'][f'{m}.grown'][0]:.0f}, " for m in ("simclr-x4", "vicreg")]
    assert [modes[1].startswith(counts[0]), modes[3].startswith(counts[1])] == [True, True]
    early, largest = arrays["fig3"]["simclr-covariance.every"][:3, 1], arrays["fig2cf"]["simclr.every"][:, 1].max()
    assert [f"{value:.1e}" for value in early[[0, 2]]] == ["1.1e+06", "1.7e+08"], "the variances that the page names"
    assert 69 < largest < 70


def test_grown_modes_on_images_not_trained_on():
    page = (RESULTS / "stl10.md").read_text(encoding="utf-8")
    small = load_arrays(RESULTS / "fig1cd.npz")
    kinds = ("", "fast ", "x4 ", "x8 ")
    found = (load_arrays(RESULTS / "fig3.npz")["bt-unseen"], *(small[f"{kind}unseen"] for kind in kinds))
    for of, *runs in zip(("C", "the centred covariance"), *found, strict=True):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| grown modes of {of},"))
        assert row.endswith("".join(f" | {a}, {b}" for a, b in runs) + " |")


def test_scores_at_the_end_of_the_stl10_runs():
    """The page and the labels of the recipes agree."""
    page = (RESULTS / "stl10.md").read_text(encoding="utf-8")
    (row,) = (line.split(" | ") for line in page.splitlines() if line.startswith("| at the end"))
    about = [load_arrays(RESULTS / f"{name}.npz")["about"] for name in ("fig3", "fig1cd", "stl10-bt-d50")]
    runs = [one for text in about for one in json.loads(str(text)).values() if one["recipe"].startswith("stl10-bt")]
    names = [one["recipe"].removeprefix("stl10-bt") for one in runs]
    assert names == ["", "-small", "-small-fast", "-small-x4", "-small-x8", "-d50"]
    for one, cell in zip(runs, (*row[1:], page), strict=True):
        loss, knn, logistic = (one["end"][k] for k in ("loss", "knn", "logistic"))
        assert f"loss {loss:.1f}" in cell
        for text in (cell, load_recipe(one["recipe"]).label):
            assert f"kNN {100 * knn:.1f} %, logistic {100 * logistic:.1f} %" in text
        assert f"{one['seconds']:.0f} s" in page
        assert f"{one['seconds'] / 60:.0f} minutes" in load_recipe(one["recipe"]).label.replace("\n", " ")
        assert one["pretrain"] == 9000
        assert one["steps"] == 44_800
        assert one["alpha"] == PAPER["fig1cd"]["alpha"] or one["recipe"] in ("stl10-bt", "stl10-bt-d50")


def test_numbers_in_the_index():
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    small, probes, hidden = (load_arrays(RESULTS / f"{name}.npz") for name in ("fig1cd", "fig7", "fig5"))
    steps = [len(steps_of(small, f"{kind}C")) for kind in ("", "fast ", "x4 ", "x8 ")]
    assert f"{steps[1]}, {steps[2]} and {steps[3]} at two, four and eight times the rate" in index
    assert steps[0] == 9, "nine, says the index"
    by_text = {claim.text: 100 * claim.measured for claim in fig7.check(probes) if " less " in claim.text}
    first, *faster, simclr, vicreg = [gap for text, gap in by_text.items() if "predicted" not in text]
    said = f"SimCLR: {simclr:.1f} points lower; VICReg: {vicreg:.1f} points; Barlow Twins: {first:.1f} points"
    assert said in index
    assert f"at higher rates ({min(faster):.1f} to {max(faster):.1f}), are too near to our bar of 5 points" in index
    by_method = index.partition("### By method")[2].partition("### Claims")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in by_method.splitlines() if "|" in line]

    def row(begins):
        (cells,) = (cells[1:] for cells in lines if cells[0].startswith(begins))
        return cells

    rises = [len(steps_of(hidden, f"{m}.h")) for m in METHODS]
    last = [steps_of(hidden, f"simclr.{x}").times[-1] for x in ("h", "z")]
    one_by_one = row("steps of the hidden representations")
    assert all(cell.startswith(f"disagrees: {n} rises") for n, cell in zip(rises, one_by_one, strict=True))
    assert "rises until t = {:.0f}, 9 steps until t = {:.0f}".format(*last) in one_by_one[1]
    scores = {m: fig5.events(hidden, m) for m in ("bt-x4", "bt-x8", "simclr", "vicreg")}
    z = {m: (found[fig5.ALONG].z, found[fig5.WITHOUT].z) for m, found in scores.items()}
    share = row("their share along each new mode")
    assert (
        "{:.1f} and {:.1f} ({:.1f} and {:.1f})".format(*(z[m][i] for i in (0, 1) for m in ("bt-x4", "bt-x8")))
        in share[0]
    )
    assert all("{:.1f} ({:.1f}".format(*z[m]) in cell for m, cell in zip(("simclr", "vicreg"), share[1:], strict=True))
    totals = [fig5.together(hidden, m)[""][0] for m in METHODS]
    assert totals[0] < 0.5, "the bar for Barlow Twins"
    words = ["disagrees: {:.2f}", "{:.2f}", "{:.2f}"]
    cells = zip(words, totals, row("their total variance"), strict=True)
    assert all(cell.startswith(word.format(value)) for word, value, cell in cells)
    tables = load_arrays(RESULTS / "table1.npz")
    for m, cell in zip(("bt-large", "simclr", "vicreg"), row("theory above kernel PCA"), strict=True):
        assert "{:.2f}, {:.2f}".format(*tables[f"{m}.draws"].mean(axis=0)[:2]) in cell


def test_the_index_counts_its_verdicts():
    """A figure with several rows agrees if all of them do, and otherwise in part."""
    papers = (RESULTS / "README.md").read_text(encoding="utf-8").partition("### By method")[0]
    rows = re.findall(r"^\| `((?:fig|table)\d)\w*` .*?\| \[(\w+)\]\(", papers, re.MULTILINE)
    verdicts = {figure: {word for name, word in rows if name == figure} for figure, _ in rows}
    merged = [words.pop() if len(words) == 1 else "partly" for words in verdicts.values()]
    assert (sum(f.startswith("fig") for f in verdicts), sum(f.startswith("table") for f in verdicts)) == (9, 2)
    count = {word: merged.count(word) for word in ("agrees", "partly", "disagrees")}
    assert "9 figures and 2 tables, {agrees} agree and {partly} agree in part.".format(**count) in papers
    assert count["disagrees"] == 0


def test_claims_in_the_text_are_judged_by_stored_numbers():
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    probes, standard, small = (load_arrays(RESULTS / f"{name}.npz") for name in ("fig7", "fig3", "fig2cf"))
    curves = {name.removesuffix(".accuracy"): 100 * a for name, a in probes.items() if name.endswith(".accuracy")}
    assert len(curves) == 9
    assert round(-min(np.diff(a).min() for a in curves.values()), 1) == 1.1
    best = {name: a.max() - a[-1] for name, a in curves.items()}
    assert {name for name, gap in best.items() if gap < 0.01} == {"simclr.x4", "vicreg.small"}, "they end at their best"
    assert max(best.values()) < 0.85
    below = [a.max() - a[-1] for name, a in curves.items() if name.startswith("bt.")]
    assert len(below) == 5
    assert f"end {min(below):.1f} to {max(below):.1f} points below their best" in index
    for name, *pair in (
        ("VICReg: ", "vicreg.small", "vicreg.standard"),
        ("at four times the rate ", "simclr.x4", "simclr.standard"),
    ):
        ends = [probes[f"{run}.grown"][-1] for run in pair] + [curves[run][-1] for run in pair]
        assert f"{name}{ends[0]} and {ends[1]}, {ends[2]:.1f} and {ends[3]:.1f} %" in index
    unseen = {m: standard[f"{m}-unseen"][:, 0].astype(int) for m in METHODS}
    assert unseen["bt"][0] - unseen["bt"][1] == 1
    assert "{} and {} for VICReg, {} and {} for SimCLR".format(*unseen["vicreg"], *unseen["simclr"]) in index
    ends = [standard[f"{key}.last"] for key in ("bt-normalized", "simclr-covariance", "vicreg-covariance")]
    late = [f"{lam.size - grown(lam)[0]} of {lam.size}" for lam in ends]
    assert "{} (Barlow Twins), {} (SimCLR) and {} (VICReg), at our length".format(*late) in index

    def gap(arrays, key):
        every = arrays[f"{key}.every"].astype(float)
        return separation(every[:, 0], relative_variance(every[:, 1:])).gap

    gaps = {m: (gap(small, m), gap(standard, f"{m}-covariance")) for m in ("simclr", "vicreg")}
    gaps["bt"] = gap(load_arrays(RESULTS / "fig1cd.npz"), "C"), gap(standard, "bt-eigenvalues")
    covariance = gap(load_arrays(RESULTS / "fig1cd.npz"), "covariance")
    said = "Barlow Twins (C) {:.1f} and {:.1f} (from small initialization in the covariance: {:.1f}), VICReg"
    assert said.format(*gaps["bt"], covariance) in index
    words = "{:.1f} decades in C and {:.1f} in the covariance".format(gaps["bt"][0], covariance)
    assert words in index
    apart = "is {:.1f} decades below it in the median of the first run; in the covariance it is {:.1f}"
    assert apart.format(gaps["bt"][0], covariance) in (RESULTS / "fig1cd.md").read_text(encoding="utf-8")
    said = "VICReg {:.1f} and {:.1f}, SimCLR at least {:.1f} and {:.1f}".format(*gaps["vicreg"], *gaps["simclr"])
    assert said in index
    assert said in (RESULTS / "fig3.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_several_stored_results_are_drawn_again_by_one_command(tmp_path):
    """Each one by itself is drawn above."""
    for name in ("fig5", "fig8"):
        for kind in ("json", "npz"):
            shutil.copy(RESULTS / f"{name}.{kind}", tmp_path)
    done = stairwise("reproduce", "all", "--from-stored", "--stored", tmp_path, "--json", cwd=tmp_path)
    assert [one["experiment"] for one in json.loads(done.stdout)] == stored_names(tmp_path) == ["fig5", "fig8"]
    assert done.returncode == 1, "some claims do not hold"


def test_what_is_not_stored_is_named(tmp_path):
    for suffix in (".npz", ".json"):
        (tmp_path / f"fig9{suffix}").write_bytes((RESULTS / f"fig9{suffix}").read_bytes())
    done = stairwise("reproduce", "all", "--from-stored", "--stored", tmp_path, "--json", cwd=tmp_path)
    assert [one["experiment"] for one in json.loads(done.stdout)] == ["fig9"]
    assert "left out: fig1 (not stored)" in done.stderr
    assert done.returncode == 0


def test_the_index_names_every_experiment_and_its_state():
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    papers, _, beyond = index.partition("Beyond the paper:")
    rows = {line.split("|")[1].strip(" `"): line for line in index.splitlines() if line.startswith("| `")}
    assert rows.keys() == CATALOG.keys()
    for name, row in rows.items():
        assert ("not run yet" in row or "not run on STL-10 yet" in row) or name in stored_names(RESULTS), name
        assert name in PAPER or row in beyond, name
        if row in papers:
            verdict = row.split("|")[4].strip().split("]")[0].strip("[")
            assert verdict in (("open",) if "not run yet" in row else ("agrees", "partly", "disagrees")), name
    assert set(PAPER) <= set(CATALOG)


def test_verdicts_of_the_first_page_are_those_of_the_index():
    verdict = r"\[(agrees|partly|disagrees)\]\((?:docs/results/)?(\w+\.md)[^)]*\)"
    pages = (RESULTS.parents[1] / "README.md", RESULTS / "README.md")
    first, index = (set(re.findall(verdict, page.read_text(encoding="utf-8"))) for page in pages)
    assert len(first) == 9
    assert first <= index


def test_settings_of_stored_results_are_the_papers():
    """If the paper gives them; Fig. 2A,B ran longer, as its page says."""
    for place, name in (case.values for case in STORED):
        config = json.loads((place / f"{name}.json").read_text())["config"]
        for key, value in PAPER.get(name, {}).items():
            if key in config and (name, key) != ("fig2ab", "steps"):
                assert config[key] == value, (name, key)


def tables_of(name, arrays):
    """The rows of a stored result that its page shows."""
    if name == "coming":
        return [row for row in coming.table(arrays).rows if row[1] == "next"]
    if name == "table2":
        return table2.table(arrays).rows + table2.grown_table(arrays).rows
    rows = table1.table(arrays).rows + table1.draws_table(arrays).rows + table1.pairs_table(arrays).rows
    rows += table1.lengths_table(arrays).rows
    every = table1.drift_table(arrays).rows
    last = {row[0]: row for row in every}
    return rows + [row for row in every if row[1] == "0" or row in last.values()]


@pytest.mark.parametrize(("place", "name"), [case for case in STORED if case.values[1] in SHARED])
def test_tables_on_the_page(place, name):
    page = (RESULTS / "tables.md").read_text(encoding="utf-8")
    rows = tables_of(name, load_arrays(place / f"{name}.npz"))
    assert rows
    for row in rows:
        assert "| " + " | ".join(row) + " |" in page


def test_what_the_page_says_of_lengths_and_of_the_modes_that_come_next():
    page = (RESULTS / "tables.md").read_text(encoding="utf-8").replace("\n", " ")
    arrays = load_arrays(RESULTS / "table1.npz")
    scales, shares = table1.by_scale(arrays, "bt-large")
    theory, pca = shares.mean(axis=0)[:, :2].T
    assert f"goes from {theory[0]:.2f} to {theory[-1]:.2f} as these lengths change" in page
    lead = theory - pca
    assert f"is largest near s = {scales[lead.argmax()]:g} ({lead.max():.3f})" in page
    assert f"Hidden weights are {100 * arrays['bt-large.hidden'][:, 0].mean():.1f} % of K's trace" in page
    above, _, visible = arrays["bt-large.carried"]
    assert (above, visible) == (50, 49), "as the page says"
    found = load_arrays(RESULTS / "coming.npz")
    runs = ("simclr", "bt-d50", "simclr-x4", "vicreg")
    until_end = [coming.means(found, m, "end")[0][:, 2, 0].mean() for m in runs]
    said = "{:.2f} (SimCLR), {:.2f} (Barlow Twins), {:.2f} (SimCLR at four times the rate) and {:.2f} (VICReg)"
    assert said.format(*until_end) in page
    leads = -np.array([np.diff(coming.means(found, m)[0].mean(axis=0))[: len(TANGENT), 0] for m in runs])
    assert (leads > -0.002).all(), "ahead or equal, says the page"
    assert leads.max() == leads[3, 0]
    assert f"only by up to {leads.max():.2f} (VICReg, K as it is)" in page
    shares = {m: coming.means(found, m)[0].mean(axis=0) for m in runs}
    bars = [shares[m][2, 0] / (2 * coming.means(found, m)[1].mean(axis=0)[2, 0]) for m in runs]
    assert f"{min(bars):.1f} to {max(bars):.1f} times this bar" in page
    last = KERNELS.index("inputs of the last layer")
    for m, verdict in (("vicreg", "met"), ("simclr-x4", "missed")):
        hold = shares[m][last, 0], shares[m][2, 0]
        assert "{:.2f} and {:.2f} (**{}**)".format(*hold, verdict) in page
        assert (hold[0] >= hold[1] - 0.05) == (verdict == "met")
        assert "{:.2f} and {:.2f} | {} |".format(*hold, verdict) in (RESULTS / "predictions.md").read_text("utf-8")
    some = np.flatnonzero(found["vicreg.until"] >= 0)
    moments = found["vicreg.shares"][:, some].mean(axis=0)[:, 0, :, 0]
    assert [int((moments[:, last] > moments[:, 2]).sum()), len(moments)] == [8, 9], "at eight of nine moments"
    assert f"finds all 50, and {shares['simclr-x4'][last, 1]:.2f}" in page


def test_what_the_page_says_of_the_next_modes_in_small_networks():
    page = (RESULTS / "tables.md").read_text(encoding="utf-8").replace("\n", " ")
    runs = json.loads((RESULTS / "coming_small.json").read_text())["runs"]
    assert sorted((run["loss"], run["seed"]) for run in runs) == sorted(product(METHODS, (1, 2, 3)))
    for row in bench_coming.rows(runs):
        assert "| " + " | ".join(row) + " |" in page
    moments = [run["moments"] for run in runs]
    assert f"{min(moments)} to {max(moments)} moments" in page
    shares = np.array([[run["shares"] for run in runs if run["loss"] == method] for method in METHODS])
    last, embeddings, directions = (KERNELS.index(k) for k in ("inputs of the last layer", "embeddings", "directions"))
    leads = shares[:, :, directions, None] - shares[:, :, [last, embeddings]]
    assert (leads[:, :, 0, 0] > 0).all(), "in all nine runs"
    by_loss = leads.mean(axis=1)
    assert "by {:.2f} (Barlow Twins), {:.2f} (SimCLR) and {:.2f} (VICReg) in the mean".format(*by_loss[:, 0, 0]) in page
    assert "ahead of the embeddings by {:.2f}, {:.2f} and {:.2f}".format(*by_loss[:, 1, 0]) in page
    assert "finds all 50 there, and the lead is {:.2f}, {:.2f} and {:.2f}".format(*by_loss[:, 0, 1]) in page
    alone = shares.mean(axis=1)[:, embeddings, 0]
    assert f"the embeddings alone contain {alone.min():.2f} to {alone.max():.2f}" in page
    assert (by_loss[:, 0, 0] <= 0.05).tolist() == [True, False, True], "SimCLR misses the prediction"
    assert ((by_loss[:, 1, 0] >= 0.02) & (by_loss[:, 1, 0] <= 0.15)).all()
    ways = shares.mean(axis=1)[:, : len(TANGENT)]
    assert np.abs(ways[..., 0] - ways[..., 1]).max() < 0.03


def test_the_papers_tables_on_the_page():
    page = (RESULTS / "tables.md").read_text(encoding="utf-8")
    for method, title in METHODS.items():
        theory, pca = (PAPER["table1"][key][method] for key in ("theory", "kernel PCA"))
        assert f"| *paper: {title}* | {theory:.3f} | {pca:.3f} |" in page
    for pair in ("bt-simclr", "bt-vicreg", "simclr-vicreg"):
        assert f"{PAPER['table2'][pair]:.3f}" in page


def test_what_the_page_says_of_the_tables_on_cifar10():
    page = (RESULTS / "tables.md").read_text(encoding="utf-8").replace("\n", " ")
    arrays = load_arrays(RESULTS / "cifar10" / "table1.npz")
    moved = ["| " + " | ".join(row) + " |" for row in table1.drift_table(arrays).rows]
    assert sum(row in page for row in moved) == 12
    counts = [grown(arrays[f"{m}.last"])[0] for m in METHODS]
    assert "{} (Barlow Twins), {} (SimCLR) and {} (VICReg) of 50 [modes]".format(*counts) in page
    theory, pca = arrays["vicreg.by_dimension"][:, counts[2] - 1]
    assert f"Of VICReg's leading {counts[2]} the theory captures {theory:.2f} and kernel PCA {pca:.2f}" in page
    rises = [np.diff(table1.corrected(arrays, m)) for m in METHODS]
    assert np.min(rises) > 0
    assert f"by {np.min(rises):.3f} to {np.max(rises):.3f} per doubling" in page


def test_the_tangent_kernel_of_the_stl10_run():
    page = (RESULTS / "tables.md").read_text(encoding="utf-8").replace("\n", " ")
    arrays = load_arrays(RESULTS / "stl10-bt-d50.npz")
    found = json.loads(str(arrays["scores"]))
    n, theory, pca = arrays["by_pairs"]
    at = n.tolist().index(1000)
    assert f"At n = 1000 pairs: theory {theory[at]:.3f}, kernel PCA {pca[at]:.3f};" in page
    initial = [found[f"{name}, initial kernel"] for name in ("theory", "kernel PCA")]
    assert "from the initial kernel (n = 4000) {:.3f} and {:.3f}.".format(*initial) in page
    half = int((arrays["last"] > 0.5).sum())
    assert f"{grown(arrays['last'])[0]} of 50 modes of C have grown" in page
    less = arrays["by_dimension"][:, half - 1]
    assert f"of the leading {half} modes the theory captures less, {less[0]:.3f}, kernel PCA {less[1]:.3f}" in page
    assert f"captures {found['theory']:.3f}, kernel PCA {found['kernel PCA']:.3f}, chance {found['chance']:.3f}" in page
    assert f"error of the kernel {found['kernel_error']:.1e}".replace("e-0", "e-") in page
    chance = arrays["by_dimension"].shape[1] / (2 * n)
    for name, shares in (("theory", theory), ("kernel PCA", pca)):
        cells = " | ".join(f"{v:.3f}" for v in (shares - chance) / (1 - chance))
        assert f"| {name} | {cells} |" in page
    assert f"{half} of 50 eigenvalues of C are above one half" in page
    steps = arrays["drift.steps"].tolist()
    for step in (0, 5600, 22400, 44800):
        values = (arrays[f"drift.{name}"][steps.index(step)] for name in ("with_first", "with_last", "theory"))
        assert f"| Barlow Twins, STL-10 | {step} | " + " | ".join(f"{v:.3f}" for v in values) + " |" in page


def test_the_tangent_kernel_predicts_the_first_eight_steps():
    """docs/results/fig2ab.md: CIFAR-10, within 10 %."""
    arrays = load_arrays(RESULTS / "fig2ab.npz")
    measured, predicted = fig2ab.step_times(arrays)
    assert np.isfinite(measured[:8]).all()
    assert np.abs(predicted[:8] / measured[:8] - 1).max() <= 0.1
    assert all(claim.holds for claim in fig2ab.check(arrays))


def test_wide_networks_are_what_their_kernels_predict():
    """docs/ntk.md: the table's rows, and the claims of the experiment."""
    arrays = load_arrays(RESULTS / "width.npz")
    page = (RESULTS.parent / "ntk.md").read_text(encoding="utf-8")
    for row in width.table(arrays).rows:
        assert "| " + " | ".join(row) + " |" in page
    assert all(claim.holds for claim in width.check(arrays))
    assert arrays["alignment"][-1] > 0.999


def test_the_figure_of_the_staircases_can_be_redrawn(tmp_path):
    stored = load_arrays(RESULTS / "staircases.npz")
    courses = [
        Course(loss.replace("_", " "), *(stored[f"{loss}.{k}"] for k in ("times", "loss", "spectra")), of)
        for loss, of in LOSSES.items()
    ]
    with style():
        draw_courses(courses).savefig(tmp_path / "staircases.png")
    assert (tmp_path / "staircases.png").stat().st_size > 50_000


def test_the_spectral_law_is_as_good_as_its_page_says():
    page = (RESULTS / "spectral.md").read_text(encoding="utf-8")
    rows = json.loads((RESULTS / "spectral_rows.json").read_text(encoding="utf-8"))
    for line in bench_spectral.markdown(rows).splitlines():
        assert line in page
    found = bench_spectral.summary(rows)
    assert f"in {found['within']} of {found['rows']} settings" in page
    assert f"the worst are {100 * found['worst_steps']:.1f} % and {found['worst_overlap']:.3f}" in page
    assert f"Of the {found['held_out']} settings whose spectrum had been set aside, {found['held_out_within']}." in page
    seeds = [max(row[key] for row in rows) for key in ("seed_steps", "seed_overlap")]
    assert f"up to {100 * seeds[0]:.1f} % and {seeds[1]:.3f} for 90 % of the seeds" in page
    assert f"by up to {100 * max(row['last_late'] for row in rows):.1f} %." in page
    spans = {(r["spectrum"], r["d"], r["alpha"], r["lr"]): r["overlap"] for r in rows}
    between = [
        spans[name, d, 1e-2, 0.0] <= spans[name, d, 1e-7, 0.02] <= spans[name, d, 1e-4, 0.0]
        for name, d in dict.fromkeys((r["spectrum"], r["d"]) for r in rows)
    ]
    assert f"in {sum(between)} of {len(between)} settings" in page


def test_batches_carry_what_the_page_says():
    """Both tables of the page are those of the stored counts, and the linear models keep the bar."""
    arrays = load_arrays(RESULTS / "batch.npz")
    text = (RESULTS / "batch.md").read_text(encoding="utf-8")
    for networks in (False, True):
        for row in batch.table(arrays, networks).rows:
            assert f"| {' | '.join(row)} |" in text
    for row in batch.ahead_table(arrays).rows:
        assert f"| {' | '.join(row)} |" in text
    linear = [claim for claim in batch.check(arrays) if "network" not in claim.text]
    assert len(linear) == 6
    assert all(claim.holds for claim in linear)


def test_resnets_carry_what_the_page_says():
    """Predictions are made anew from the stored correlations."""
    text = (RESULTS / "batch.md").read_text(encoding="utf-8")
    stored = json.loads((RESULTS / "batch_resnet.json").read_text(encoding="utf-8"))
    kept = []
    for key, batches in stored.items():
        loss, updates = key.split()
        options = {
            "barlow_twins": {"lambda_": 1.0, "batch_norm": False, "symmetric": True},
            "simclr": {"temperature": 0.2},
        }
        for size, run in batches.items():
            says = sw.carried(run["rho"], int(size), loss, 50, run["excess"], **options.get(loss, {}))
            counts = list(zip((says.above_tenth, says.above_half), run["measured"], strict=True))
            cells = [f"{predicted} ({measured})" for predicted, measured in counts]
            cells = [updates, size, *cells, f"{says.loss:.2f} ({run['loss']:.2f})"]
            assert f"| {' | '.join(cells)} |" in text
            kept += [batch.misses(np.array([[float(a)]]), np.array([[float(b)]]))[1] for a, b in counts]
    assert f"{sum(kept)} of these {len(kept)} counts" in text


def test_a_count_that_is_far_off_is_a_miss():
    assert batch.misses(np.array([[10.0, 20.0]]), np.array([[9.0, 21.0]])) == (pytest.approx(1 / 9), True)
    assert batch.misses(np.array([[10.0, 20.0]]), np.array([[10.0, 24.0]])) == (pytest.approx(1 / 6), False)


def test_what_the_papers_network_carries():
    """The law from the stored embeddings of the run at batch 64, and the stored counts of the others."""
    page = (RESULTS / "batch.md").read_text(encoding="utf-8")
    arrays, recipe = load_arrays(RESULTS / "stl10-bt-d50.npz"), load_recipe("stl10-bt-d50")
    monitor = sw.SpectrumMonitor()
    monitor.update(*torch.tensor(arrays["embeddings"].astype(float)).chunk(2))
    seen = monitor.compute()
    law = carried_by(seen, recipe.loss, recipe.loss_options, recipe.batch)
    above, count = batch.counts(seen, recipe.loss)
    end = json.loads(str(arrays["about"]))["stl10-bt-d50"]["end"]["loss"]
    in_training = int((arrays["last"] > 0.5).sum())
    assert grown(seen.covariance)[0] == 39, "39 (also of C), says the page of the runs"
    row = f"{law.above_tenth} ({above}) | {law.above_half} ({in_training}) | {law.loss:.1f} ({end:.1f})"
    assert f"| Barlow Twins | {recipe.batch} | 1000 | {row} |" in page
    assert f"where {count} eigenvalues are above ½" in page
    assert f"The run is {law.loss - end:.1f} below" in page
    howto = (RESULTS.parent / "howto" / "which-batch.md").read_text(encoding="utf-8")
    resnet = json.loads((RESULTS / "batch_resnet.json").read_text(encoding="utf-8"))
    small = [resnet[f"barlow_twins {updates}"]["64"]["measured"][1] for updates in (1500, 6000)]
    assert "5 of {} and 4 of {} (ResNet-18), and".format(*small) in howto
    assert f"and {law.above_half} of {in_training} (ResNet-50)" in howto
    tables = load_arrays(RESULTS / "table1.npz")
    for name, words in (("bt-large", "Barlow Twins"), ("vicreg", "VICReg")):
        above, predicted, _ = tables[f"{name}.carried"]
        assert f"| {words} | 256 | 9216 | – | {predicted} ({above}) | – |" in page
