"""Spectral flow and descent of aligned modes: the closed form against simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stairwise.checks import InputError
from stairwise.dynamics.descent import gradient_descent
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.correlation import Correlation
from stairwise.theory.spectral import SpectralModes

GAMMA = np.array([3.0, 0.7, 0.7, 1e-3, 0.0, -1e-3, -0.7])
STARTS = [1e-150, 1e-7, 0.1, 0.9, 5.0]
T = np.array([0.0, 1e-3, 0.2, 1.0, 7.0, 40.0])
gammas = st.floats(0.05, 20) | st.floats(-20, -0.05) | st.just(0.0)


def turned(gamma, s0, seed=0):
    """Aligned weights with rotated rows and columns, and their Γ; one more column than rows."""
    rng = np.random.default_rng(seed)
    d = len(gamma)
    left, _ = np.linalg.qr(rng.standard_normal((d, d)))
    right, _ = np.linalg.qr(rng.standard_normal((d + 1, d + 1)))
    corr = Correlation.from_matrix((right * np.append(gamma, 0.01)) @ right.T)
    return left @ (np.asarray(s0)[:, None] * right[:, :d].T), corr


def descending(lam):
    return -np.sort(-lam, axis=-1)


@pytest.mark.parametrize("s0", STARTS)
def test_laws_of_the_flow(s0):
    modes = SpectralModes(GAMMA, s0)
    np.testing.assert_array_equal(modes.singular_values(0.0), np.full(7, s0))
    np.testing.assert_allclose(
        SpectralModes(GAMMA, modes.singular_values(0.3)).singular_values(T), modes.singular_values(T + 0.3), atol=1e-12
    )
    goal = [g**-0.5 if g > 0 else s0 * (g == 0) for g in GAMMA]
    np.testing.assert_allclose(modes.singular_values(np.inf), goal, rtol=1e-15)
    np.testing.assert_allclose(modes.limits(), [goal, goal], rtol=1e-15)
    assert modes.eigenvalues(T.reshape(2, 3)).shape == (2, 3, 7)
    assert (np.diff(modes.loss(np.linspace(0, 50, 300))) <= 1e-12).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("signs", [False, True])
def test_the_flow_is_the_closed_form(seed, signs):
    """To 1e-9: from either side of the goal, with tiny and large modes together, γ of any sign, equal γ, equal s.

    With γ < 0 nothing is rotated: a mode that shrinks to zero is at a saddle, and rounding errors along γ > 0 grow.
    """
    gamma = np.array([3.0, 0.7, 0.7, 0.2, 0.0, -0.3, -0.7]) if signs else np.array([3.0, 2.0, 0.7, 0.7, 0.2, 0.1, 0.1])
    s0 = np.random.default_rng(seed).permutation([0.1, 1e-7, 1e-3, 3.0, 0.7, 0.7, 0.2])
    W0, corr = (np.diag(s0), Correlation.from_matrix(gamma)) if signs else turned(gamma, s0, seed)
    t = np.linspace(0, 4, 41)
    flow = gradient_flow(W0, corr, t, weights=True, rule="spectral")
    modes = SpectralModes(gamma, s0)
    np.testing.assert_allclose(flow.eigenvalues, descending(modes.eigenvalues(t)), atol=1e-9)
    s = np.linalg.svd(flow.weights, compute_uv=False)
    np.testing.assert_allclose(s, descending(modes.singular_values(t)), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(gammas, st.floats(1e-3, 3)), min_size=1, max_size=4), st.floats(0.02, 2.0))
def test_descent_is_the_closed_form(modes, lr):
    """Also for steps larger than the goal, which send s through zero. Not rotated: rounding errors would grow."""
    gamma, s0 = np.array(sorted(modes, reverse=True)).T
    closed = SpectralModes(gamma, s0, lr)
    run = gradient_descent(np.diag(s0), Correlation.from_matrix(gamma), lr, 40, rule="spectral")
    goals = np.array([g**-0.5 if g > 0 else 0 for g in gamma])
    off = np.minimum(np.abs(closed.limits() - goals), closed.limits())[:, gamma != 0]
    if off.min(initial=1.0) < 1e-9:  # at the goal, or at zero, to rounding error: to rest or not are both right
        return
    np.testing.assert_allclose(run.eigenvalues, descending(closed.eigenvalues(run.times)), atol=1e-8)


def test_descent_of_rotated_weights():
    gamma, s0 = np.array([3.0, 1.0, 0.2]), np.array([1e-3, 2.0, 0.03])
    W0, corr = turned(gamma, s0)
    run = gradient_descent(W0, corr, 0.07, 40, rule="spectral")
    np.testing.assert_allclose(
        run.eigenvalues, descending(SpectralModes(gamma, s0, 0.07).eigenvalues(run.times)), atol=1e-9
    )


def test_descent_alternates_around_one():
    """λ ends within 2 lr √γ + lr² γ of 1, on both sides, with period 2; exactly at the goal it rests."""
    gamma, lr = np.array([4.0, 1.0, 0.3]), 0.07
    modes = SpectralModes(gamma, [0.013, 0.027, 4.0], lr)
    late = modes.eigenvalues(lr * np.arange(200, 204))
    np.testing.assert_array_equal(late[:2], late[2:])
    low, high = np.sort(late[:2], axis=0)
    assert ((low < 1) & (high > 1)).all()
    assert (high - low <= 2 * lr * np.sqrt(gamma) + lr**2 * gamma).all()
    np.testing.assert_allclose(gamma * modes.limits() ** 2, [low, high])
    np.testing.assert_array_equal(SpectralModes(1.0, 0.5, lr=0.25).singular_values([0.5, 0.75, 10.0])[:, 0], 1.0)


def test_step_times():
    modes = SpectralModes([2.0, 0.5, 0.0, -1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1, 0.0, 0.8])
    tau = modes.step_times()
    assert np.isinf(tau[2:5]).all()
    assert tau[5] == 0
    np.testing.assert_allclose(np.diag(modes.eigenvalues(tau[:2])[:, :2]), 0.5, rtol=1e-12)
    lr = 0.03
    steps = SpectralModes([2.0, 0.5], 0.1234, lr)
    np.testing.assert_array_less(np.diag(steps.eigenvalues(steps.step_times() - lr)), 0.5)
    np.testing.assert_array_less(0.5, np.diag(steps.eigenvalues(steps.step_times())))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, np.nan], 1.0), r"gamma\[1\] must be finite"),
        ((1.0, -1.0), "s0 must be nonnegative"),
        ((1.0, 1.0, 0.0), "lr must be greater than 0"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(InputError, match=words):
        SpectralModes(*arguments)


def test_descent_has_no_limit():
    with pytest.raises(InputError, match=r"t must be finite for descent.*limits\(\)"):
        SpectralModes(1.0, 0.1, lr=0.1).eigenvalues(np.inf)
