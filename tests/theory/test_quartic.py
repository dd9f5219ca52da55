"""Tr(W A Wᵀ) + Tr((W B Wᵀ)²)."""

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.dynamics.flow import gradient_flow, quartic_flow
from stairwise.theory.alignment import gaussian_init
from stairwise.theory.correlation import Correlation
from stairwise.theory.quartic import Quartic
from tests.numerics import derivative

ROTATION, _ = np.linalg.qr(np.random.default_rng(5).standard_normal((4, 4)))
T = np.array([0.0, 0.2, 1.0, 4.0, 30.0])


def commuting(a, b):
    return Quartic(ROTATION @ np.diag(a) @ ROTATION.T, ROTATION @ np.diag(b) @ ROTATION.T)


PROBLEMS = {
    "Barlow Twins": commuting([-2.0, -1.0, -0.5, 0.4], [1.0, 0.5, 0.25, -0.2]),
    "A alone degenerate": commuting([-1.0, -1.0, -1.0, -1.0], [0.3, 0.6, 0.9, 1.2]),
    "B alone degenerate": commuting([-1.0, -0.5, 0.3, 0.7], [1.0, 1.0, 1.0, 1.0]),
    "no growth": commuting([0.0, 0.0, 1.0, 2.0], [1.0, 0.5, 0.5, 0.0]),
}


def aligned_start(problem, size=0.01, d=3):
    _, _, vectors = problem.common_modes()
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((d, d)))
    return turn @ np.diag(size * np.arange(1, d + 1)) @ vectors[:, :d].T


@pytest.mark.parametrize("name", PROBLEMS)
def test_closed_form_equals_flow_from_aligned_init(name):
    """Up to t = 4: with equal growth rates the aligned path is itself unstable to rounding errors later."""
    W0, t = aligned_start(PROBLEMS[name]), T[:4]
    flow = quartic_flow(W0, PROBLEMS[name], t, rtol=1e-11)
    np.testing.assert_allclose(PROBLEMS[name].weights(W0, t), flow, atol=1e-7)


@pytest.mark.parametrize("name", PROBLEMS)
def test_start_restart_and_limit(name):
    problem = PROBLEMS[name]
    W0 = aligned_start(problem)
    np.testing.assert_allclose(problem.weights(W0, 0.0), W0, atol=1e-14)
    np.testing.assert_allclose(problem.weights(problem.weights(W0, 0.7), 1.1), problem.weights(W0, 1.8), atol=1e-9)
    rest = problem.weights(W0, np.inf)
    assert np.abs(problem.gradient(rest)).max() < 1e-8
    late = problem.weights(W0, 1e12)
    np.testing.assert_allclose(late, rest, atol=1e-5)


def test_gradient_is_the_derivative_of_the_loss():
    problem, W, V = PROBLEMS["Barlow Twins"], *np.random.default_rng(1).standard_normal((2, 3, 4))
    slope = derivative(lambda e: problem.loss(W + e * V), 0.0, 1.0)
    assert slope == pytest.approx((problem.gradient(W) * V).sum(), rel=1e-10)


def test_barlow_twins_is_a_member():
    gamma = np.array([1.0, 0.5, 0.25, -0.2])
    W0 = gaussian_init(2, 4, 1e-3, 0)
    flow = gradient_flow(W0, Correlation.from_matrix(gamma), T[:4], weights=True).weights
    np.testing.assert_allclose(quartic_flow(W0, Quartic(np.diag(-2 * gamma), np.diag(gamma)), T[:4]), flow, atol=1e-6)


def test_flow_without_commuting():
    a, b = np.random.default_rng(2).standard_normal((2, 4, 4))
    problem = Quartic(-a @ a.T, b @ b.T)
    losses = problem.loss(quartic_flow(gaussian_init(2, 4, 0.1, 0), problem, np.linspace(0, 5, 50)))
    assert (np.diff(losses) <= 1e-9).all()
    with pytest.raises(InputError, match="must commute"):
        problem.weights(np.ones((2, 4)), 1.0)


def test_unbraked_growth():
    problem = Quartic(np.diag([-1.0, -0.5]), np.zeros((2, 2)))
    W0 = 1e-3 * np.eye(2)
    np.testing.assert_allclose(problem.weights(W0, 2.0), np.diag(1e-3 * np.exp([4.0, 2.0])))
    tiny = problem.weights(1e-150 * np.eye(2), 360.0)[0, 0]
    assert np.log(tiny) == pytest.approx(np.log(1e-150) + 720)
    with pytest.raises(InputError, match="grows without bound"):
        problem.weights(W0, np.inf)


def test_bad_input():
    with pytest.raises(InputError, match="A must be a symmetric"):
        Quartic([[1.0, 2.0], [0.0, 1.0]], np.eye(2))
    with pytest.raises(InputError, match="B must have 2 columns"):
        Quartic(np.eye(2), np.eye(3))
    with pytest.raises(InputError, match="W0 must have 2 columns"):
        quartic_flow(np.ones((1, 3)), Quartic(np.eye(2), np.eye(2)), 1.0)
