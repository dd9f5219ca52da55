"""Probe curves against training from scratch at every d and t."""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge

from stairwise.checks import InputError
from stairwise.evaluate.probes import probe_curve, ridge_accuracy
from stairwise.kernel.estimator import KernelSSL
from stairwise.theory.modes import Modes

DIGITS = load_digits()
X, Y = DIGITS.data[:900] / 16, DIGITS.target[:900]
EST = KernelSSL(12).fit(X[:300], X_b=X[:300] + 0.1 * np.random.default_rng(0).standard_normal((300, 64)))


def test_every_d_equals_a_fit_of_its_own():
    curve = probe_curve(EST, X[300:600], Y[300:600], X_test=X[600:], y_test=Y[600:])
    for d in (1, 4, 12):
        z, z_test = (EST.transform(part)[:, :d] for part in (X[300:600], X[600:]))
        probe = Ridge(alpha=1e-3 * 300).fit(z, np.eye(10)[Y[300:600]])
        expected = (probe.predict(z_test).argmax(1) == Y[600:]).mean()
        assert curve.accuracy[0, d - 1] == pytest.approx(expected, abs=1e-12)
    fewer = KernelSSL(4, kernel=EST.kernel_).fit(*np.split(EST.blocks_.parts[0], [300])[:1], X_b=EST.blocks_.parts[1])
    np.testing.assert_allclose(np.abs(fewer.transform(X[:5])), np.abs(EST.transform(X[:5])[:, :4]), atol=1e-7)


def test_every_d_starts_like_a_run_of_its_own():
    few = KernelSSL(4, kernel=EST.kernel_).fit(EST.blocks_.parts[0], X_b=EST.blocks_.parts[1])
    t = 2 * Modes(EST.eigenvalues_, 1e-4).step_times()[2]
    parts = {"X_test": X[600:], "y_test": Y[600:], "t": [t]}
    many = probe_curve(EST, X[300:600], Y[300:600], **parts).accuracy[0, :4]
    np.testing.assert_allclose(many, probe_curve(few, X[300:600], Y[300:600], **parts).accuracy[0], atol=0.01)


def test_time():
    steps = Modes(EST.eigenvalues_, 1e-4).step_times()
    curve = probe_curve(EST, X[300:], Y[300:], t=[0.0, steps[3], 3 * steps[-1], np.inf])
    assert curve.accuracy.shape == (4, 12)
    np.testing.assert_allclose(curve.accuracy[2], curve.accuracy[3])  # all learned
    assert curve.accuracy[0, -1] < 0.3 < 0.7 < curve.accuracy[3, -1]
    assert curve.accuracy[1, -1] < curve.accuracy[3, -1]
    assert 0.08 < curve.chance < 0.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": Y[:5]}, "y must have 900 labels"),
        ({"y": np.zeros(900)}, "at least two classes"),
        ({"X_test": X}, "must be given together"),
        ({"X_test": X, "y_test": Y[:1]}, "y_test must have 900 labels"),
        ({"test_share": 1.0}, "must leave training and test points"),
        ({"t": -1.0}, "t must be nonnegative"),
        ({"ridge": 0.0}, "ridge must be greater than 0"),
    ],
)
def test_bad_input(change, words):
    with pytest.raises(InputError, match=words):
        probe_curve(EST, **{"X": X, "y": Y, **change})


def test_ridge_accuracy_of_labels_themselves():
    assert ridge_accuracy(np.eye(10)[Y], Y, np.eye(10)[Y], Y)[-1] == 1.0


def test_numbers_that_are_no_classes_are_refused():
    with pytest.raises(InputError, match=r"y must hold classes .*not whole"):
        ridge_accuracy(X[:50, :2], X[:50].mean(axis=1), X[:50, :2], X[:50].mean(axis=1))
