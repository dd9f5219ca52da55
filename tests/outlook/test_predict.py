"""`sw.predict`: the staircase from pairs."""

import numpy as np
import pytest

import stairwise as sw
from stairwise.checks import InputError
from stairwise.data.pairs import read_pairs


@pytest.fixture
def pairs(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.standard_normal((400, 12)) * np.linspace(2, 0.2, 12)
    for view in "ab":
        np.save(tmp_path / f"{view}.npy", (base + 0.1 * rng.standard_normal(base.shape)).astype(np.float32))
    return read_pairs(str(tmp_path / "a.npy"), str(tmp_path / "b.npy"))


def test_step_times_and_gamma(pairs):
    outlook = sw.predict(pairs.x_a, pairs.x_b, d=4, alpha=1e-5, lr=1e-3, draws=50)
    gamma = sw.Correlation.from_pairs(pairs.x_a, pairs.x_b).eigenvalues[:4]
    np.testing.assert_allclose(outlook.gamma, gamma)
    assert (np.diff(outlook.step_times) > 0).all()
    assert (outlook.low <= outlook.step_times).all()
    assert (outlook.step_times <= outlook.high).all()
    assert outlook.lr_bound == pytest.approx(1 / (4 * gamma[0]))


def test_the_prediction_is_what_descent_does(pairs):
    """Median and interval agree with simulated descent from the same kind of initialization."""
    outlook = sw.predict(pairs.x_a, pairs.x_b, d=4, alpha=1e-5, draws=50)
    corr = sw.Correlation.from_pairs(pairs.x_a, pairs.x_b)
    t = np.linspace(0, 1.5 * outlook.high.max(), 2000)
    W0 = sw.gaussian_init(4, corr.features, 1e-5, seed=1)
    simulated = sw.gradient_flow(W0, corr, t).step_times()
    assert simulated[:3] == pytest.approx(outlook.step_times[:3], rel=0.1)


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.003), ("muon", 0.02)])
def test_the_step_number_is_the_first_update_after_the_step(pairs, optimizer, lr):
    outlook = sw.predict(pairs.x_a, pairs.x_b, d=3, alpha=1e-5, lr=lr, optimizer=optimizer, draws=200)
    corr = sw.Correlation.from_pairs(pairs.x_a, pairs.x_b)
    rule, updates = {"sgd": "gradient", "muon": "spectral"}[optimizer], int(1.5 * outlook.high.max() / lr)
    firsts = []
    for seed in range(15):
        W0 = sw.gaussian_init(3, corr.features, 1e-5, seed)
        run = sw.gradient_descent(W0, corr, lr, updates, record_every=1, rule=rule)
        firsts.append((run.eigenvalues >= 0.5).argmax(axis=0))
    shown = [float(row[-1].replace(",", "")) for row in outlook.table().rows]
    assert shown == pytest.approx(np.median(firsts, axis=0), rel=0.03, abs=1)
    assert shown == [np.ceil(t / lr) for t in outlook.step_times]


@pytest.mark.parametrize("lr", [None, 0.01])
def test_muon(pairs, lr):
    """The median of simulated spectral flow or descent; half-way times go as 1/√γ."""
    outlook = sw.predict(pairs.x_a, pairs.x_b, d=3, alpha=1e-5, lr=lr, optimizer="muon", draws=30)
    corr = sw.Correlation.from_pairs(pairs.x_a, pairs.x_b)
    end, steps = 1.5 * outlook.high.max(), []
    for seed in range(7):
        W0 = sw.gaussian_init(3, corr.features, 1e-5, seed)
        if lr is None:
            run = sw.gradient_flow(W0, corr, np.linspace(0, end, 400), rtol=1e-6, rule="spectral")
        else:
            run = sw.gradient_descent(W0, corr, lr, int(end / lr), rule="spectral")
        steps.append(run.step_times())
    assert np.median(steps, axis=0) == pytest.approx(outlook.step_times, rel=0.03)
    assert outlook.step_times[:2] == pytest.approx((2 * outlook.gamma[:2]) ** -0.5, rel=0.05)
    assert outlook.lr_bound == np.inf
    assert outlook.summary()["optimizer"] == "muon"
    assert outlook.table().title.endswith(", Muon")
    assert "the prediction needs a < 1" in outlook.text()
    a = (lr or 0.0) * np.sqrt(outlook.gamma[0])
    assert f"2a + a² = {2 * a + a * a:.2g} of 1" in outlook.text() or lr is None


def test_what_it_shows(pairs, tmp_path):
    outlook = sw.predict(pairs.x_a, pairs.x_b, d=4, lr=1e-3, name=pairs.name)
    table = outlook.table()
    assert table.header[-1] == "step number"
    assert [row[0] for row in table.rows] == ["1", "2", "3", "4"]
    assert "a.npy, b.npy: 400 pairs, 12 features, linear model" in str(outlook)
    assert "largest stable learning rate" in outlook.text()
    assert outlook.summary()["step_times"]["median"] is outlook.step_times
    figure = outlook.draw(tmp_path / "out.png")
    assert len(figure.axes) >= 2
    assert (tmp_path / "out.png").stat().st_size > 20_000
    with pytest.raises(InputError, match="must end in"):
        outlook.draw(tmp_path / "out.txt")


def test_without_a_dimension_there_are_as_many_as_the_data_have(pairs):
    assert len(sw.predict(pairs.x_a, pairs.x_b, d=None).gamma) == 10
    few = sw.predict(pairs.x_a[:3], pairs.x_b[:3], d=None)
    gamma = sw.Correlation.from_pairs(pairs.x_a[:3], pairs.x_b[:3]).eigenvalues
    assert len(few.gamma) == (gamma > 1e-9 * gamma[0]).sum() < 10
    narrow = sw.predict(pairs.x_a[:, :4], pairs.x_b[:, :4], d=None)
    assert len(narrow.gamma) == 4


def test_it_says_that_the_model_is_linear(pairs):
    outlook = sw.predict(pairs.x_a, pairs.x_b, d=2)
    assert "linear model" in outlook.table().title
    assert "for a linear model, f(x) = W x" in outlook.text()
    assert outlook.summary()["model"] == "linear"


def test_bad_input(pairs):
    with pytest.raises(InputError, match="d must be at most 12"):
        sw.predict(pairs.x_a, pairs.x_b, d=13)
    with pytest.raises(InputError, match="same shape"):
        sw.predict(pairs.x_a, pairs.x_b[:-1])
    with pytest.raises(InputError, match="lr must be greater than 0"):
        sw.predict(pairs.x_a, pairs.x_b, d=2, lr=0.0)
    with pytest.raises(InputError, match=r"optimizer is unknown.*did you mean 'muon'"):
        sw.predict(pairs.x_a, pairs.x_b, d=2, optimizer="moun")
