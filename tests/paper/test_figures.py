"""Every figure, computed on built-in data."""

import html
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.archives import save_arrays
from stairwise.checks import InputError
from stairwise.data.images import load
from stairwise.figures.style import RC
from stairwise.files import plain, save_json
from stairwise.nets.encoder import build_encoder, build_network
from stairwise.paper import coming, fig1ab, fig2ab, fig7, harness
from stairwise.paper.fig5 import together
from stairwise.paper.harness import CATALOG, Claim, from_stored, label, page, run, smoke_settings, store, stored_names
from stairwise.paper.trained import SMOKE, steps_of
from stairwise.runs.reader import Run
from stairwise.theory.spectra import bimodality, grown
from stairwise.training.recipe import load_recipe, recipe_names, recipe_of
from stairwise.training.studies import stored_study

pytestmark = pytest.mark.slow
TRAINED = [name for name in CATALOG if "smoke" in smoke_settings(name)]  # of networks that train for minutes on a GPU


# all tests of a figure, and all figures of the same runs, are run by one worker (tests/conftest.py)
EVERY = [pytest.param(name, id=f"{'trained' if name in TRAINED else name}:{name}") for name in CATALOG]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings with which each figure takes seconds."""
    runs = str(tmp_path_factory.mktemp("runs"))
    return {name: smoke_settings(name) | ({"runs": runs} if name in TRAINED else {}) for name in CATALOG}


@pytest.fixture(scope="module")
def results(tmp_path_factory, settings):
    class Results(dict):
        """Made when they are first asked for."""

        def __missing__(self, name):
            self[name] = run(name, tmp_path_factory.mktemp("results"), settings[name])
            return self[name]

    return Results()


@pytest.mark.parametrize("name", EVERY)
def test_claims_hold(results, name):
    assert results[name].claims
    if name not in TRAINED:
        assert [claim for claim in results[name].claims if not claim.holds] == []


@pytest.mark.parametrize("name", EVERY)
def test_files(results, name):
    folder = results[name].folder
    assert sorted(p.name for p in folder.iterdir()) == ["arrays.npz", "check.json", "figure.pdf", "figure.png"]
    record = json.loads((folder / "check.json").read_text())
    assert record["versions"]["numpy"] == np.__version__
    assert len(record["claims"]) == len(results[name].claims)
    assert (folder / "figure.png").stat().st_size > 20_000


def test_fonts_of_figures_are_truetype(tmp_path, monkeypatch, font_type):
    """Publishers refuse others (Type 3)."""
    monkeypatch.setitem(RC, "pdf.fonttype", font_type)
    drawn = (run("fig8", tmp_path).folder / "figure.pdf").read_bytes()
    assert b"/FontFile2" in drawn
    assert b"/Type3" not in drawn


@pytest.mark.parametrize("name", EVERY)
def test_label_and_page(results, name, tmp_path):
    assert f"stairwise reproduce {name}" in label(name)
    page(results[name]).write(tmp_path / "page.html")
    assert html.escape(results[name].claims[0].text) in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", EVERY)
def test_read_back(results, settings, name):
    again = run(name, results[name].folder.parent, settings[name])
    assert again.cached
    assert repr(again.claims) == repr(results[name].claims)  # nan is not equal to itself


@pytest.mark.parametrize("name", EVERY)
def test_stored_results_are_drawn_again(results, name, tmp_path):
    files = store(results[name], tmp_path / "stored")
    assert [path.name for path in files] == [f"{name}.npz", f"{name}.json", f"{name}.png"]
    assert stored_names(tmp_path / "stored") == [name]
    again = from_stored(name, tmp_path, tmp_path / "stored")
    assert repr(again.claims) == repr(results[name].claims)
    assert (again.folder / "figure.png").stat().st_size > 20_000
    page(again).write(tmp_path / "page.html")


@pytest.mark.parametrize("name", ["fig8"], ids=["fig8:fig8"])
def test_large_arrays_are_not_stored(results, name, tmp_path, monkeypatch):
    monkeypatch.setattr("stairwise.paper.harness.LARGEST", 10.0)
    with pytest.raises(InputError, match="to be stored"):
        store(results[name], tmp_path)


def invented(folder, name, rates, hidden_lag=0.0, small=True):
    """A simulated finished run: logistic staircases in all spectra, and probes; it has followed no views."""
    t = np.linspace(0, 40, 400)
    start = 1e-6 if small else 1e-7

    def stairs(times):
        return 1 / (1 + np.exp(-8 * np.outer(times, rates)) / start)

    recipe = load_recipe(name, {"follow": 0})
    facts = {"recipe": recipe.plain(), "alpha": 0.1, "steps": 4000, "batch": 64, "training_images": 9000}
    save_json(folder / "recipe.json", facts | {"device": "none", "commit": "", "made": ""})
    lines = []
    for i, (time, lam, late) in enumerate(zip(t, stairs(t), stairs(t - hidden_lag), strict=True)):
        record = {"step": 10 * (i + 1), "t": time + 0.1, "loss": ((1 - lam) ** 2).sum(), "seconds": 1.0 * i}
        record |= {"eigenvalues": lam, "covariance": lam, "normalized": lam, "hidden": 5 * late}
        record |= {"logistic": 0.5 + i / 1000 + 0.02 * (not small)} if i % 50 == 49 else {}
        lines.append(json.dumps(plain(record)))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_experiments_find_what_is_in_runs(tmp_path):
    """Twelve modes rise one by one and four never do; hidden modes rise at the same times."""
    rates = np.concatenate([1 / np.arange(1, 13), np.full(4, 1e-4)])
    for method in ("bt", "simclr", "vicreg"):
        for kind in ("", "-small", *(["-small-x4"] if method == "simclr" else [])):
            invented(tmp_path / "runs" / f"stl10-{method}{kind}", f"stl10-{method}{kind}", rates, small=bool(kind))
    for name in ("fig1cd", "fig2cf", "fig3", "fig4", "fig5", "fig7"):
        result = run(name, tmp_path, {"runs": str(tmp_path / "runs")})
        failed = [claim for claim in result.claims if not claim.holds]
        # these steps overlap, so that the shape of a spectrum moves all the time
        others = [claim.text for claim in failed if "shape of the spectrum" not in claim.text]
        # predictions for runs of other lengths
        assert [text for text in others if not text.endswith("predicted later")] == [], name
    found = run("fig1cd", tmp_path, {"runs": str(tmp_path / "runs")})
    assert found.cached
    steps = steps_of(found.arrays, "C")
    assert steps.modes.tolist() == list(range(12))
    assert steps.times == pytest.approx(0.1 + np.log(1e6) / (8 * rates[:12]), rel=0.02)
    # two runs, two rows
    invented(tmp_path / "runs" / "stl10-bt-small-fast", "stl10-bt-small-fast", 2 * rates)
    both = run("fig1cd", tmp_path, {"runs": str(tmp_path / "runs"), "fast": True})
    assert both.holds
    assert len(both.claims) == 2 * len(found.claims)
    assert steps_of(both.arrays, "fast C").times[-1] < steps.times[-1]
    for name in ("fig5", "fig7"):
        few, more = (
            run(name, tmp_path, {"runs": str(tmp_path / "runs"), "methods": "bt", "fast": fast})
            for fast in (False, True)
        )
        assert all(claim.holds for claim in more.claims if "shape of the spectrum" not in claim.text)
        assert len(more.claims) == 2 * len(few.claims)
        with pytest.raises(InputError, match="methods must be bt"):
            run(name, tmp_path, {"runs": str(tmp_path / "runs"), "fast": True})
    # a run that changes is read again, and checks can fail
    invented(tmp_path / "runs" / "stl10-bt-small", "stl10-bt-small", rates[8:], hidden_lag=3.0)
    again = run("fig1cd", tmp_path, {"runs": str(tmp_path / "runs")})
    assert not again.cached
    assert not again.holds
    lagging = run("fig5", tmp_path, {"runs": str(tmp_path / "runs"), "methods": "bt"})
    assert together(lagging.arrays, "bt")[""][3] == pytest.approx(3.0 / 40, abs=0.01)
    assert not lagging.holds


def test_runs_of_other_recipes_are_refused(tmp_path):
    runs = tmp_path / "runs"
    invented(runs / "stl10-bt-small", "stl10-simclr-small", np.ones(4))
    with pytest.raises(InputError, match="a run of its recipe"):
        run("fig1cd", tmp_path, {"runs": str(runs)})
    with pytest.raises(InputError, match="must be bt"):
        run("fig1cd", tmp_path, {"runs": str(runs), "methods": "simclr"})
    with pytest.raises(InputError, match="must include bt"):
        run("table1", tmp_path, {"runs": str(runs), "methods": "simclr", "large": True})
    with pytest.raises(InputError, match="at least two"):
        run("table2", tmp_path, {"runs": str(runs), "methods": "bt"})


@pytest.mark.parametrize("spectrum", [np.logspace(0, -8, 512), np.arange(1, 513.0) ** -2, np.full(9, 2.0)])
def test_spectra_without_bands_have_no_valley(spectrum):
    assert bimodality(spectrum) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_random_spectra_without_bands(seed):
    """The threshold is at the widest gap, so random gaps must not count, except with few modes."""
    rng = np.random.default_rng(seed)
    featureless = {
        "log-uniform": np.exp(-9 * rng.random(512)),
        "log-normal": np.exp(2 * rng.standard_normal(512)),
        "power law": np.arange(1, 513) ** -2.0 * np.exp(0.1 * rng.standard_normal(512)),
        "long tail": rng.exponential(size=512) ** 3,
    }
    for name, spectrum in featureless.items():
        assert bimodality(spectrum) < 0.4, name
    banded = np.concatenate([10 * np.exp(0.4 * rng.standard_normal(25)), featureless["log-normal"] / 1e4])
    assert bimodality(banded) > 0.9


def test_no_random_spectrum_of_128_modes_has_bands_like_vicregs():
    """What docs/results/fig3.md says of VICReg's valley and gap; a depth of 0.5 alone is not rare enough."""
    rng = np.random.default_rng(0)
    kinds = {
        "log-uniform": lambda: np.exp(-9 * rng.random(128)),
        "log-uniform over five decades": lambda: 10 ** (-5 * rng.random(128)),
        "log-normal": lambda: np.exp(2 * rng.standard_normal(128)),
        "power law": lambda: np.arange(1, 129) ** -2.0 * np.exp(0.1 * rng.standard_normal(128)),
        "long tail": lambda: rng.exponential(size=128) ** 3,
    }
    for name, draw in kinds.items():
        spectra = [np.sort(draw())[::-1] for _ in range(500)]
        depths = np.array([bimodality(lam) for lam in spectra])
        assert (depths >= 0.5).mean() <= (0.21 if "five" in name else 0.1), name
        assert depths.max() < 0.926, name
        assert max(lam[n - 1] / lam[n] for lam in spectra if 0 < (n := grown(lam)[0]) < 128) < 3.41, name
    # what the page and the docstring of `bimodality` say of other numbers of modes: 2 %, 0.1 % and 70 %
    for modes, bar, least, most in ((512, 0.4, 0.0, 0.04), (512, 0.5, 0.0, 0.01), (32, 0.5, 0.63, 0.75)):
        depths = np.array([bimodality(10 ** (-5 * rng.random(modes))) for _ in range(500)])
        assert least <= (depths >= bar).mean() <= most


