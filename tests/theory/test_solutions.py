"""Where training ends, against brute force."""

import numpy as np
import pytest
import scipy.optimize

from stairwise.checks import InputError
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.alignment import gaussian_init
from stairwise.theory.correlation import Correlation
from stairwise.theory.solutions import penalized_weights, top_spectral_weights

CORR = Correlation.from_pairs(*np.random.default_rng(0).standard_normal((1, 40, 6)).repeat(2, 0) + 0.3)
GAMMA = CORR.matrix


def loss(W):
    return ((W @ GAMMA @ W.T - np.eye(len(W))) ** 2).sum()


def penalized(flat, d, epsilon):
    W = flat.reshape(d, -1)
    E = W @ GAMMA @ W.T - np.eye(d)
    return (E**2).sum() + epsilon * (W**2).sum(), (4 * E @ W @ GAMMA + 2 * epsilon * W).ravel()


def test_zero_loss_at_smallest_norm():
    """No zero-loss W found by constrained optimization is smaller (Prop. 4.2), and the norm is Σ 1/γ."""
    W = top_spectral_weights(CORR, 2)
    assert loss(W) == pytest.approx(0, abs=1e-20)
    best = (W**2).sum()
    assert best == pytest.approx((1 / CORR.eigenvalues[:2]).sum())
    found = []
    for seed in range(8):
        start = np.random.default_rng(seed).standard_normal(12)
        constraint = {
            "type": "eq",
            "fun": lambda w: (w.reshape(2, 6) @ GAMMA @ w.reshape(2, 6).T)[[0, 0, 1], [0, 1, 1]] - [1, 0, 1],
        }
        result = scipy.optimize.minimize(lambda w: w @ w, start, method="SLSQP", constraints=constraint)
        if result.success:
            found.append(result.fun)
    assert len(found) >= 4
    assert min(found) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("epsilon", [0.02, 0.2, 0.6])
def test_penalized_minimizer(epsilon):
    """Errata A13, A14: s² = (γ − ε/2)/γ²."""
    W = penalized_weights(CORR, 2, epsilon)
    value, gradient = penalized(W.ravel(), 2, epsilon)
    np.testing.assert_allclose(gradient, 0, atol=1e-10)
    others = [
        scipy.optimize.minimize(penalized, np.random.default_rng(s).standard_normal(12), (2, epsilon), jac=True).fun
        for s in range(6)
    ]
    assert min(others) == pytest.approx(value, rel=1e-7)


def test_penalized_tends_to_top_spectral():
    np.testing.assert_allclose(penalized_weights(CORR, 3, 1e-9), top_spectral_weights(CORR, 3), rtol=1e-8)
    assert not penalized_weights(Correlation.from_matrix([1.0, 0.1]), 2, 0.5)[1].any()  # γ_2 ≤ ε/2


def test_flow_ends_there():
    W = gradient_flow(gaussian_init(2, 6, 1e-9, 0), CORR, [60.0], weights=True).weights[0]
    best = top_spectral_weights(CORR, 2)
    np.testing.assert_allclose(W.T @ W, best.T @ best, atol=5e-2)
    assert loss(W) < 1e-12


def test_bad_d():
    with pytest.raises(InputError, match="d must be at most 1, the number of positive eigenvalues"):
        top_spectral_weights(Correlation.from_matrix([1.0, -1.0]), 2)
    with pytest.raises(InputError, match="d must be at most 2"):
        top_spectral_weights(Correlation.from_matrix([1.0, -1.0]), 3)
    thin = Correlation.from_pairs(np.eye(3)[:2], np.eye(3)[:2])  # rank 2 in 3 features
    with pytest.raises(InputError, match="d must be at most 2"):
        top_spectral_weights(thin, 3)
    with pytest.raises(InputError, match="whole number"):
        top_spectral_weights(CORR, 1.5)
