"""Laws that hold for every landscape."""

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.dynamics.descent import landscape_descent
from stairwise.dynamics.flow import landscape_flow
from stairwise.theory import landscapes as ls
from stairwise.theory.modes import Modes
from tests.numerics import derivative

ALL = [
    *(kind() for kind in ls.ALL),
    ls.Smoothed(epsilon=0.0),
    ls.Smoothed(epsilon=1.0),
    ls.Hinged(width=0.0),
    ls.Hinged(width=0.6),
    ls.DoubleWell(a=3.0, b=0.5),
    ls.Supervised(target=-0.5),
]
EVEN = [landscape for landscape in ALL if not isinstance(landscape, ls.Supervised)]
STARTS = [1e-150, 1e-6, 0.3, 0.95, 1.02, 1.7, 30.0]
GAMMA = 0.8
T = np.array([0.0, 1e-3, 0.1, 0.5, 2.0, 10.0])


@pytest.fixture(params=ALL, ids=repr)
def landscape(request):
    return request.param


@pytest.mark.parametrize("s0", STARTS)
def test_starts_where_it_should(landscape, s0):
    assert landscape.solve(0.0, s0, GAMMA) == pytest.approx(s0, rel=1e-10)


@pytest.mark.parametrize("s0", STARTS)
def test_restart_continues(landscape, s0):
    halfway = landscape.solve(0.3, s0, GAMMA)
    np.testing.assert_allclose(
        landscape.solve(T, halfway, GAMMA), landscape.solve(T + 0.3, s0, GAMMA), rtol=1e-9, atol=1e-300
    )


@pytest.mark.parametrize("s0", STARTS)
def test_array_equals_loop(landscape, s0):
    gamma = np.array([0.5, 2.0])
    together = landscape.solve(T[:, None], s0, gamma)
    apart = [[float(landscape.solve(t, s0, g)) for g in gamma] for t in T]
    np.testing.assert_allclose(together, apart, rtol=1e-13)


@pytest.mark.parametrize("s0", STARTS)
def test_rests_at_a_minimum(landscape, s0):
    rest = landscape.solve(np.inf, s0, GAMMA)
    assert np.isfinite(rest)
    assert landscape.slope(rest) == pytest.approx(0, abs=1e-9)
    assert landscape.loss(rest) <= landscape.loss(s0) + 1e-12
    late = landscape.solve(1e8 / (8 * GAMMA), s0, GAMMA)
    # the fourth power has no curvature at its minimum and comes only like t^(-1/2)
    assert late == pytest.approx(rest, rel=1e-3 if isinstance(landscape, ls.FourthPower) else 1e-9)


@pytest.mark.parametrize("s0", STARTS[1:])
def test_derivative_is_the_rate(landscape, s0):
    t = np.array([0.05, 0.3, 0.9])
    rate = landscape.rate(landscape.solve(t, s0, GAMMA), GAMMA)
    slope = derivative(lambda t: landscape.solve(t, s0, GAMMA), t, 0.05)
    np.testing.assert_allclose(slope, rate, rtol=1e-9, atol=1e-9)


def test_slope_is_the_derivative_of_the_loss(landscape):
    x, h = np.array([-1.5, -0.7, 0.2, 0.6, 1.4, 2.0]), 1e-6
    slope = (landscape.loss(x + h) - landscape.loss(x - h)) / (2 * h)
    np.testing.assert_allclose(landscape.slope(x), slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("s0", [1e-6, 0.3, 1.7])
def test_flow_agrees(landscape, s0):
    flow = landscape_flow(landscape, s0, GAMMA, T, rtol=1e-11)
    np.testing.assert_allclose(flow, landscape.solve(T, s0, GAMMA), rtol=1e-6)


def test_descent_tends_to_flow(landscape):
    exact = landscape.solve(0.5, 0.1, GAMMA)
    errors = [abs(landscape_descent(landscape, 0.1, GAMMA, 0.5 / n, n)[-1] - exact) for n in (200, 400)]
    assert errors[1] < 0.6 * errors[0] < 1e-2


def test_descent_that_diverges_is_finite(landscape):
    end = landscape_descent(landscape, 0.5, 1.0, 1e3, 400)[-1]
    assert np.isfinite(end)


@pytest.mark.parametrize("s0", [1e-150, 1e-6, 0.3])
def test_step_time_is_when_half_is_reached(landscape, s0):
    step = landscape.step_times(s0, GAMMA)
    rest = landscape.solve(np.inf, s0, GAMMA)
    assert landscape.solve(step, s0, GAMMA) ** 2 == pytest.approx(rest**2 / 2, rel=1e-8)


@pytest.mark.parametrize("landscape", EVEN, ids=repr)
def test_mirror_symmetry(landscape):
    x = np.array([0.1, 0.9, 1.6])
    np.testing.assert_allclose(landscape.loss(-x), landscape.loss(x))
    np.testing.assert_allclose(landscape.solve(0.4, -x, GAMMA), -landscape.solve(0.4, x, GAMMA))


@pytest.mark.parametrize("landscape", EVEN, ids=repr)
def test_origin_does_not_move(landscape):
    assert landscape.solve([0.5, np.inf], 0.0, GAMMA).tolist() == [0.0, 0.0]
    assert np.isinf(landscape.step_times(0.0, GAMMA))


@pytest.mark.parametrize("gamma", [0.0, -1.0, np.inf, np.nan])
def test_only_positive_gamma(landscape, gamma):
    with pytest.raises(InputError, match="gamma must be positive"):
        landscape.rate(0.5, gamma)


def test_barlow_twins_is_the_proposition():
    gamma, s0 = np.array([2.0, 0.5]), 1e-3
    from_modes = np.sqrt(gamma) * Modes(gamma, s0).singular_values(T)
    np.testing.assert_allclose(ls.BarlowTwins().solve(T[:, None], np.sqrt(gamma) * s0, gamma), from_modes, rtol=1e-12)


def test_both_smoothings_are_one_loss():
    """Errata A24: min(λ, 1 + ε(1 − λ)) as printed gives the same squared loss as the monotone form."""
    x = np.linspace(-2, 2, 101)
    printed = np.where(x**2 < 1, x**2, 1 + 0.1 * (1 - x**2))
    np.testing.assert_allclose(ls.Smoothed(0.1).loss(x), (printed - 1) ** 2, atol=1e-14)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ls.Smoothed(-0.1), "epsilon must be at least 0"),
        (lambda: ls.Hinged(1.0), "width must be below 1"),
        (lambda: ls.DoubleWell(a=0.0), "a must be greater than 0"),
        (lambda: ls.Supervised(target=np.nan), "target must be finite"),
        (lambda: ls.BarlowTwins().solve(1.0, np.nan, 1.0), "s_bar0 must be finite"),
    ],
)
def test_bad_parameters(make, words):
    with pytest.raises(InputError, match=words):
        make()
