"""Sharper runs are found among invented ones, and the page's comparisons are computed again."""

import json
import re

import numpy as np
import pytest

import stairwise as sw
from stairwise.archives import load_arrays, save_arrays
from stairwise.checks import InputError
from stairwise.paper import sharpness
from stairwise.paper.harness import LARGEST, joined, run, store
from stairwise.staircase.separation import loss_contrast, relative_variance, separation
from tests.paper.test_figures import invented
from tests.paper.test_results import LOSSES, RESULTS, stored_run


def standard(folder, method, seed, spread):
    """An invented run of a standard recipe; the larger the spread, the further apart its modes rise."""
    name = f"cifar10-{method}"
    invented(folder / (name + (f"-seed{seed}" if seed else "")), name, 8 * spread ** -np.arange(12.0), small=False)
    path = folder / (name + (f"-seed{seed}" if seed else "")) / "recipe.json"
    facts = json.loads(path.read_text())
    facts["recipe"]["seed"] = seed
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize("sharper", [True, False])
def test_sharper_runs_are_found(tmp_path, sharper):
    """Three methods, two seeds, one method at a time; and a control."""
    runs, stored = tmp_path / "runs", tmp_path / "stored"
    spreads = {"simclr": 2.2 if sharper else 1.5, "bt": 1.3, "vicreg": 1.8}
    for method, spread in spreads.items():
        for seed in (0, 1):
            standard(runs, f"{method}-standard", seed, spread + 0.02 * seed)
    settings = {"runs": str(runs), "seeds": 2}
    for method in spreads:
        result = joined(run("sharpness", tmp_path, settings | {"methods": method}), stored)
        store(result, stored)
    whole = run("sharpness", tmp_path, settings)
    assert {c.text: c.measured for c in whole.claims} == {c.text: c.measured for c in result.claims}
    judged = {c.text: c.holds for c in whole.claims if c.judged}
    assert len(judged) == 8
    assert {words: holds for words, holds in judged.items() if words.startswith("gap")} == {
        "gap: lowest of SimCLR less highest of Barlow Twins": True,
        "gap: lowest of SimCLR less highest of VICReg": sharper,
    }
    assert {words: holds for words, holds in judged.items() if words.startswith("predicted: gap of")} == {
        "predicted: gap of SimCLR over that of Barlow Twins": sharper,
        "predicted: gap of SimCLR over that of VICReg": False,
    }
    assert (stored / "sharpness.npz").stat().st_size < 300e3
    with pytest.raises(InputError, match="seeds"):
        run("sharpness", tmp_path, settings | {"seeds": 0})
    if sharper:
        for seed in (0, 1):
            standard(runs, "simclr-standard-lars", seed, 1.2)
        controlled = run("sharpness", tmp_path, settings | {"control": "lars"})
        values = sharpness.numbers(controlled.arrays, "gap")
        assert max(values["simclr-lars"]) < min(values["simclr"])
        assert len(sharpness.table(controlled.arrays).rows) == 8
        (third,) = (c for c in controlled.claims if c.text.endswith("SimCLR with LARS") and "predicted" in c.text)
        assert third.measured > sharpness.ALIKE
        assert not third.holds
        with pytest.raises(InputError, match="control"):
            run("sharpness", tmp_path, settings | {"control": "adam"})


def gaps(monkeypatch, **by_method):
    """The predictions, by their text, of runs with these gaps; contrasts are the same numbers."""
    monkeypatch.setattr(sharpness, "numbers", lambda arrays, number: by_method)
    return {claim.text.removeprefix("predicted: "): claim.holds for claim in sharpness._predictions({})}


def test_the_three_predictions(monkeypatch):
    first = ["gap of SimCLR over that of Barlow Twins", "gap of SimCLR over that of VICReg"]
    first = [*first, "contrast of SimCLR less that of the others"]
    second, third = (
        "gaps of Barlow Twins and VICReg, larger over smaller",
        "gap of SimCLR over that of SimCLR with LARS",
    )
    right = {"simclr": [1.0, 1.4], "bt": [0.5, 0.5], "vicreg": [0.4, 0.4], "simclr-lars": [1.1, 0.9]}
    assert gaps(monkeypatch, **right) == dict.fromkeys([*first, second, third], True)
    assert not gaps(monkeypatch, **right | {"simclr": [0.9]})[first[0]], "less than twice"
    assert not gaps(monkeypatch, **right | {"bt": [1.3]})[first[2]]
    assert not gaps(monkeypatch, **right | {"vicreg": [0.3]})[second], "they differ"
    assert not gaps(monkeypatch, **right | {"simclr-lars": [0.5]})[third], "the reason is the optimizer"
    assert gaps(monkeypatch, **right | {"simclr-lars": [3.0]})[third], "as large, or larger"
    fourth = "gap of SimCLR over that of SimCLR with a warm-up"
    assert gaps(monkeypatch, simclr=[2.0], **{"simclr-warm": [0.9]}) == {fourth: True}
    assert gaps(monkeypatch, simclr=[2.0], **{"simclr-warm": [1.1]}) == {fourth: False}
    plain = {"gap of SimCLR over that of SimCLR without momentum", "largest gap of SimCLR without momentum"}
    assert gaps(monkeypatch, simclr=[3.0], **{"simclr-plain": [0.2, 0.9]}) == dict.fromkeys(plain, True)
    assert gaps(monkeypatch, simclr=[1.2], **{"simclr-plain": [0.2, 1.1]}) == dict.fromkeys(plain, False)
    assert gaps(monkeypatch, **right | {"bt": [0.0]})[first[0]], "no mode rises: any gap is larger"
    assert not gaps(monkeypatch, simclr=[0.0], bt=[0.0])[first[0]]
    assert gaps(monkeypatch, simclr=[1.0]) == {}, "one method alone"


