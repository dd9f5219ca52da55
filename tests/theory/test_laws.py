"""The two closed forms against one another, the flow and descent."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stairwise.checks import InputError, TheoryWarning
from stairwise.dynamics.descent import gradient_descent
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.alignment import gaussian_init
from stairwise.theory.conditions import check_conditions
from stairwise.theory.correlation import Correlation
from stairwise.theory.ensemble import predict_staircase
from stairwise.theory.laws import LAWS, closed_form, early_weights, learning_rate_bound, log_growth
from stairwise.theory.modes import Modes
from stairwise.theory.solutions import top_spectral_weights

SPREAD = Correlation.from_matrix([1.0, 0.5, 0.25, 0.125, -0.2])
CLOSE = Correlation.from_matrix([1.0, 0.99, 0.98, 0.97, 0.5, 0.2])
HARMONIC = Correlation.from_matrix(1 / np.arange(1.0, 60.0))


def flow_error(corr, d, alpha, seed, law, horizon=1.3):
    W0 = gaussian_init(d, corr.features, alpha, seed)
    t = np.linspace(0, horizon * -2 * np.log(alpha) / (8 * corr.eigenvalues[d - 1]), 300)
    return np.abs(closed_form(W0, corr, t, law).eigenvalues - gradient_flow(W0, corr, t).eigenvalues).max()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("lam0", [1e-12, 1e-3, 0.4, 0.95])
def test_exact_for_aligned_init(law, lam0):
    gamma = SPREAD.eigenvalues[:3]
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    s0 = np.sqrt(lam0 / gamma)
    t = np.array([0.0, 0.5, 3.0, 20.0, np.inf])
    traj = closed_form(rotation @ np.diag(s0) @ np.eye(3, 5), SPREAD, t, law)
    np.testing.assert_allclose(traj.eigenvalues, -np.sort(-Modes(gamma, s0).eigenvalues(t), axis=1), atol=1e-10)


@pytest.mark.parametrize("alpha", [1e-6, 0.2])
def test_logistic_law_is_exact_when_all_gammas_coincide(alpha):
    corr = Correlation.from_matrix(0.7 * np.eye(6))
    W0 = gaussian_init(3, 6, alpha, 0)
    t = np.linspace(0, 8, 60)
    law, flow = (f(W0, corr, t).eigenvalues for f in (closed_form, gradient_flow))
    np.testing.assert_allclose(law, flow, atol=1e-6)


@pytest.mark.parametrize(
    ("corr", "d", "alpha", "bound"),
    [
        (SPREAD, 4, 1e-6, 1e-3),
        (SPREAD, 4, 1e-3, 0.02),
        (CLOSE, 2, 1e-6, 1e-3),
        (CLOSE, 2, 1e-3, 1e-3),
        (HARMONIC, 10, 1e-6, 0.01),
        (HARMONIC, 10, 1e-3, 0.02),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_logistic_law_follows_the_flow(corr, d, alpha, bound, seed):
    assert flow_error(corr, d, alpha, seed, "logistic") <= bound


def test_aligned_law_fails_where_the_logistic_one_does_not():
    assert flow_error(CLOSE, 2, 1e-3, 0, "aligned") > 50 * flow_error(CLOSE, 2, 1e-3, 0, "logistic")


@pytest.mark.parametrize("law", LAWS)
def test_starts_where_it_should(law):
    W0 = gaussian_init(3, 5, 1e-4, 2)
    lam = np.linalg.eigvalsh(W0 @ SPREAD.matrix @ W0.T)[::-1]
    found = closed_form(W0, SPREAD, 0.0, law).eigenvalues[0]
    if law == "logistic":
        np.testing.assert_allclose(found, lam, rtol=1e-9, atol=1e-20)
    assert (found < 1e-6).all()


@pytest.mark.parametrize("law", LAWS)
def test_array_equals_loop(law):
    W0, t = gaussian_init(3, 5, 1e-4, 2), np.array([0.0, 1.0, 5.0, 30.0])
    together = closed_form(W0, SPREAD, t, law).eigenvalues
    apart = np.concatenate([closed_form(W0, SPREAD, x, law).eigenvalues for x in t])
    np.testing.assert_allclose(together, apart, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("lr", [None, 0.02])
def test_weights_carry_the_spectrum(law, lr):
    W0, t = gaussian_init(3, 5, 1e-3, 2), np.array([0.0, 1.0, 5.0, 12.0, 60.0, np.inf])
    traj = closed_form(W0, SPREAD, t, law, lr=lr, weights=True)
    carried = np.linalg.eigvalsh(traj.weights @ SPREAD.matrix @ traj.weights.transpose(0, 2, 1))[:, ::-1]
    np.testing.assert_allclose(carried, traj.eigenvalues, atol=1e-8)


@pytest.mark.parametrize("law", LAWS)
def test_ends_at_the_top_spectral_weights(law):
    W = closed_form(gaussian_init(3, 5, 1e-4, 2), SPREAD, np.inf, law, weights=True).weights[0]
    best = top_spectral_weights(SPREAD, 3)
    np.testing.assert_allclose(W.T @ W, best.T @ best, atol=1e-6)


def test_weights_outside_the_data_stay():
    rng = np.random.default_rng(0)
    corr = Correlation.from_pairs(*rng.standard_normal((2, 2, 30)))
    W0 = gaussian_init(2, 30, 1e-4, 0)
    outside = np.eye(30) - corr.eigenvectors @ corr.eigenvectors.T
    for law in LAWS:
        W = closed_form(W0, corr, [0.0, 0.1], law, weights=True).weights
        np.testing.assert_allclose(W @ outside, np.broadcast_to(W0 @ outside, W.shape), atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    log_alpha=st.floats(-150, -1),
    log_x=st.floats(-3, 8),
    law=st.sampled_from(LAWS),
    lr=st.sampled_from([None, 0.01]),
)
def test_no_overflow_anywhere(seed, log_alpha, log_x, law, lr):
    """8γt up to 1e8, starts down to 1e-150, degenerate and negative γ."""
    gamma = np.array([1.0, 1.0, 1.0 - 1e-9, 0.3, 0.0, -0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", TheoryWarning)
        traj = closed_form(
            gaussian_init(3, 6, 10**log_alpha, seed),
            Correlation.from_matrix(gamma),
            10**log_x / 8,
            law,
            lr,
            weights=True,
        )
    assert np.isfinite(traj.eigenvalues).all()
    assert np.isfinite(traj.weights).all()
    assert traj.eigenvalues.max() <= 1 + 1e-9
    assert traj.eigenvalues.min() >= -0.1


def test_spectrum_grows_with_time():
    lam = closed_form(gaussian_init(6, 59, 1e-5, 1), HARMONIC, np.linspace(0, 30, 500)).eigenvalues
    assert (np.diff(lam, axis=0) > -1e-9).all()


@pytest.mark.parametrize("a", [0.02, 0.1, 0.2])
def test_finite_learning_rate_law(a):
    """Against descent: growth 1 + a a step and odds μ(1 + μ)^{3a/2}, a = 4 lr γ; error O(a²), flow's is O(a)."""
    corr = Correlation.from_matrix([1.0, 0.3])
    W0, lr = np.diag([1e-5, 1e-5]), a / 4
    descent = gradient_descent(W0, corr, lr, int(14 / lr))
    law = closed_form(W0, corr, descent.times, lr=lr).eigenvalues
    plain = closed_form(W0, corr, descent.times).eigenvalues
    assert np.abs(law - descent.eigenvalues).max() < 0.25 * a**2
    assert np.abs(plain - descent.eigenvalues).max() > 0.4 * a
    measured, predicted = descent.step_times(), closed_form(W0, corr, descent.times, lr=lr).step_times()
    np.testing.assert_allclose(predicted, measured, rtol=2e-3 if a < 0.15 else 1e-2)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_growth(momentum):
    """In the linear phase the two-root formula is exact."""
    gamma = np.array([1.0, 0.4, -0.02])
    W0 = 1e-9 * np.eye(3)
    run = gradient_descent(W0, Correlation.from_matrix(gamma), 0.01, 40, momentum=momentum, weights=True)
    grown = np.abs(np.einsum("tjj->tj", run.weights)) / 1e-9
    np.testing.assert_allclose(np.log(grown), log_growth(gamma, run.times, 0.01, momentum), atol=1e-9)


