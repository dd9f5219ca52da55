"""The law of spectral flow from generic initialization, against simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

import stairwise as sw
from stairwise.checks import InputError, TheoryWarning
from stairwise.theory.ensemble import predict_staircase
from stairwise.theory.spectral import SpectralModes
from stairwise.theory.spectral_law import spectral_evolve, spectral_steps

GAMMA = 1 / np.arange(1.0, 41.0)
CORR = sw.Correlation.from_matrix(GAMMA)
T = np.linspace(0, 3.5, 300)


def overlap(weights, d):
    return (np.linalg.svd(weights, full_matrices=False)[2][:, :d] ** 2).sum() / d


@pytest.mark.parametrize("lr", [None, 1e-3])
def test_aligned_init_is_the_closed_form(lr):
    """Exactly, for flow and for descent up to the first arrival."""
    gamma, s0 = np.array([2.0, 1.0, 0.5, 0.25]), np.array([0.1, 1e-7, 1e-3, 0.2])
    t = np.linspace(0, 0.6, 601)  # the first mode arrives at 0.607
    W0 = np.eye(4, 6) * s0[:, None]
    run = sw.closed_form(W0, sw.Correlation.from_matrix([*gamma, 0.1, -0.4]), t, law="spectral", lr=lr, weights=True)
    modes = SpectralModes(gamma, s0)
    np.testing.assert_allclose(run.eigenvalues, -np.sort(-modes.eigenvalues(t)), atol=1e-9)
    np.testing.assert_allclose(run.weights, np.eye(4, 6) * modes.singular_values(t)[:, :, None], atol=1e-9)
    steps = spectral_steps(W0, np.array([*gamma, 0.1, -0.4]), lr)
    np.testing.assert_allclose(steps, np.sort(modes.step_times()), atol=1e-9)


def test_one_dimension_is_exact():
    """d = 1: spectral flow is gradient flow with time as its length, until λ = 1."""
    W0 = sw.gaussian_init(1, 40, 0.03, 1)
    law = sw.closed_form(W0, CORR, T, law="spectral")
    np.testing.assert_allclose(
        law.eigenvalues, sw.gradient_flow(W0, CORR, T, rtol=1e-10, rule="spectral").eigenvalues, atol=1e-8
    )


def test_time_is_the_integral_of_the_docstring():
    """The integral by scipy, for the last of three rows."""
    u = np.triu(sw.gaussian_init(3, 40, 1e-2, 3))
    u[np.arange(3), np.arange(3)] = abs(np.diag(u))
    row, power = u[2, 3:], GAMMA[3:] / GAMMA[2]

    def speed(s):
        return np.sqrt(1 + ((power * row * (s / u[2, 2]) ** power / s) ** 2).sum())

    def eigenvalue(s):
        return GAMMA[2] * s**2 + (GAMMA[3:] * (row * (s / u[2, 2]) ** power) ** 2).sum()

    s = np.linspace(u[2, 2], 2, 20001)
    at = s[np.argmax([eigenvalue(x) >= 0.5 for x in s])]
    assert spectral_steps(u, GAMMA)[2] == pytest.approx(quad(speed, u[2, 2], at, limit=200)[0], abs=2e-4)


def test_lateness_to_first_order():
    """Σ T² p (1 − p) / (2 (2p − 1) s), as the page on the laws says; none for a column with the same γ."""
    r, s = np.array([[1e-6, 1e-7, 2e-7]]), np.sqrt(0.5)
    for gamma in ([1.0, 0.8, 0.7], [1.0, 1.0, 0.9]):
        p = np.array(gamma[1:])
        t = r[0, 1:] * (s / r[0, 0]) ** p
        late = (t**2 * p * (1 - p) / (2 * (2 * p - 1) * s)).sum()
        assert spectral_steps(r, np.array(gamma))[0] - (s - r[0, 0]) == pytest.approx(late, rel=0.06)


@pytest.mark.parametrize(("alpha", "lr"), [(1e-2, None), (1e-5, None), (1e-7, 0.01)])
def test_law_against_simulation(alpha, lr):
    """Medians over seeds: steps within 3 %, the last included, and overlap within 0.02."""
    steps, spans = [], []
    for seed in range(5):
        W0 = sw.gaussian_init(4, 40, alpha, seed)
        if lr is None:
            run = sw.gradient_flow(W0, CORR, T, weights=True, rtol=1e-6, rule="spectral")
        else:
            run = sw.gradient_descent(W0, CORR, lr, 350, weights=True, rule="spectral")
        law = sw.closed_form(W0, CORR, run.times, law="spectral", lr=lr, weights=True)
        steps.append([run.step_times(), law.step_times()])
        spans.append([overlap(run.weights[-1], 4), overlap(law.weights[-1], 4)])
    flow, predicted = np.median(steps, axis=0)
    np.testing.assert_allclose(predicted, flow, rtol=0.03)
    np.testing.assert_allclose(*np.median(spans, axis=0), atol=0.02)


def test_both_rules_learn_the_same_span():
    """The columns beyond d fade by the same power of the growth under gradient flow."""
    spans = []
    for seed in range(5):
        W0 = sw.gaussian_init(3, 40, 1e-3, seed)
        runs = [
            sw.gradient_flow(W0, CORR, [end], weights=True, rule=rule)
            for rule, end in (("gradient", 40.0), ("spectral", 4.0))
        ]
        spans.append([overlap(run.weights[0], 3) for run in runs])
    gradient, spectral = np.median(spans, axis=0)
    assert gradient == pytest.approx(spectral, abs=0.005)
    assert gradient < 0.998


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.floats(-8, -2), st.sampled_from([None, 1e-3, 0.05]))
def test_invariants(seed, d, exponent, lr):
    """λ rises to 1 and stays; rotations of the rows change nothing; the weights have these eigenvalues."""
    W0 = sw.gaussian_init(d, 40, 10**exponent, seed)
    t = np.array([0.0, 0.3, 1.0, 2.0, 9.0, np.inf])
    lam, w = spectral_evolve(W0, GAMMA, t, lr, weights=True)
    assert (np.diff(lam, axis=0) >= -1e-9).all()
    np.testing.assert_allclose(lam[-1], 1, atol=1e-9)
    np.testing.assert_allclose(np.linalg.eigvalsh((w * GAMMA) @ w.transpose(0, 2, 1))[1:, ::-1], lam[1:], atol=1e-9)
    turn, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))
    np.testing.assert_allclose(spectral_evolve(turn @ W0, GAMMA, t, lr)[0], lam, atol=1e-6)
    assert (np.diff(spectral_steps(W0, GAMMA, lr)) >= 0).all()


def test_a_missing_direction_is_never_found():
    """R_dd = 0: the last row follows the best of the other columns instead."""
    W0 = sw.gaussian_init(2, 40, 1e-4, 0)
    W0[:, 1] = 0
    law = sw.closed_form(W0, CORR, [50.0], law="spectral", weights=True)
    assert law.eigenvalues[0] == pytest.approx([1, 1])
    assert overlap(law.weights[0], 2) < 0.6


@pytest.mark.parametrize("lr", [None, 0.01])
@pytest.mark.parametrize("case", ["zero", "rank 1", "rank 2", "one mode", "no first mode"])
def test_what_w0_lacks_does_not_grow(case, lr):
    """As in simulations, which leave out modes that W0 lacks, because they would grow from rounding."""
    gamma = np.array([2.0, 1.0, 0.7, 0.3, 0.1, -0.5])
    W0 = np.random.default_rng(0).standard_normal((3, 6)) * 1e-6
    if case == "zero":
        W0[:] = 0
    elif case.startswith("rank"):
        W0[1:] = np.outer([0.3, -2.0], W0[0]) if case == "rank 1" else [W0[0] - W0[1], W0[1]]
    elif case == "one mode":
        W0[:, [0, *range(2, 6)]] = 0
    else:
        W0[:, 0] = 0
    corr = sw.Correlation.from_matrix(gamma)
    has = W0.any(axis=0) if W0.any() else np.ones(6, bool)
    some = W0[:, has], sw.Correlation.from_matrix(gamma[has])
    if lr is None:
        run = sw.gradient_flow(*some, [0.4, 0.8, 4.0], rule="spectral", weights=True)
    else:
        run = sw.gradient_descent(*some, lr, 400, np.array([40, 80, 400]), rule="spectral", weights=True)
    with pytest.warns(TheoryWarning, match="misses one of the top d"):
        law = sw.closed_form(W0, corr, run.times, law="spectral", lr=lr, weights=True)
    np.testing.assert_allclose(law.eigenvalues, run.eigenvalues, atol=0.001 if lr is None else 0.03)
    ranks = [np.linalg.matrix_rank(w.weights[-1], 0.1) for w in (run, law)]
    assert ranks[0] == ranks[1] == {"zero": 0, "rank 1": 1, "rank 2": 2, "one mode": 1, "no first mode": 3}[case]
    assert np.isfinite(spectral_steps(W0, gamma, lr)).sum() == ranks[0]
    W0[:, :5] = 0  # only γ < 0, of which nothing is learned
    with pytest.warns(TheoryWarning):
        assert np.abs(sw.closed_form(W0, corr, [9.0], law="spectral", lr=lr).eigenvalues).max() < 1e-4


@pytest.mark.parametrize("lr", [0.72, 0.8, 1.5, 100.0])
def test_learning_rates_that_pass_one_in_the_first_update(lr):
    gamma = np.array([2.0, 1.99, 0.7, 0.3, 0.1, 0.05])
    W0 = sw.gaussian_init(2, 6, 0.01, 1)
    with pytest.raises(InputError, match=r"lr must .* first update .* below γ₁\^\(-1/2\) = 0.707"):
        sw.closed_form(W0, sw.Correlation.from_matrix(gamma), [1.0], law="spectral", lr=lr)
    with pytest.raises(InputError, match="lr must"):
        predict_staircase(gamma, 2, 0.01, lr=lr, optimizer="muon")
    sw.closed_form(W0, sw.Correlation.from_matrix(gamma), [1.0], law="spectral", lr=0.65)


def test_bad_input():
    W0 = sw.gaussian_init(3, 4, 1e-3, 0)
    corr = sw.Correlation.from_matrix([2.0, 1.0, -0.5, -1.0])
    with pytest.raises(InputError, match=r"at most 2 rows.*lower d"):
        sw.closed_form(W0, corr, [1.0], law="spectral")
    with pytest.raises(InputError, match="momentum must be 0 for the spectral law"):
        sw.closed_form(W0[:2], corr, [1.0], law="spectral", momentum=0.9)
    with pytest.raises(InputError, match="lr must be greater than 0"):
        sw.closed_form(W0[:2], corr, [1.0], law="spectral", lr=0.0)
