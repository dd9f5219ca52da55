"""Probes against scikit-learn, and what they must not do to a network."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.preprocessing import StandardScaler

from stairwise.checks import InputError, RunWarning
from stairwise.data.feed import Resident
from stairwise.data.images import Images, load
from stairwise.evaluate.classifiers import PROBES, STRENGTHS, fit_logistic, knn_probe, logistic_probe, ridge_probe
from stairwise.evaluate.representations import eval_mode, probe_rows, represent
from stairwise.nets.encoder import build_encoder, build_network


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X[:, ::3], dtype=torch.float32)  # hard enough for errors to be made
    y = torch.tensor(y)
    return X[:1200], y[:1200], X[1200:], y[1200:]


def test_logistic_is_scikit_learns(digits):
    X, y, X_test, y_test = digits
    scaler = StandardScaler().fit(X)
    theirs = LogisticRegression(C=1.0, max_iter=2000, tol=1e-8).fit(scaler.transform(X), y)
    x = torch.tensor(scaler.transform(X), dtype=torch.float64)
    weights = fit_logistic(x, y, 1.0, 500).numpy()
    assert np.abs(weights[:-1].T - theirs.coef_).max() < 2e-3
    expected = theirs.score(scaler.transform(X_test), y_test)
    assert logistic_probe(X, y, X_test, y_test) == pytest.approx(expected, abs=2.1 / len(y_test))


@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0])
def test_logistic_in_float32_is_at_scikit_learns_optimum(strength, digits):
    """Also where classes are nearly separable, features are redundant and one is constant."""
    X, y, X_test, _ = digits
    X, X_test = (torch.cat([Z, Z[:, :5] + Z[:, 5:10], torch.ones(len(Z), 1)], dim=1) for Z in (X, X_test))
    scaler = StandardScaler().fit(X)
    x, x_test = scaler.transform(X), scaler.transform(X_test)
    theirs = LogisticRegression(C=strength, max_iter=5000, tol=1e-6).fit(x, y)
    ours = fit_logistic(torch.tensor(x, dtype=torch.float32), y, strength).numpy()

    def loss(W, b):
        scores = x @ W + b
        fit = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), y]
        return fit.mean() + (W**2).sum() / (2 * strength * len(y))

    assert abs(loss(ours[:-1], ours[-1]) - loss(theirs.coef_.T, theirs.intercept_)) < 1e-3
    guesses = (x_test @ ours[:-1] + ours[-1]).argmax(axis=1)
    assert (guesses != theirs.predict(x_test)).sum() <= 1


def test_strength_is_chosen_without_the_test_rows(digits):
    X, y, X_test, y_test = digits
    known = y[:400].clone()
    known[::3] = known[::3].roll(1)  # wrong labels, which a fit without penalty would learn
    scores = [logistic_probe(X[:400], known, X_test, y_test, strength) for strength in STRENGTHS]
    tuned = logistic_probe(X[:400], known, X_test, y_test, strength=None)
    assert tuned in scores
    assert tuned > scores[-1]
    chosen = STRENGTHS[scores.index(tuned)]
    other = y_test.flip(0)
    assert PROBES["logistic_tuned"](X[:400], known, X_test, other) == logistic_probe(
        X[:400], known, X_test, other, chosen
    )
    assert logistic_probe(X[:12], y[:12], X_test, y_test, strength=None) > 0.1  # too few rows to hold some out


def test_strength_is_chosen_where_labels_are_periodic(digits):
    """Rows 0, 10, 20, … are all of one class, so every tenth row would be no sample."""
    X, y, X_test, y_test = digits
    rows = torch.stack([torch.where(y == c)[0][:40] for c in range(10)], dim=1).flatten()
    assert y[rows].tolist() == list(range(10)) * 40
    random = torch.Generator().manual_seed(0)
    wrong = torch.rand(400, generator=random) < 0.3
    known = torch.where(wrong, torch.randint(0, 10, (400,), generator=random), y[rows])
    known = torch.where(torch.arange(400) % 10 == 0, 0, known)
    scores = [logistic_probe(X[rows], known, X_test, y_test, strength) for strength in STRENGTHS]
    assert logistic_probe(X[rows], known, X_test, y_test, strength=None) > scores[-1]


def test_a_fit_that_has_not_converged_says_so(digits):
    X, y, X_test, y_test = digits
    for rounds in (3, 10):
        with pytest.warns(RunWarning, match=f"has not converged in {rounds} rounds.*raise rounds"):
            logistic_probe(X, y, X_test, y_test, rounds=rounds)
    logistic_probe(X, y, X_test, y_test)  # warnings are errors in tests
    with pytest.raises(InputError, match="rounds must be a whole number"):
        logistic_probe(X, y, X_test, y_test, rounds=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logistic_on_the_gpu(digits):
    X, y, _, _ = digits
    x = (X - X.mean(dim=0)) / X.std(dim=0).clamp(min=1e-6)
    there = fit_logistic(x.cuda(), y.cuda(), 1.0).cpu()
    assert torch.allclose(there, fit_logistic(x, y, 1.0), atol=1e-2)


def test_collapsed_features_are_fitted(digits):
    """One direction, many times over: products of features that have no inverse."""
    X, y, _, _ = digits
    same = X[:, 3:4].repeat(1, 64)
    assert logistic_probe(same, y, same, y, strength=None) >= logistic_probe(X[:, 3:4], y, X[:, 3:4], y) - 0.02


def test_ridge_is_scikit_learns(digits):
    X, y, X_test, y_test = digits
    scaler = StandardScaler().fit(X)
    theirs = RidgeClassifier(alpha=1e-3 * len(X)).fit(scaler.transform(X), y)
    assert ridge_probe(X, y, X_test, y_test) == pytest.approx(theirs.score(scaler.transform(X_test), y_test), abs=1e-3)


def test_knn_is_the_rule(digits):
    X, y, X_test, y_test = digits
    a, b = (Z / np.linalg.norm(Z, axis=1, keepdims=True) for Z in (X.numpy(), X_test.numpy()))
    right = 0
    for row, answer in zip(b, y_test.numpy(), strict=True):
        cos = a @ row
        near = np.argsort(-cos)[:50]
        votes = [sum(np.exp(cos[i] / 0.1) for i in near if y[i] == c) for c in range(10)]
        right += int(np.argmax(votes) == answer)
    assert knn_probe(X, y, X_test, y_test, k=50) == pytest.approx(right / len(y_test), abs=1.1 / len(y_test))
    assert knn_probe(X[:20], y[:20], X_test, y_test, k=200) > 0.2  # fewer points than neighbours


@pytest.mark.parametrize("name", PROBES)
def test_bad_input(name, digits):
    X, y, X_test, y_test = digits
    for arguments in (
        (X, y[:5], X_test, y_test),
        (X, y, X_test[:, :3], y_test),
        (X * float("nan"), y, X_test, y_test),
        (X, torch.zeros_like(y), X_test, y_test),
        (X[:0], y[:0], X_test, y_test),
    ):
        with pytest.raises(InputError):
            PROBES[name](*arguments)


def test_probing_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.manual_seed(0)
    images = load("photos")
    encoder = build_encoder("resnet18", {"width": 8, "stem": "small"})
    network = build_network(encoder, torch.zeros(2, 3, 32, 32), [8], 3)
    network.backbone.layer1.eval()  # a part that its user has frozen
    modes = [m.training for m in network.modules()]
    state = {k: v.clone() for k, v in network.state_dict().items()}
    random = torch.get_rng_state()
    feed = Resident(images.pixels, torch.device("cpu"))
    h, z = represent(network, feed, torch.arange(70), 32, torch.zeros(3), torch.ones(3), batch=32)
    assert (h.shape, z.shape, h.requires_grad) == ((70, 64), (70, 3), False)
    assert [m.training for m in network.modules()] == modes
    assert torch.backends.cudnn.benchmark
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    with eval_mode(network):
        torch.rand(3)
        assert not any(m.training for m in network.modules())
    assert [m.training for m in network.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_probe_rows():
    def images(n, training=None, labels=True):
        return Images("toy", np.zeros((n, 1, 1, 1)), np.zeros(n) if labels else None, training)

    rows, held = probe_rows(images(13, 5), pretrained=9)  # STL-10's way: train + part of test
    assert (rows.tolist(), held.tolist()) == ([0, 1, 2, 3, 4], [9, 10, 11, 12])
    rows, held = probe_rows(images(6, 4), pretrained=4)
    assert (rows.tolist(), held.tolist()) == ([0, 1, 2, 3], [4, 5])
    rows, held = probe_rows(images(10), pretrained=10)
    assert held.tolist() == [0, 5]
    assert set(rows.tolist()) | {0, 5} == set(range(10))
    rows, held = probe_rows(images(60_000, 50_000), pretrained=50_000, most=5000)
    assert (len(rows), len(held), int(rows[-1])) == (5000, 5000, 49_999)
    with pytest.raises(InputError, match="labels"):
        probe_rows(images(4, labels=False), 4)
