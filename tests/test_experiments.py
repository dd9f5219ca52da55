"""Every figure, run for real on embedded data."""

import json

import numpy as np
import pytest
import torch

from stairwise.checks import InputError
from stairwise.data.images import load
from stairwise.experiments import fig1ab, fig2ab
from stairwise.experiments.experiment import CATALOG, Claim, label, page, run
from stairwise.experiments.outlook import outlook_on_features
from stairwise.files import save_arrays
from stairwise.nets.encoder import build_encoder, build_network

# the first three steps, where the full figure takes minutes
SHORTER = {"fig2ab": {"steps": "1400"}, "width": {"widest": "600", "d": "2", "steps": "1500"}}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {name: run(name, tmp_path_factory.mktemp("results"), SHORTER.get(name)) for name in CATALOG}


@pytest.mark.parametrize("name", CATALOG)
def test_claims_hold(results, name):
    assert results[name].claims
    assert [claim for claim in results[name].claims if not claim.holds] == []


@pytest.mark.parametrize("name", CATALOG)
def test_files(results, name):
    folder = results[name].folder
    assert sorted(p.name for p in folder.iterdir()) == ["arrays.npz", "check.json", "figure.pdf", "figure.png"]
    record = json.loads((folder / "check.json").read_text())
    assert record["versions"]["numpy"] == np.__version__
    assert len(record["claims"]) == len(results[name].claims)
    assert (folder / "figure.png").stat().st_size > 20_000


@pytest.mark.parametrize("name", CATALOG)
def test_label_and_page(results, name, tmp_path):
    assert f"stairwise reproduce {name}" in label(name)
    page(results[name]).write(tmp_path / "page.html")
    assert results[name].claims[0].text in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name", CATALOG)
def test_read_back(results, name):
    again = run(name, results[name].folder.parent, SHORTER.get(name))
    assert again.cached
    assert again.claims == results[name].claims


def test_checks_can_fail(results):
    arrays = dict(results["fig1ab"].arrays)
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


def test_outlook_on_features(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((400, 12)) * np.linspace(2, 0.2, 12)
    for view in "ab":
        np.save(tmp_path / f"{view}.npy", (base + 0.1 * rng.standard_normal(base.shape)).astype(np.float32))
    found = outlook_on_features(tmp_path / "a.npy", tmp_path / "b.npy", 4, 1e-5, 1e-3, 50, 0)
    summary = found.summary()
    np.testing.assert_allclose(summary["gamma"], found.corr.eigenvalues[:4])
    assert (np.diff(summary["step_times"]["median"]) > 0).all()
    assert (summary["step_times"]["q05"] <= summary["step_times"]["q95"]).all()
    found.draw(tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 20_000
    assert "largest stable learning rate" in found.text()
    with pytest.raises(InputError, match="must end in"):
        found.draw(tmp_path / "out.txt")