@pytest.mark.parametrize("name", ["table1"], ids=["trained:table1"])
def test_a_study_of_other_weights_is_made_again(settings, results, name, tmp_path):
    assert results[name].claims  # it has trained and studied them
    runs = Path(settings[name]["runs"])
    folder = tmp_path / "smoke-bt-d50"
    shutil.copytree(runs / "smoke-bt-d50", folder)
    how = 40, 0, "cpu", "float16", lambda *_: None
    before = stored_study(Run(folder), *how, views="barlow")[0]
    assert before == json.loads((runs / "smoke-bt-d50" / "ntk" / "barlow-0" / "tangent.json").read_text())["scores"]
    sw.train(recipe_of(Run(folder)).with_settings({"seed": 5}), folder, device="cpu", restart=True)
    assert stored_study(Run(folder), *how, views="barlow")[0] != before


@pytest.mark.parametrize("name", ["table1", "table2", "coming"], ids=[f"trained:{x}" for x in ("1", "2", "coming")])
def test_studies_outlive_the_weights(settings, results, name, tmp_path):
    """Weights stay where the runs were trained; tables are made again from the studies that came with the records."""
    first, runs = results[name], tmp_path / "runs"
    shutil.copytree(settings[name]["runs"], runs, ignore=shutil.ignore_patterns("checkpoints", "weights"))
    again = run(name, tmp_path, settings[name] | {"runs": str(runs)})
    assert repr(again.claims) == repr(first.claims)
    for key, values in first.arrays.items():
        assert np.array_equal(again.arrays[key], values, equal_nan=values.dtype.kind == "f"), key