def test_momentum_step_times():
    corr = Correlation.from_matrix([1.0, 0.5, 0.2])
    W0 = gaussian_init(2, 3, 1e-6, 0)
    run = gradient_descent(W0, corr, 1e-3, 2000, momentum=0.9)
    law = closed_form(W0, corr, run.times, lr=1e-3, momentum=0.9)
    np.testing.assert_allclose(law.step_times(), run.step_times(), rtol=0.02)
    with pytest.warns(TheoryWarning, match="with momentum only the growth is exact"):
        closed_form(W0, corr, [1.0], lr=1e-3, momentum=0.9)


def test_early_weights():
    W0 = gaussian_init(2, 5, 1e-8, 0)
    flow = gradient_flow(W0, SPREAD, [3.0], weights=True).weights[0]
    np.testing.assert_allclose(early_weights(W0, SPREAD, 3.0), flow, rtol=1e-6)


def test_learning_rate_bound_separates_stable_from_unstable():
    """With a second feature, descent just above the bound escapes into it; alone, it cannot settle."""
    corr, bound = Correlation.from_matrix([2.0]), learning_rate_bound([2.0])
    assert gradient_descent([[0.1]], corr, 0.98 * bound, 3000).loss[-1] < 1e-6
    assert gradient_descent([[0.1]], corr, 1.02 * bound, 3000).loss[-1] > 1e-4
    assert learning_rate_bound([-1.0]) == 0.5
    assert learning_rate_bound([0.0]) == np.inf


