"""Spectral flow and descent against independent ways."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

import stairwise as sw
from stairwise.checks import InputError
from stairwise.dynamics.spectral import COEFFICIENTS, newton_schulz
from stairwise.theory.spectral import SpectralModes
from stairwise.theory.spectral_law import polar

GAMMA = np.array([1.0, 0.6, 0.5, 0.3, 0.2, 0.1, -0.2])
CORR = sw.Correlation.from_matrix(GAMMA)


def smooth_flow(W0, t, softness):
    """The flow on raw weights with a polar factor that is smooth at zero: G (GᵀG + softness² I)^{-1/2}, by scipy."""

    def slope(_, w):
        W = w.reshape(W0.shape)
        G = (np.eye(len(W)) - W @ CORR.matrix @ W.T) @ W @ CORR.matrix
        values, vectors = np.linalg.eigh(G @ G.T)
        return ((vectors * (values + softness**2) ** -0.5) @ vectors.T @ G).ravel()

    return solve_ivp(slope, (0, t[-1]), W0.ravel(), "LSODA", t, rtol=1e-9, atol=1e-12).y.T.reshape(-1, *W0.shape)


def test_flow_is_the_limit_of_smooth_flows():
    """From before the first event to after the last, weights included; the error is that of the smoothing."""
    W0, t = sw.gaussian_init(3, 7, 0.05, 2), np.linspace(0, 2.2, 23)
    flow = sw.gradient_flow(W0, CORR, t, weights=True, rule="spectral")
    off = [np.abs(smooth_flow(W0, t, softness) - flow.weights).max() for softness in (1e-3, 1e-4)]
    assert off[1] < 1e-3
    assert off[1] < off[0] / 5
    np.testing.assert_allclose(flow.eigenvalues[-1], 1, atol=1e-10)


def test_flow_is_the_limit_of_descent():
    """Brute force: errors shrink with the step, on both sides of λ = 1."""
    W0 = sw.gaussian_init(3, 7, 0.05, 2)
    flow = sw.gradient_flow(W0, CORR, np.linspace(0, 2, 21), rule="spectral").eigenvalues
    errors = []
    for steps in (200, 2000):
        descent = sw.gradient_descent(W0, CORR, 2 / steps, steps, steps // 20, rule="spectral")
        errors.append(np.abs(descent.eigenvalues - flow).max())
    assert errors[0] < 0.04
    assert errors[1] < errors[0] / 5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_descent_is_autograd(momentum):
    """Three steps on ‖C − I‖² with torch's gradient and torch's SVD."""
    W0 = sw.gaussian_init(3, 7, 0.3, 0)
    W, gamma, sums = torch.tensor(W0, requires_grad=True), torch.tensor(CORR.matrix), 0.0
    for _ in range(3):
        loss = ((W @ gamma @ W.T - torch.eye(3)) ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, W)
        sums = momentum * sums - gradient
        left, _, right = torch.linalg.svd(sums, full_matrices=False)
        W = (W + 0.1 * left @ right).detach().requires_grad_()
    run = sw.gradient_descent(W0, CORR, 0.1, 3, 3, momentum, weights=True, rule="spectral")
    np.testing.assert_allclose(run.weights[-1], W.detach().numpy(), atol=1e-10)


def test_newton_schulz_descent():
    """Aligned: every singular value moves by the scalar quintic. Generic: close to the exact polar factor's steps."""
    s, gamma, lr = np.array([0.3, 0.1]), np.array([1.0, 0.5]), 0.05
    run = sw.gradient_descent(np.diag(s), sw.Correlation.from_matrix(gamma), lr, 4, rule="newton_schulz", weights=True)
    a, b, c = COEFFICIENTS
    for _ in range(4):
        x = gamma * s * (1 - gamma * s**2)
        x /= np.linalg.norm(x)
        for _ in range(5):
            x = a * x + b * x**3 + c * x**5
        s = s + lr * x
    np.testing.assert_allclose(np.diag(run.weights[-1]), s, rtol=1e-12)
    W0 = sw.gaussian_init(3, 7, 1e-3, 0)
    muon, exact = (sw.gradient_descent(W0, CORR, 0.01, 300, rule=rule) for rule in ("newton_schulz", "spectral"))
    np.testing.assert_allclose(muon.step_times(), exact.step_times(), rtol=0.25)