def test_smoke_runs_of_another_version_are_trained_again(tmp_path):
    settings = smoke_settings("fig2cf") | {"runs": str(tmp_path / "runs"), "methods": "vicreg"}
    run("fig2cf", tmp_path, settings)
    recipe = tmp_path / "runs" / "smoke-vicreg-small" / "recipe.json"
    facts = json.loads(recipe.read_text())
    facts["recipe"]["encoder_options"]["width"] *= 2
    recipe.write_text(json.dumps(facts))
    run("fig2cf", tmp_path, settings, force=True)
    assert json.loads(recipe.read_text())["recipe"]["encoder_options"] == SMOKE["encoder_options"]


def test_long_runs_need_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match=r"GPU.*--from-stored"):
        run("fig3", tmp_path, {"runs": str(tmp_path)})
    with pytest.raises(InputError, match="methods is unknown"):
        run("fig3", tmp_path, {"runs": str(tmp_path), "methods": "byol"})


@pytest.mark.parametrize("name", ["fig1ab"], ids=["fig1ab:fig1ab"])
def test_checks_can_fail(results, name):
    arrays = dict(results[name].arrays)
    arrays["law"] = arrays["law"] + 0.1
    arrays["law_descent"] = np.roll(arrays["law_descent"], 40, axis=0)
    assert sum(not claim.holds for claim in fig1ab.check(arrays)) >= 3
    assert not Claim.close("x", 1.0, 2.0, 0.5).holds
    assert not Claim.at_most("x", np.nan, 1.0).holds


