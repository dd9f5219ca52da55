"""Kernels against independent values."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import pairwise

from stairwise.checks import InputError
from stairwise.kernel import kernels

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "infinite_width.json").read_text())
X, Y = np.array(GOLDEN["X"]), np.array(GOLDEN["Y"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (kernels.linear(), pairwise.linear_kernel),
        (kernels.rbf(0.7), lambda x, y: pairwise.rbf_kernel(x, y, gamma=0.7)),
        (kernels.polynomial(2, 0.5, 3.0), lambda x, y: pairwise.polynomial_kernel(x, y, 2, 0.5, 3.0)),
        (kernels.polynomial(), pairwise.polynomial_kernel),
        (kernels.laplace(0.4), lambda x, y: np.exp(-0.4 * pairwise.euclidean_distances(x, y))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_against_scikit_learn(ours, theirs):
    np.testing.assert_allclose(ours(X, Y), theirs(X, Y), rtol=1e-12)


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda c: f"{c['activation']}-{c['depth']}-{c['weight_variance']}"
)
@pytest.mark.parametrize("kind", ["nngp", "ntk"])
def test_against_neural_tangents(case, kind):
    names = ("depth", "activation", "weight_variance", "bias_variance")
    kernel = kernels.KERNELS[kind](**{name: case[name] for name in names})
    np.testing.assert_allclose(kernel(X, Y), case[kind], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(kernel(X, X), case[f"{kind}_self"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("activation", ["relu", "erf"])
@pytest.mark.parametrize("depth", [1, 2])
def test_against_wide_networks(activation, depth):
    """Monte Carlo: NNGP as mean of f f, NTK as mean of gradient products, over nets of width 512; 2 %."""
    torch = pytest.importorskip("torch")
    act = torch.relu if activation == "relu" else torch.erf
    w2, b2, width, x = 1.7, 0.3, 512, torch.tensor(X)
    generator = torch.Generator().manual_seed(0)
    tangent = torch.zeros(4, 4, dtype=torch.float64)
    covariance = torch.zeros(4, 4, dtype=torch.float64)
    draws = 160
    for _ in range(draws):
        sizes = [3, *[width] * depth, 1]
        weights = [
            torch.randn(b, a, dtype=torch.float64, generator=generator).requires_grad_()
            for a, b in itertools.pairwise(sizes)
        ]
        biases = [torch.randn(len(w), dtype=torch.float64, generator=generator).requires_grad_() for w in weights]
        h = x
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            h = act(h) if i else h
            last, scale = h, (w2 / h.shape[1]) ** 0.5
            h = scale * h @ w.T + b2**0.5 * b
        # the last layer averaged exactly: less noise
        covariance += (w2 * last @ last.T / last.shape[1] + b2).detach() / draws
        rows = []
        for row in h:
            grads = torch.autograd.grad(row, [*weights, *biases], retain_graph=True)
            rows.append(torch.cat([g.ravel() for g in grads]))
        jacobian = torch.stack(rows)
        tangent += jacobian @ jacobian.T / draws
    for kind, found in (("nngp", covariance), ("ntk", tangent)):
        kernel = kernels.KERNELS[kind](depth, activation, w2, b2)(X, X)
        size = np.sqrt(np.outer(np.diag(kernel), np.diag(kernel)))
        assert np.abs((found.numpy() - kernel) / size).max() < 0.02


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_symmetric_and_positive(name):
    kernel = kernels.KERNELS[name]().fit(X)
    K = kernel(np.vstack([X, Y]), np.vstack([X, Y]))
    np.testing.assert_allclose(K, K.T, atol=1e-12)
    assert np.linalg.eigvalsh(K)[0] > -1e-9 * np.abs(K).max()


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_torch_equals_numpy(name):
    torch = pytest.importorskip("torch")
    kernel = kernels.KERNELS[name]().fit(X)
    np.testing.assert_allclose(kernel(torch.tensor(X), torch.tensor(Y)).numpy(), kernel(X, Y), rtol=1e-12)


def test_median_heuristic():
    gamma = kernels.rbf().fit(X).gamma
    distances = pairwise.euclidean_distances(X, squared=True)[np.triu_indices(4, 1)]
    assert gamma == pytest.approx(1 / np.median(distances))
    assert kernels.laplace().fit(X).gamma == pytest.approx(1 / np.median(np.sqrt(distances)))
    assert kernels.rbf().fit(np.ones((3, 2))).gamma == 1.0  # no distances to go by


def test_large_offset_keeps_the_digits():
    np.testing.assert_allclose(kernels.rbf(0.5)(X + 1e7, Y + 1e7), kernels.rbf(0.5)(X, Y), rtol=1e-6)


@pytest.mark.parametrize("name", ["nngp", "ntk"])
@pytest.mark.parametrize("activation", ["relu", "erf"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_inputs_stay_finite(name, activation, dtype):
    rows = np.array([[0, 0, 0], [1, 0, 0], [3e3, 1, 0], [1e4, 1e4, 1]], dtype=dtype)
    assert np.isfinite(kernels.KERNELS[name](2, activation)(rows, rows)).all()


def test_median_looks_at_all_the_data():
    rising = np.arange(1999.0)[:, None]
    assert kernels.rbf().fit(rising).gamma == pytest.approx(
        1 / np.median(np.subtract.outer(*[rising[:, 0]] * 2) ** 2), rel=0.02
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.resolve("rfb", X), "did you mean 'rbf'"),
        (lambda: kernels.resolve(kernels.rbf, X), "must be a name, an object"),
        (lambda: kernels.resolve(kernels.rbf("scale"), X), "gamma must be a number"),
        (lambda: kernels.resolve(lambda x, y: x @ np.triu(np.ones((3, 3))) @ y.T, X), "must be symmetric"),
        (lambda: kernels.resolve(3, X), "must be a name, an object or a function"),
        (lambda: kernels.ntk(activation="tanh")(X, Y), "activation is unknown"),
        (lambda: kernels.ntk()(X[0], Y[0]), "X must be a 2-D array or tensor"),
        (lambda: kernels.laplace(0.1)(X, Y[:, :2]), "Y must have 3 columns, as X"),
        (lambda: kernels.rbf(0.1)(X, 1j * Y), "Y must be real"),
        (lambda: kernels.ntk(depth=0)(X, Y), "depth must be a whole number"),
        (lambda: kernels.nngp(weight_variance=0.0)(X, Y), "weight_variance must be greater than 0"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(InputError, match=words):
        call()