def test_polar_factor_and_its_approximation():
    g = np.random.default_rng(0).standard_normal((4, 9))
    o = polar(g)
    np.testing.assert_allclose(o @ o.T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(g @ o.T, (g @ o.T).T, atol=1e-12)  # g = (g oᵀ) o with g oᵀ symmetric and positive
    assert (np.linalg.eigvalsh(g @ o.T) > 0).all()
    values = np.linalg.svd(newton_schulz(g), compute_uv=False)
    assert 0.65 < values.min() < values.max() < 1.21
    np.testing.assert_array_equal(newton_schulz(np.zeros((2, 3))), np.zeros((2, 3)))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.floats(-6, -1), st.integers(1, 3))
def test_invariants_of_the_flow(seed, exponent, d):
    """The loss falls, the flow ends at C = I, speed is at most one, and neither rotations nor restarts matter."""
    W0, t = sw.gaussian_init(d, 7, 10**exponent, seed), np.linspace(0, 3, 16)
    run = sw.gradient_flow(W0, CORR, t, weights=True, rule="spectral")
    assert (np.diff(run.loss) <= 1e-7).all()
    np.testing.assert_allclose(run.eigenvalues[-1], 1, atol=1e-6)
    moved = np.linalg.norm(np.diff(run.weights, axis=0), ord=2, axis=(1, 2))
    assert (moved <= np.diff(t) + 1e-9).all()
    turn, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))
    turned = sw.gradient_flow(turn @ W0, CORR, t, rule="spectral").eigenvalues
    np.testing.assert_allclose(turned, run.eigenvalues, atol=1e-5)
    again = sw.gradient_flow(run.weights[5], CORR, t[:11], rule="spectral").eigenvalues
    np.testing.assert_allclose(again, run.eigenvalues[5:], atol=1e-5)


def test_times_in_any_order_and_at_rest():
    W0 = sw.gaussian_init(2, 7, 1e-3, 0)
    forward = sw.gradient_flow(W0, CORR, [0.0, 0.5, 20.0], rule="spectral").eigenvalues
    np.testing.assert_allclose(
        sw.gradient_flow(W0, CORR, [20.0, 0.0, 0.5, 20.0], rule="spectral").eigenvalues,
        forward[[2, 0, 1, 2]],
        atol=1e-7,
    )
    zero = sw.gradient_flow(np.zeros((2, 7)), CORR, [1.0], weights=True, rule="spectral")
    np.testing.assert_array_equal(zero.weights[0], 0)
    learned = sw.top_spectral_weights(CORR, 2)
    np.testing.assert_allclose(
        sw.gradient_flow(learned, CORR, [1.0], weights=True, rule="spectral").weights[0], learned, atol=1e-9
    )


def test_the_smallest_starts():
    """Law and flow agree down to the size below which both refuse."""
    W0, t = sw.gaussian_init(3, 7, 1.0, 0), [0.5, 1.0, 1.5, 2.2]
    for alpha in (1e-6, 1e-144):
        law = sw.closed_form(alpha * W0, CORR, t, law="spectral").eigenvalues
        flow = sw.gradient_flow(alpha * W0, CORR, t, rule="spectral").eigenvalues
        np.testing.assert_allclose(law, flow, atol=0.02)
        assert (flow[-1] > 0.5).all()
    for alpha in (1e-146, 1e-200):
        for simulate in (
            lambda W: sw.closed_form(W, CORR, t, law="spectral"),
            lambda W: sw.gradient_flow(W, CORR, t, rule="spectral"),
        ):
            with pytest.raises(InputError, match="W0 must be zero or at least 1e-145 large for the spectral rule"):
                simulate(alpha * W0)