def test_results_of_an_older_experiment_are_run_again(tmp_path):
    first = run("fig8", tmp_path)
    arrays = {key: value for key, value in first.arrays.items() if key != sorted(first.arrays)[0]}
    save_arrays(first.folder / "arrays.npz", arrays)
    again = run("fig8", tmp_path)
    assert set(again.arrays) == set(first.arrays)
    assert again.claims == first.claims


def test_tangent_kernel_is_the_gradients_product():
    """K̃ = (1/d) Σ_k ∇f_k(x)·∇f_k(x'), by autograd."""
    torch.manual_seed(0)
    network = build_network(
        build_encoder("mlp", {"inputs": 12, "widths": [40]}), torch.zeros(2, 3, 2, 2), [], 3, bias=True
    )
    x = torch.randn(5, 3, 2, 2)
    rows = []
    for point in x:
        z = network(point[None])[1][0]
        gradients = [torch.autograd.grad(z[k], list(network.parameters()), retain_graph=True) for k in range(3)]
        rows.append(torch.stack([torch.cat([g.flatten() for g in one]) for one in gradients]))
    J = torch.stack(rows)  # (points, outputs, parameters)
    expected = torch.einsum("ikp,jkp->ij", J, J) / 3
    assert fig2ab.tangent_kernel(network, x) == pytest.approx(expected.numpy(), rel=1e-5)


def test_settings_name_the_folder(tmp_path):
    result = run("fig6", tmp_path, {"alpha": "1e-6", "seed": 3})
    assert result.folder.name == "fig6,alpha=1e-06,seed=3"


def test_long_settings_name_different_folders(tmp_path):
    """Names are cut; figures of several runs are made at the same time."""
    far = "x" * 200
    names = [harness._folder_name("fig7", fig7.Config(runs=far, only=only)) for only in ("small", "standard")]
    assert len(set(names)) == 2
    assert all(len(name) <= harness.LONGEST for name in names)


@pytest.mark.parametrize(
    ("name", "method"), [("fig2cf", "simclr"), ("fig5", "simclr"), ("coming", "simclr"), ("fig1cd", "bt")]
)
@pytest.mark.parametrize("kind", ["standard", "plain"])
def test_figures_of_small_initialization_refuse_others(tmp_path, name, method, kind):
    with pytest.raises(InputError, match="only is unknown"):
        run(name, tmp_path, {"runs": str(tmp_path), "methods": method, "only": kind})


def test_byol_has_two_kinds_of_runs(tmp_path):
    with pytest.raises(InputError, match="only is unknown"):
        run("byol", tmp_path, {"runs": str(tmp_path), "only": "x4"})