@pytest.mark.parametrize("lr", [None, 0.2])
def test_staircase_reaches_every_step(lr):
    assert np.isfinite(predict_staircase([1.0, 0.9, 0.1], 2, 1e-7, lr=lr).step_quantiles(0.95)).all()
    with pytest.raises(InputError, match="alpha must start with all eigenvalues of C below 1"):
        predict_staircase([1.0, 0.9, 0.1], 2, 10.0)


def test_rank_deficient_start_stays_so():
    W0, t = 1e-3 * np.ones((2, 5)), [20.0, 50.0]
    flow = gradient_flow(W0, SPREAD, t).eigenvalues
    for law in LAWS:
        np.testing.assert_allclose(closed_form(W0, SPREAD, t, law).eigenvalues[:, 1], flow[:, 1], atol=1e-6)


def test_staircase_over_initializations_brackets_the_flow():
    corr = Correlation.from_matrix([4.0, 2.0, 1.0, 0.5])
    predicted = predict_staircase(corr.eigenvalues, 3, 1e-5, draws=200)
    low, _, high = predicted.step_quantiles((0.01, 0.5, 0.99))
    steps = np.array(
        [gradient_flow(gaussian_init(3, 4, 1e-5, s), corr, predicted.times).step_times() for s in range(40)]
    )
    inside = (steps >= low) & (steps <= high)
    assert inside.mean() > 0.93
    assert predicted.loss_quantiles(0.5)[0, 0] == pytest.approx(3)


def test_conditions_name_every_problem():
    W0 = gaussian_init(2, 4, 1e-6, 0)
    fine = check_conditions(W0, Correlation.from_matrix([1.0, 0.3, 0.1, 0.0]))
    assert fine.positive
    assert fine.unique
    assert fine.full_rank
    assert fine.closest == pytest.approx(1 / 3)
    assert not fine.problems("aligned") + fine.problems("logistic")
    cases = {
        "positive": (W0, [1.0, -0.3, -0.4, -0.5], "aligned"),
        "misses": (np.diag([1e-6, 0.0]) @ np.eye(2, 4), [1.0, 0.3, 0.1, 0.0], "aligned"),
        "not small": (1e6 * W0, [0.2, 0.1, 0.05, 0.0], "logistic"),
        "coincide": (W0, [1.0, 1.0, 0.1, 0.0], "aligned"),
        "are close": (W0, [1.0, 0.99, 0.1, 0.0], "aligned"),
    }
    for word, (w, gamma, law) in cases.items():
        found = check_conditions(w, Correlation.from_matrix(gamma)).problems(law)
        assert any(word in problem for problem in found), (word, found)


def test_a_law_that_cannot_be_trusted_warns():
    with pytest.warns(TheoryWarning, match="aligned law may err"):
        closed_form(gaussian_init(2, 6, 1e-3, 0), CLOSE, [1.0], law="aligned")


def test_expected_error_of_the_aligned_law_is_the_right_size():
    for seed in range(4):
        expected = check_conditions(gaussian_init(3, 59, 1e-8, seed), HARMONIC).aligned_error
        measured = flow_error(HARMONIC, 3, 1e-8, seed, "aligned")
        assert 0.02 * expected < measured < 3 * expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"law": "logitsic"}, "did you mean 'logistic'"),
        ({"times": [-1.0]}, "times must be nonnegative"),
        ({"times": [np.nan]}, "times must be nonnegative"),
        ({"lr": 0.0}, "lr must be greater than 0"),
        ({"lr": 0.3}, "lr must be below 0.25: descent diverges"),
        ({"times": [[1.0]]}, "times must be a number or a vector"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum must be below 1"),
        ({"momentum": 0.5}, "momentum needs lr"),
        ({"W0": np.ones((2, 4))}, "W0 must have 5 columns"),
        ({"W0": 9 * np.ones((2, 5))}, "must start with all eigenvalues of C below 1"),
        ({"W0": np.full((2, 5), np.nan)}, "must be finite"),
    ],
)
def test_bad_input(change, words):
    arguments = {"W0": gaussian_init(2, 5, 1e-3, 0), "corr": SPREAD, "times": [1.0], **change}
    with pytest.raises(InputError, match=words):
        closed_form(**arguments)
