"""The learned span against the predicted one: overlaps, kernels, runs of seconds, and the table of the page."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from benchmarks.race import page
from benchmarks.race.__main__ import STORE, TINY
from benchmarks.race.entrants import METHODS, RaceRun
from benchmarks.race.images import read_images
from benchmarks.race.largest_rate import leading_gamma
from benchmarks.race.plan import Race, Rules
from benchmarks.race.single import recipe_of
from benchmarks.race.span import Group, chosen_rate, fixed_views, main, predicted_modes, shares, theory_modes
from benchmarks.race.store import Store
from stairwise.checks import InputError
from stairwise.theory.correlation import Correlation
from stairwise.theory.spectra import subspace_alignment
from stairwise.training.loop import Trainer

CHANGES = TINY | {"batch": 16, "held_out": 16, "probes": []}


@pytest.fixture
def file(tmp_path):
    """120 images of ten classes, 80 of them for training."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 10
    pixels = np.clip(25 * labels[:, None, None, None] + rng.integers(0, 40, (120, 16, 16, 3)), 0, 255)
    path = tmp_path / "images.npz"
    np.savez(path, pixels=pixels.astype(np.uint8), labels=labels, split=np.arange(120) >= 80)
    return path


def test_shares_are_squared_cosines_of_principal_angles():
    rng = np.random.default_rng(0)
    learned = np.linalg.qr(rng.standard_normal((60, 8)))[0]
    predicted = {
        "theory": learned @ rng.standard_normal((8, 14)) + rng.standard_normal((60, 14)),
        "few": learned[:, :3],
    }
    for k in (1, 3, 6):
        found = shares(learned, predicted, k)
        for name, count in (("theory", k), ("theory_2k", 2 * k)):
            angles = scipy.linalg.subspace_angles(learned[:, :k], predicted["theory"][:, :count])
            assert found[name] == pytest.approx(np.mean(np.cos(angles) ** 2), abs=1e-4)
        assert ("few" in found, "few_2k" in found) == (k <= 3, k <= 1)  # only where there are as many modes
    assert shares(learned, predicted, 3)["few"] == 1
    assert shares(learned, predicted, 99)["k"] == 8
    assert shares(learned, predicted, 0) == {"k": 0}


def test_chance_is_measured_with_random_spans():
    learned = np.linalg.qr(np.random.default_rng(1).standard_normal((400, 40)))[0]
    found = shares(learned, {}, 40)
    assert found["chance"] == pytest.approx(40 / 400, rel=0.1)
    assert found["chance_2k"] == pytest.approx(80 / 400, rel=0.1)