def test_numbers_on_the_page():
    page = (RESULTS / "sharpness.md").read_text(encoding="utf-8").replace("\n", " ")
    arrays = load_arrays(RESULTS / "sharpness.npz")
    for row in sharpness.table(arrays).rows:
        assert f"| {' | '.join(row)} |" in page
    gap = {method: np.mean(values) for method, values in sharpness.numbers(arrays, "gap").items()}
    least = min(sharpness.numbers(arrays, "gap")["simclr"])
    assert f"the next one is at least {least:.1f} decades below it" in page
    assert "Barlow Twins has {bt:.1f} and VICReg {vicreg:.2f}".format(**gap) in page
    assert f"SimCLR's gap is {gap['simclr-lars']:.2f}," in page
    said = "in the mean of three seeds its gap is {:.2f}, where SimCLR has at least {:.1f} (a factor of {:.1f})"
    assert said.format(gap["simclr-warm"], gap["simclr"], gap["simclr"] / gap["simclr-warm"]) in page
    said = "The mean is {:.2f}, a factor of {:.1f} below SimCLR's"
    assert said.format(gap["simclr-plain"], gap["simclr"] / gap["simclr-plain"]) in page
    every = sharpness.numbers(arrays, "gap")
    for words, kind in (("the gap is {:.2f}, {:.2f} and {:.2f}", "warm"), ("it is {:.2f}, {:.2f} and {:.2f}", "plain")):
        assert words.format(*every[f"simclr-{kind}"]) in page
    ends = {name: one["end"]["loss"] for name, one in json.loads(str(arrays["about"])).items()}
    patterns = (r"simclr \d", r"simclr-(warm|plain) \d")
    own, mended = ([loss for name, loss in ends.items() if re.match(pattern, name)] for pattern in patterns)
    howto = (RESULTS.parent / "howto" / "which-learning-rate.md").read_text(encoding="utf-8")
    assert (len(own), len(mended)) == (3, 6)
    assert f"ends at losses of {min(own):.1f} to {max(own):.1f}" in howto
    assert f"or without momentum, at {min(mended):.1f} to {max(mended):.1f}" in howto
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    said = f"With a warm-up ({gap['simclr-warm']:.2f} in the mean), or without momentum ({gap['simclr-plain']:.2f})"
    assert said in index
    assert "The means, {simclr-warm:.2f} and {simclr-plain:.2f}, are near Barlow Twins' {bt:.2f}".format(**gap) in page
    lowest = min(every["simclr-warm"]), min(every["simclr-plain"]), max(every["bt"])
    assert "(lowest {:.2f} and {:.2f} against {:.2f})".format(*lowest) in page


def test_the_page_says_what_is_judged():
    page = (RESULTS / "sharpness.md").read_text(encoding="utf-8").replace("\n", " ")
    assert "at least twice that of each other method" in page
    assert sharpness.TWICE == 2
    assert f"differ by a factor of {sharpness.ALIKE:g} at most" in page


def test_noisy_runs_can_be_stored(tmp_path):
    """Three seeds of three methods and the controls, whose digits cannot be compressed."""
    rng = np.random.default_rng(0)

    class Noisy:
        times = np.cumsum(rng.random(800))

        def series(self, name):
            lam = np.exp(rng.standard_normal((800, 64))) / np.arange(1, 65)
            return rng.random(800) if name == "loss" else lam

    arrays = {}
    for method in sharpness.TITLES:
        for seed in range(3):
            arrays |= sharpness._stored(f"{method} {seed}", Noisy())
    assert arrays["bt 0.x"].shape == (sharpness.RECORDS, sharpness.MODES)
    save_arrays(tmp_path / "arrays.npz", {name: np.asarray(x) for name, x in arrays.items()})
    assert (tmp_path / "arrays.npz").stat().st_size < LARGEST


def test_what_the_page_compares_sharpness_with():
    """Linear theory, smooth growth, and stored runs."""
    gamma, t = np.arange(1, 33.0) ** -2, np.linspace(0.005, 2, 400)
    flat = np.arange(1, 65) ** -np.interp(t, [0, 2], [6, 0.5])[:, None]
    rows = {"a spectrum j^-a that flattens smoothly": (t, flat, ((1 - flat) ** 2).sum(axis=1))}
    for start, words in ((1e-12, "1e-12"), (1e-6, "1e-6"), (1e-2, "1e-2")):
        modes = sw.Modes(gamma, np.sqrt(start / gamma))
        t = np.geomspace(1e-3, 1, 400) * modes.step_times()[20]
        rows[f"linear theory, γ = 1/k², λ(0) = {words}"] = (t, modes.eigenvalues(t), modes.loss(t))
    for loss, words in zip(LOSSES, ("small initialization: Barlow Twins", "SimCLR", "VICReg"), strict=True):
        rows[words] = (*stored_run(loss, 0), load_arrays(RESULTS / "staircases.npz")[f"{loss}.loss"])
    standard = load_arrays(RESULTS / "fig3.npz")
    rows["Barlow Twins ([Fig. 3A](fig3.md))"] = tuple(standard[f"bt-normalized.{x}"] for x in ("t", "lam", "loss"))
    page = (RESULTS / "sharpness.md").read_text(encoding="utf-8")
    for words, (t, lam, loss) in rows.items():
        steps = separation(t, relative_variance(lam))
        assert f"{words} | {steps.gap:.2f} | {loss_contrast(t, loss, steps):.2f} |" in page, words