def test_unfinished_runs_are_not_trained(tmp_path):
    """A log without a record, as of a run that compiles, or of one that failed."""
    folder = tmp_path / "runs" / "stl10-simclr"
    invented(folder, "stl10-simclr", np.ones(4), small=False)
    (folder / "metrics.jsonl").write_text("")
    settings = {"runs": str(tmp_path / "runs"), "methods": "simclr", "device": "cpu", "unfinished": True}
    with pytest.raises(InputError, match=r"stl10-simclr must have begun .*unfinished=true to train it"):
        run("fig3", tmp_path, settings)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["bt-x4", "simclr", "vicreg"]),
        ({"only": "x4", "methods": "bt,simclr"}, ["bt-x4", "simclr-x4"]),
        ({"only": "small"}, ["bt", "simclr", "vicreg"]),
        ({"d50": True}, ["bt-d50", "simclr-d50", "vicreg-d50"]),
    ],
)
def test_one_run_has_one_name(settings, names):
    config = coming.Config(**settings)
    found = [coming.studied(config, method) for method in config.chosen()]
    assert [name for name, _ in found] == names
    assert all(name in coming.TITLES for name in names)
    assert all(f"stl10-{name.split('-')[0]}{kind}" in recipe_names() for name, kind in found)


def test_byol_of_a_run_that_has_not_ended(tmp_path):
    """The views may have been followed once more than the log says, or once less."""
    settings = smoke_settings("byol") | {"runs": str(tmp_path / "runs"), "only": "small"}
    whole = run("byol", tmp_path, settings)
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = sorted((folder / "followed").glob("step-*.npz"))[-1]
    for fewer, gone in ((1, None), (0, last)):
        (folder / "metrics.jsonl").write_text("".join(lines[: len(lines) - fewer]))
        if gone:
            gone.unlink()
        part = run("byol", tmp_path, settings | {"unfinished": True}, force=True)
        t = part.arrays["small.t"]
        assert len(t) == len(part.arrays["small.loss"]) == len(part.arrays["small.target"])
        assert t.tolist() == whole.arrays["small.t"][:-1].tolist()
        if fewer:
            assert "of its training" in part.claims[0].text


def test_a_run_without_probes_is_named(tmp_path):
    folder = tmp_path / "runs" / "stl10-simclr"
    invented(folder, "stl10-simclr", np.ones(4), small=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:40]))
    settings = {"runs": str(tmp_path / "runs"), "methods": "simclr", "only": "standard", "unfinished": True}
    with pytest.raises(InputError, match=r"stl10-simclr must have fitted a probe .*: wait"):
        run("fig7", tmp_path, settings)


def test_unfinished_run_is_run_again(tmp_path):
    first = run("fig8", tmp_path)
    (first.folder / "check.json").unlink()
    assert not run("fig8", tmp_path).cached
    (first.folder / "check.json").write_text('{"half')
    assert not run("fig8", tmp_path).cached
    (first.folder / "arrays.npz").unlink()
    assert not run("fig8", tmp_path).cached


def test_changed_data_are_run_again(tmp_path):
    np.save(tmp_path / "x.npy", load("photos").pixels[:60])
    settings = {"data": f"array:{tmp_path / 'x.npy'}", "n": 60, "d": 2}
    run("fig1ab", tmp_path, settings)
    assert run("fig1ab", tmp_path, settings).cached
    np.save(tmp_path / "x.npy", load("photos").pixels[60:130])
    assert not run("fig1ab", tmp_path, settings).cached


def test_interrupted_run_leaves_nothing(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("fig1ab", tmp_path, progress=stop)
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("fig99", {}, "experiment is unknown .*fig1ab"),
        ("fig1ab", {"colour": 1}, "setting is unknown .*known: data, n"),
        ("fig1ab", {"n": "many"}, "n must be of type int"),
        ("fig1ab", {"seed": -1}, "seed must be a nonnegative"),
        ("fig1ab", {"alpha": 1.0}, "alpha must start with all eigenvalues of C below 1"),
        ("fig1ab", {"d": 501}, "d must be at most 500"),
        ("fig6", {"d": 6}, "d must lie between 2 and m = 5"),
        ("fig8", {"start": 0.0}, "start must be greater than 0"),
        ("fig1ab", {"data": "nothing"}, "dataset is unknown"),
        ("fig1ab", {"n": 4, "d": 5}, "d must be at most 4, the number of positive eigenvalues"),
    ],
)
def test_bad_settings(tmp_path, name, settings, words):
    with pytest.raises(InputError, match=words):
        run(name, tmp_path, settings)
    assert not list(tmp_path.iterdir())