class Linear(nn.Module):
    """x → (h, z) without hidden layers: its tangent kernel is that of x, whatever its weights."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(6, 3)

    def forward(self, x):
        return x, self.weights(x)


def test_the_prediction_for_a_linear_network_is_the_span_of_leading_modes_of_gamma():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 6)) * [3.0, 2.5, 2.0, 1.5, 1.0, 0.5] + 5.0  # the mean must not matter
    both = np.concatenate([x, x + 0.5 * rng.standard_normal(x.shape)])
    spans = predicted_modes(Linear(), torch.tensor(both, dtype=torch.float32))
    about = both - both.mean(axis=0)
    gamma = about[:40].T @ about[40:]
    gamma_modes = np.linalg.eigh(gamma + gamma.T)[1][:, ::-1]
    variance_modes = np.linalg.eigh(about.T @ about)[1][:, ::-1]
    for k in (1, 2, 4):
        for name, modes in (("theory", gamma_modes), ("theory_measured", gamma_modes), ("pca", variance_modes)):
            assert subspace_alignment(spans[name][:, :k], about @ modes[:, :k]) == pytest.approx(1, abs=1e-6), (name, k)


def test_modes_below_rounding_error_are_not_predicted():
    x = np.random.default_rng(3).standard_normal((10, 3))
    K = np.tile(x @ x.T, (2, 2))
    assert theory_modes(K, 9).shape == (20, 3), "the rank of K"
    assert theory_modes(np.zeros((4, 4)), 1).shape == (4, 0)


@pytest.mark.parametrize("start", ["small", "standard"])
def test_methods_begin_with_the_same_network_and_are_compared_on_the_same_views(start, file):
    read_images([file]).offer()
    runs = [
        RaceRun("final", "toy", "vicreg", m, 0.01, 1, seed, start)
        for m, seed in (("lars", 0), ("muon", 0), ("lars", 1))
    ]
    trainers = [Trainer(recipe_of(run, CHANGES), Path("unused"), torch.device("cpu")) for run in runs]
    weights = [torch.cat([p.flatten() for p in t.network.parameters()]) for t in trainers]
    views = [fixed_views(t, 12) for t in trainers]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert views[0].shape == (24, 3, 16, 16)
    assert torch.equal(views[0], views[1])
    assert torch.equal(views[0], views[2])
    before = {name: b.clone() for name, b in trainers[0].network.state_dict().items()}
    spans = predicted_modes(trainers[0].network, views[0])
    assert {name: modes.shape for name, modes in spans.items()} == {
        **dict.fromkeys(("theory", "theory_measured"), (24, 11)),
        **dict.fromkeys(("pca", "pca_measured"), (24, 23)),
    }
    assert subspace_alignment(spans["pca"][:, :4], spans["pca_measured"][:, :4]) < 0.999  # other statistics
    assert all(torch.equal(b, before[name]) for name, b in trainers[0].network.state_dict().items())
    for trainer in trainers:
        trainer.close()


def test_a_run_that_diverges_is_not_compared(file):
    read_images([file]).offer()
    group = Group(12)
    for lr in (1e30, 0.01):
        group.train(RaceRun("final", "toy", "vicreg", "sgd", lr, 4, 1), CHANGES, "cpu")
    group.compare()
    lost, kept = group.results.values()
    assert (lost["diverged"], lost["spans"], "equal" in lost) == (True, [], False)
    assert (kept["diverged"], kept["equal"], kept["beside"]) == (False, kept["spans"][-1], [])


def test_runs_are_compared_stored_and_not_repeated(file, tmp_path, capsys):
    out = tmp_path / "span.jsonl"
    command = ["--data-file", str(file), "--out", str(out), "--race", str(tmp_path / "none.jsonl"), "--tiny"]
    command += ["--losses", "vicreg", "--starts", "standard", "--images", "16", "--length", "16", "--device", "cpu"]
    main([*command, "--minutes", "0"])
    assert "left out" in capsys.readouterr().out
    assert not out.exists()
    main([*command, "--seeds", "2"])
    results = list(Store(out).results().values())
    assert [(r["method"], r["seed"], r["steps"]) for r in results] == [
        *[("lars", 0, 16), ("muon", 0, 5), ("lars", 1, 16), ("muon", 1, 5)],
    ]
    assert [r["step"] for r in results] == [[1, 2, 4, 8, 16], [1, 2, 5], [16], [5]]
    for r in results:
        assert [one["k"] for one in r["spans"]] == [min(k, 8) for k in r["grown"]]
        assert all(0 <= value <= 1 for one in r["spans"] for name, value in one.items() if name != "k")
        assert r["rate_from"] == "grid"
    assert [[(o["method"], o["seed"]) for o in r["beside"]] for r in results if r["equal"]["k"]] == [
        *[[], [("lars", 0)], [("lars", 0)], [("muon", 0), ("lars", 1)]],
    ]
    assert results[0]["equal"]["k"] == results[1]["equal"]["k"] == min(r["spans"][-1]["k"] for r in results[:2])
    assert all(0 <= o["overlap"] <= o["in_all"] <= 1 + 1e-9 for r in results for o in r["beside"])
    stored = out.read_text()
    for seeds in ("1", "2"):
        main([*command, "--seeds", seeds])
    assert out.read_text() == stored
    assert page.span_table(out).count("\n") == 2
    with pytest.raises(InputError, match="--images"):
        main([*command, "--images", "81"])


def test_the_learning_rate_is_that_of_the_race():
    stored = Store(STORE).results()
    for method in ("lars", "muon"):
        rate = Race(Rules(), stored).chosen_rate("simclr", method)
        assert chosen_rate(stored, "cifar10", "simclr", method, "standard") == (rate, "standard")
    assert chosen_rate({}, "cifar10", "simclr", "muon", "small") == (METHODS["muon"].rates[2], "grid")
    rules, made = Rules(start="small"), {}
    for lr, score in ((0.02, 0.4), (0.04, 0.6)):  # two of four trials are done
        run = rules.run("tune", "simclr", "muon", lr, rules.trial)
        made[run.key({})] = {"logistic": [score], "diverged": False}
    assert chosen_rate(made, "cifar10", "simclr", "muon", "small") == (0.04, "small")
    elsewhere = {key: result for key, result in stored.items() if result["start"] == "standard"}
    assert chosen_rate(elsewhere | made, "cifar10", "simclr", "muon", "small") == (0.04, "small")


def invented(method, seed, k, theory, beside, start="standard", **more):
    equal = {"k": 6, "theory": theory, "theory_2k": theory + 0.1, "pca": 0.2, "pca_measured": 0.1, "chance": 0.01}
    about = {
        "key": f"{method}{seed}{start}",
        "loss": "simclr",
        "method": method,
        "seed": seed,
        "start": start,
        "lr": 3.0,
    }
    about |= {
        "stage": "final",
        "data": "cifar10",
        "steps": 9,
        "diverged": False,
        "rate_from": "standard",
        "spans": [{"k": 1}, {"k": k}],
        "equal": equal,
    }
    return about | {"beside": [{"method": m, "seed": s, "overlap": o} for m, s, o in beside]} | more


def test_the_page_shows_overlaps_of_runs_that_have_both_methods(tmp_path):
    path = tmp_path / "span.jsonl"
    runs = [
        invented("lars", 0, 6, 0.5, []),
        invented("muon", 0, 8, 0.3, [("lars", 0, 0.7)], lr=0.08),
        invented("lars", 1, 8, 0.4, [("lars", 0, 0.6)]),
        invented("muon", 1, 6, 0.2, [("muon", 0, 0.8), ("lars", 1, 0.5)], lr=0.08),
        invented("lars", 2, 9, 0.9, [("lars", 0, 0.1)]),  # without Muon
        invented("lars", 0, 3, 0.1, [], key="shorter", steps=3),
        invented("lars", 0, 3, 0.1, [], key="elsewhere", data="stl10", steps=99),
        invented("lars", 0, 6, 0.5, [], "small"),
        invented("muon", 0, 6, 0.5, [("lars", 0, 0.25)], "small"),
        invented("lars", 1, 6, 0.5, [], "small", diverged=True, spans=[]),
    ]
    path.write_text("".join(json.dumps(run) + "\n" for run in runs))
    small, standard = page.span_table(path).splitlines()[2:]
    cells = [cell.strip() for cell in standard.strip("|").split("|")]
    assert cells[:6] == ["standard", "SimCLR", "3, 0.08", "2", "7, 7", "6"]
    assert cells[6:] == [
        *["0.450, 0.250", "0.550, 0.350", "0.200, 0.200", "–, –", "0.100, 0.100"],
        *["0.010", "0.600", "0.600, 0.800"],
    ]
    assert "| small | SimCLR | 3*, 3* | 1 |" in small
    assert small.endswith("| 0.250 | –, – |")


def test_the_leading_eigenvalue_of_a_linear_network_is_that_of_its_inputs():
    x_a, x_b = np.random.default_rng(0).standard_normal((2, 30, 6)) * np.linspace(3, 1, 6)
    x_b = x_a + 0.1 * x_b
    found = leading_gamma(Linear(), torch.tensor(np.concatenate([x_a, x_b]), dtype=torch.float32))
    with_bias = [np.hstack([x, np.ones((30, 1))]) for x in (x_a, x_b)]
    assert found == pytest.approx(Correlation.from_pairs(*with_bias).eigenvalues[0], rel=1e-5)