def test_tiny_mode_beside_a_large_one():
    s0 = np.array([0.9, 1e-12])
    run = sw.gradient_flow(np.diag(s0), sw.Correlation.from_matrix([1.0, 0.5]), [0.05, 0.7], rule="spectral")
    np.testing.assert_allclose(run.eigenvalues, SpectralModes([1.0, 0.5], s0).eigenvalues([0.05, 0.7]), atol=1e-9)


@pytest.mark.parametrize(
    "simulate", [sw.gradient_flow, lambda w, c, t, rule: sw.gradient_descent(w, c, 0.1, 3, rule=rule)]
)
def test_unknown_rule(simulate):
    with pytest.raises(InputError, match=r"rule is unknown.*did you mean 'spectral'"):
        simulate(np.eye(2, 7), CORR, [1.0], rule="spectrall")


@pytest.mark.parametrize("lr", [0.02, 0.1, 0.6, 2.0])
def test_descent_ends_near_one(lr):
    """Within 2a + a², a = lr √γ_1, from generic weights too; 2a would not do."""
    gamma = 0.8 ** np.arange(40.0)
    steps = int(20 / lr) + 200
    off, a = 0.0, lr * np.sqrt(gamma[0])
    for seed in range(3):
        W0 = sw.gaussian_init(4, 40, 1e-2, seed)
        last = np.arange(steps - 60, steps + 1)
        run = sw.gradient_descent(W0, sw.Correlation.from_matrix(gamma), lr, steps, last, rule="spectral")
        off = max(off, float(np.abs(run.eigenvalues - 1).max()))
    assert off < 2 * a + a * a
    assert lr not in (0.1, 2.0) or off > 2 * a


def test_more_rows_than_modes():
    W0 = np.array([[1.0], [2.0], [-0.5]]) * 1e-6
    run = sw.gradient_flow(W0, sw.Correlation.from_matrix([1.0]), [0.4, 4.0], rule="spectral")
    np.testing.assert_allclose(run.eigenvalues, [[0.16, 0, 0], [1, 0, 0]], atol=1e-5)


@pytest.mark.parametrize("rows", [[[0.3]], [[1e-6], [2e-6], [-5e-7]]])
def test_a_flow_of_which_everything_shrinks_ends_at_zero(rows):
    W0 = np.array(rows)
    length = np.linalg.norm(W0)
    run = sw.gradient_flow(W0, sw.Correlation.from_matrix([-0.5]), [length / 2, 9.0], rule="spectral")
    assert run.eigenvalues[:, -1] == pytest.approx([-0.5 * length**2 / 4, 0.0], abs=1e-6 * length**2)


@pytest.mark.parametrize(
    "gamma", [[1, 0.5, 0, -1, 0], [1.09, 0.75, 9e-16, -1.1, -1.8], [1, 0, 0, 0, 0], [-1, -0.5, 0, 0, 0]]
)
def test_fewer_positive_modes_than_outputs(gamma):
    """Outputs along directions without correlation stay, and those along negative ones shrink to nothing."""
    corr, W0, lr = sw.Correlation.from_matrix(gamma), sw.gaussian_init(3, 5, 1e-3, 0), 1e-3
    t = np.array([0.0, 0.1, 0.5, 1.5])
    flow = sw.gradient_flow(W0, corr, t, rule="spectral", weights=True)
    descent = sw.gradient_descent(W0, corr, lr, 1500, record_every=np.round(t / lr).astype(int), rule="spectral")
    np.testing.assert_allclose(flow.eigenvalues, descent.eigenvalues, atol=4 * lr)
    still = np.abs(np.array(gamma)) < 1e-14
    np.testing.assert_array_equal(flow.weights[:, :, still], np.broadcast_to(W0[:, still], (4, 3, still.sum())))
