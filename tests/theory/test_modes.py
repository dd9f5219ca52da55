"""Laws of the exact solution, for every sign of γ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from stairwise.checks import InputError
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.alignment import gaussian_init
from stairwise.theory.correlation import Correlation
from stairwise.theory.modes import Modes
from stairwise.theory.spectral import SpectralModes
from stairwise.theory.trajectory import Trajectory
from tests.numerics import derivative

GAMMAS = [3.0, 0.7, 1e-3, 0.0, -1e-3, -0.7, -3.0]
STARTS = [1e-150, 1e-7, 0.1, 0.9, 5.0]
CASES = [(g, s) for g in GAMMAS for s in STARTS]
T = np.array([0.0, 1e-3, 0.2, 1.0, 7.0, 40.0])


@pytest.mark.parametrize(("gamma", "s0"), CASES)
def test_starts_where_it_should(gamma, s0):
    assert Modes(gamma, s0).singular_values(0.0) == pytest.approx(s0, rel=1e-12)


@pytest.mark.parametrize(("gamma", "s0"), CASES)
def test_restart_continues(gamma, s0):
    halfway = Modes(gamma, s0).singular_values(0.3)
    np.testing.assert_allclose(
        Modes(gamma, halfway).singular_values(T), Modes(gamma, s0).singular_values(T + 0.3), rtol=1e-9
    )


@pytest.mark.parametrize(("gamma", "s0"), CASES)
def test_array_equals_loop(gamma, s0):
    modes = Modes(gamma, s0)
    np.testing.assert_array_equal(modes.eigenvalues(T), np.stack([modes.eigenvalues(t) for t in T]))
    assert modes.eigenvalues(T.reshape(2, 3)).shape == (2, 3, 1)


@pytest.mark.parametrize(("gamma", "s0"), CASES)
def test_derivative_is_the_rate(gamma, s0):
    """s' = 4 γ s (1 − γ s²)."""
    modes, t = Modes(gamma, s0), np.array([0.01, 0.2, 1.0])
    s = modes.singular_values(t)[:, 0]
    scale = 0.05 / (1 + abs(gamma) * max(1, abs(gamma) * s0**2))
    slope = derivative(lambda t: modes.singular_values(t)[:, 0], t, scale)
    np.testing.assert_allclose(slope / s, 4 * gamma * (1 - gamma * s**2), rtol=1e-9, atol=1e-9 * (1 + abs(gamma)))


@pytest.mark.parametrize("s0", STARTS)
def test_limit(s0):
    np.testing.assert_allclose(
        Modes(GAMMAS, s0).singular_values(np.inf), [g**-0.5 if g > 0 else s0 * (g == 0) for g in GAMMAS], rtol=1e-12
    )


@pytest.mark.parametrize("gamma", [1.3, -0.4])
def test_against_scipy(gamma):
    ode = solve_ivp(
        lambda _, s: 4 * gamma * s * (1 - gamma * s**2), (0, 3), [0.05], rtol=1e-11, atol=1e-14, t_eval=T[:4]
    )
    np.testing.assert_allclose(Modes(gamma, 0.05).singular_values(T[:4])[:, 0], ode.y[0], rtol=1e-8)


@given(
    gamma=st.floats(-1e4, 1e4, allow_subnormal=False),
    s0=st.floats(1e-150, 1e3),
    x=st.floats(0, 1e8),
)
def test_no_overflow_anywhere(gamma, s0, x):
    t = x / (8 * abs(gamma)) if gamma else x
    if not np.isfinite(t):
        return
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        s = Modes(gamma, s0).singular_values(t)[0]
        rest = gamma**-0.5 if gamma > 0 else 0.0
    low, high = min(s0, rest), max(s0, rest)
    assert low * (1 - 1e-12) <= s <= high * (1 + 1e-12)


def test_eigenvalue_is_exactly_logistic():
    """Errata A7: (1 + (1/λ₀ − 1) e^{−8γt})^{-1}, not the paper's (1 + e^{−8γt}/λ₀)^{-1}."""
    lam0, gamma = 0.3, 0.8
    lam = Modes(gamma, np.sqrt(lam0 / gamma)).eigenvalues(T)[:, 0]
    np.testing.assert_allclose(lam, 1 / (1 + (1 / lam0 - 1) * np.exp(-8 * gamma * T)), rtol=1e-12)


def test_step_time():
    modes = Modes([2.0, 0.0, -1.0, 1.0], [1e-3, 1e-3, 1e-3, 0.0])
    tau = modes.step_times()
    assert np.isinf(tau[1:]).all()
    lam0 = 2.0 * 1e-6
    assert modes.eigenvalues(tau[0])[0] == pytest.approx(1 / (2 - lam0), rel=1e-12)


def test_loss_is_a_staircase():
    modes = Modes([8.0, 4.0, 2.0, 1.0], 1e-6)
    tau = modes.step_times()
    assert modes.loss(0.0) == pytest.approx(4, abs=1e-8)
    for j in range(3):
        assert modes.loss((tau[j] + tau[j + 1]) / 2) == pytest.approx(3 - j, abs=5e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, np.nan], 1.0), r"gamma\[1\] must be finite"),
        (([1.0, 2.0], [1.0, 1.0, 1.0]), "s0 must be one number or 2"),
        ((1.0, -1.0), "s0 must be nonnegative"),
        (([[1.0]], 1.0), "gamma must be 1-D"),
        ((np.array([object()]), 1.0), "gamma must hold real numbers"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(InputError, match=words):
        Modes(*arguments)


@pytest.mark.parametrize("t", [-1.0, np.nan, [0.0, -2.0], "soon"])
def test_bad_times(t):
    with pytest.raises(InputError, match="t must be"):
        Modes(1.0, 1.0).eigenvalues(t)


def test_modes_that_start_at_their_plateau_step_at_once():
    np.testing.assert_array_equal(Modes([1.0, 2.0, 1.0], [3.0, 0.5**0.5, 1.0]).step_times(), 0.0)


def test_step_times_of_trajectories_that_reach_one():
    """Log-odds end there; √λ of the spectral flow grows linearly, whatever the spacing of the records."""
    t = np.arange(0, 3, 0.5)
    modes = SpectralModes([1.0, 0.5], 1e-6)
    found = Trajectory(t, modes.eigenvalues(t), "spectral").step_times()
    np.testing.assert_allclose(found, modes.step_times(), rtol=1e-3)
    overshot = Trajectory(np.array([0.0, 1.0, 2.0]), np.array([[0.04], [1.44], [1.0]]), "descent").step_times()
    assert overshot == pytest.approx((0.5**0.5 - 0.2) / (1.2 - 0.2))


def test_step_times_of_coarse_records_of_a_numerical_flow():
    """Integrators overshoot 1 by rounding; steps stay between their records, and in order."""
    corr, t = Correlation.from_matrix([4.0, 2.0, 1.0]), np.linspace(0, 40, 25)
    W0 = gaussian_init(3, 3, 1e-4, 0)
    fine = gradient_flow(W0, corr, np.linspace(0, 4, 2000)).step_times()
    found = gradient_flow(W0, corr, t).step_times()
    assert (np.diff(found) > 0).all()
    np.testing.assert_allclose(found, fine, rtol=0.3)
