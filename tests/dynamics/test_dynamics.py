"""Flow and descent of the linear model against independent ways."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from stairwise.checks import InputError
from stairwise.data.crops import two_crops
from stairwise.data.images import load
from stairwise.dynamics import integrate
from stairwise.dynamics.descent import gradient_descent
from stairwise.dynamics.eigenbasis import Split, jacobian, rhs
from stairwise.dynamics.flow import appendix_flow, gradient_flow
from stairwise.dynamics.saddles import saddle_at
from stairwise.theory.alignment import appendix_entries, gaussian_init, qr_nonnegative
from stairwise.theory.correlation import Correlation
from stairwise.theory.laws import closed_form
from stairwise.theory.modes import Modes
from stairwise.theory.trajectory import Trajectory
from tests.numerics import derivative

STIFF = Correlation.from_matrix(np.concatenate([[1000.0, 40.0, 5.0, 1.0], np.linspace(0.8, -0.5, 20)]))


def flow_by_definition(W0, gamma, t):
    """Eq. 6 on the raw weights, explicit and tight."""

    def slope(_, w):
        W = w.reshape(W0.shape)
        return (-4 * (W @ gamma @ W.T - np.eye(len(W))) @ W @ gamma).ravel()

    y = solve_ivp(slope, (0, t[-1]), W0.ravel(), "DOP853", t, rtol=1e-12, atol=1e-20).y
    return y.T.reshape(len(t), *W0.shape)


@pytest.mark.parametrize("alpha", [1e-6, 0.05])
def test_stiff_flow_is_the_definition(alpha):
    W0, t = gaussian_init(4, 24, alpha, 0), np.linspace(0, 0.6, 40)
    reference = flow_by_definition(W0, STIFF.matrix, t)
    flow = gradient_flow(W0, STIFF, t, weights=True, rtol=1e-10)
    np.testing.assert_allclose(flow.weights, reference, atol=1e-6)
    spectrum = np.linalg.eigvalsh(reference @ STIFF.matrix @ reference.transpose(0, 2, 1))[:, ::-1]
    np.testing.assert_allclose(flow.eigenvalues, spectrum, atol=1e-6)
    np.testing.assert_allclose(
        flow.loss, ((reference @ STIFF.matrix @ reference.transpose(0, 2, 1) - np.eye(4)) ** 2).sum((1, 2)), atol=1e-5
    )


def test_explicit_and_implicit_roads_agree(monkeypatch):
    W0, t = gaussian_init(3, 24, 1e-4, 0), np.linspace(0, 0.5, 30)
    implicit = gradient_flow(W0, STIFF, t).eigenvalues
    monkeypatch.setattr(integrate, "IMPLICIT_LIMIT", 0)
    np.testing.assert_allclose(gradient_flow(W0, STIFF, t).eigenvalues, implicit, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_flow_is_the_proposition_for_aligned_init(sign):
    gamma = sign * np.array([1.0, 0.5])
    corr, t = Correlation.from_matrix(gamma), np.linspace(0, 5, 30)
    expected = -np.sort(-Modes(gamma, 0.1).eigenvalues(t), axis=1)
    np.testing.assert_allclose(gradient_flow(0.1 * np.eye(2), corr, t).eigenvalues, expected, atol=1e-7)


def test_times_in_any_order_and_repeated():
    W0 = gaussian_init(2, 24, 1e-3, 0)
    forward = gradient_flow(W0, STIFF, [0.0, 0.01, 0.05]).eigenvalues
    np.testing.assert_allclose(gradient_flow(W0, STIFF, [0.05, 0.0, 0.01, 0.05]).eigenvalues, forward[[2, 0, 1, 2]])
    assert gradient_flow(W0, STIFF, 0.0).eigenvalues.shape == (1, 2)


@pytest.mark.parametrize("s", [1e-6, 1e-14])
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_very_different_size(s, turned):
    """A small mode beside a large one must be followed to relative accuracy, also when they are mixed."""
    corr, t = Correlation.from_matrix([1.0, 0.5, 0.25]), np.linspace(0, 30, 301)
    W0 = np.array([[0.5, 0.0, 0.0], [0.0, s, 0.0]])
    exact = np.log((1 - 0.5 * s**2) / (0.5 * s**2)) / 4
    if turned:
        if s < 1e-12:
            pytest.skip("the mixture has lost the small one to rounding already")
        W0 = np.array([[0.6, 0.8], [-0.8, 0.6]]) @ W0
    assert gradient_flow(W0, corr, t).step_times()[1] == pytest.approx(exact, rel=1e-5)


def test_large_start():
    modes = Modes([2.0, 1.0], 1e3)
    flow = gradient_flow(1e3 * np.eye(2), Correlation.from_matrix([2.0, 1.0]), [0.1, 1.0]).eigenvalues
    np.testing.assert_allclose(flow, -np.sort(-modes.eigenvalues([0.1, 1.0]), axis=1), rtol=1e-5)


def test_thin_equals_dense():
    rng = np.random.default_rng(0)
    x_a, x_b = rng.standard_normal((2, 6, 40))
    W0, t = gaussian_init(3, 40, 1e-4, 0), np.linspace(0, 2, 20)
    thin = gradient_flow(W0, Correlation.from_pairs(x_a, x_b), t, weights=True)
    dense = gradient_flow(W0, Correlation.from_matrix(Correlation.from_pairs(x_a, x_b).matrix), t, weights=True)
    np.testing.assert_allclose(thin.weights, dense.weights, atol=1e-6)


def test_passive_columns_change_nothing():
    corr = Correlation.from_pairs(*two_crops(load("photos"), 100, 12))
    W0 = gaussian_init(5, corr.features, 1e-7, 0)
    t = np.linspace(0, 1.0, 50)
    assert Split.of(W0, corr, 1.0, 1e-9).active.sum() < 60
    loose = gradient_flow(W0, corr, t, rtol=1e-9)
    u, gamma = corr.project(W0)
    tight = solve_ivp(
        lambda _, y: rhs(y.reshape(5, -1), gamma).ravel(), (0, 1), u.ravel(), "DOP853", t, rtol=1e-11, atol=1e-18
    )
    whole = tight.y.T.reshape(50, 5, -1)
    spectra = np.linalg.eigvalsh((whole * gamma) @ whole.transpose(0, 2, 1))[:, ::-1]
    np.testing.assert_allclose(loose.eigenvalues, spectra, atol=1e-6)
    start = np.linalg.eigvalsh((u * gamma) @ u.T)[::-1]
    np.testing.assert_allclose(loose.eigenvalues[0], start, rtol=1e-9)  # tiny, and exact all the same


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_descent_is_autograd_on_the_raw_pairs(momentum):
    torch = pytest.importorskip("torch")
    x_a, x_b = two_crops(load("photos"), 60, 8)
    corr = Correlation.from_pairs(x_a, x_b)
    W0 = gaussian_init(4, x_a.shape[1], 1e-3, 0)
    lr = 0.2 / corr.eigenvalues[0] / 4
    W = torch.tensor(W0, requires_grad=True)
    optimizer = torch.optim.SGD([W], lr=lr, momentum=momentum)
    a, b = torch.tensor(x_a), torch.tensor(x_b)
    for _ in range(1000):
        optimizer.zero_grad()
        z_a, z_b = a @ W.T, b @ W.T
        c = (z_a.T @ z_b + z_b.T @ z_a) / (2 * len(a))
        ((c - torch.eye(4)) ** 2).sum().backward()
        optimizer.step()
    run = gradient_descent(W0, corr, lr, 1000, record_every=1000, momentum=momentum, weights=True)
    assert run.eigenvalues[-1, 0] > 0.9  # it has learned something
    np.testing.assert_allclose(run.weights[-1], W.detach().numpy(), atol=1e-9)


def test_descent_tends_to_flow():
    W0 = gaussian_init(3, 24, 1e-3, 0)
    t = 0.02
    exact = gradient_flow(W0, STIFF, [t], rtol=1e-11).eigenvalues[0]
    errors = [np.abs(gradient_descent(W0, STIFF, t / n, n, n).eigenvalues[-1] - exact).max() for n in (4000, 8000)]
    assert errors[1] < 0.6 * errors[0] < 0.01


def test_records():
    W0 = gaussian_init(2, 24, 1e-3, 0)
    seen = []
    run = gradient_descent(W0, STIFF, 1e-5, 10, record_every=4, progress=lambda step, *_: seen.append(step))
    np.testing.assert_allclose(run.times, 1e-5 * np.array([0, 4, 8, 10]))
    assert seen == [0, 4, 8, 10]
    chosen = gradient_descent(W0, STIFF, 1e-5, 10, record_every=np.array([8, 4, 4]))
    np.testing.assert_array_equal(chosen.eigenvalues, run.eigenvalues[1:3])


def test_jacobian():
    u, v, gamma = *np.random.default_rng(0).standard_normal((2, 3, 4)), np.array([2.0, 1.0, 0.5, -0.3])
    slope = derivative(lambda e: rhs(u + e * v, gamma), 0.0, 1.0)
    np.testing.assert_allclose((jacobian(u, gamma) @ v.ravel()).reshape(3, 4), slope, atol=1e-9)


def test_one_less_unstable_mode_per_plateau():
    """Full Hessian index (d − k)(p − k), modes waiting d − k, along a real trajectory."""
    gamma = np.array([8.0, 4.0, 2.0, 1.0, 0.5, -0.5])
    corr, d, p = Correlation.from_matrix(gamma), 3, 5
    W0 = gaussian_init(d, 6, 1e-9, 0)
    steps = gradient_flow(W0, corr, np.linspace(0, 6, 4000)).step_times()
    plateaus = [0.0, *(steps[:-1] + steps[1:]) / 2, 6.0]
    weights = gradient_flow(W0, corr, plateaus, weights=True, rtol=1e-10).weights
    for k, W in enumerate(weights):
        saddle = saddle_at(W, corr)
        assert saddle.modes == d - k
        assert saddle.index == (d - k) * (p - k)


@pytest.mark.parametrize("gamma", [[1.0, 0.1, 0.01, 0.005], [217.0, 101.0, 46.0, 20.0, 5.8, 1.0], [2.0, 1.0, -3.0]])
@pytest.mark.parametrize("learned", [0, 1, 2])
def test_the_index_of_exact_saddles_of_spread_spectra(gamma, learned):
    W, d, p = np.zeros((2, len(gamma))), 2, int((np.array(gamma) > 0).sum())
    for j in range(learned):
        W[j, j] = gamma[j] ** -0.5
    saddle = saddle_at(W, Correlation.from_matrix(gamma))
    assert (saddle.modes, saddle.index) == (d - learned, (d - learned) * (p - learned))


@pytest.mark.parametrize("alpha", [1e-160, 1e-200, 1e-290])
def test_starts_whose_squares_underflow(alpha):
    corr, t = Correlation.from_matrix([2.0, 1.0, 0.5]), np.linspace(0, 180, 2000)
    W0 = gaussian_init(2, 3, alpha, 0)
    flow, law = (f(W0, corr, t).step_times() for f in (gradient_flow, closed_form))
    np.testing.assert_allclose(flow, law, rtol=1e-4)


def test_appendix_entries():
    """Errata A16, A17: diagonal and columns beyond d agree; others to leading order only."""
    gamma = 2.0 ** -np.arange(1, 6)
    _, A0 = qr_nonnegative(gaussian_init(3, 5, 1e-9, 1))
    t = np.linspace(0, 260, 200)
    true, theory = appendix_flow(A0, gamma, t), appendix_entries(A0, gamma, t)
    diagonal = np.arange(3)
    np.testing.assert_allclose(true[:, diagonal, diagonal], theory[:, diagonal, diagonal], rtol=1e-5)
    np.testing.assert_allclose(true[:, :, 3:], theory[:, :, 3:], rtol=1e-2)
    off = np.abs(true[:, :, :3][:, ~np.eye(3, dtype=bool)])
    assert 1e-6 < off.max() < 0.02
    assert np.abs(np.tril(true[-1][:, :3], -1)).max() > 0.1 * np.abs(np.triu(true[-1][:, :3], 1)).max()
    main = gradient_flow(A0, Correlation.from_matrix(gamma), t / 4, weights=True).weights
    np.testing.assert_allclose(main, true, atol=1e-6)


def test_step_times_of_a_trajectory():
    modes = Modes([3.0, 1.0, 0.1], 1e-4)
    t = np.linspace(0, 4, 25)  # coarse: log-odds are straight, so interpolation is exact
    steps = Trajectory(t, modes.eigenvalues(t), "closed form").step_times()
    lam0 = modes.eigenvalues(0.0)
    exact = np.log((1 - lam0) / lam0) / (8 * np.asarray(modes.gamma))
    np.testing.assert_allclose(steps, np.where(exact < 4, exact, np.inf), rtol=1e-3)
    shuffled = np.random.default_rng(0).permutation(25)
    mixed = Trajectory(np.append(t[shuffled], np.inf), np.vstack([modes.eigenvalues(t)[shuffled], np.ones(3)]), "")
    np.testing.assert_allclose(mixed.step_times(), steps)
    assert np.isinf(Trajectory(np.array([np.inf]), np.ones((1, 3)), "").step_times()).all()
    with pytest.raises(InputError, match="level"):
        Trajectory(t, modes.eigenvalues(t), "").step_times(level=1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w: gradient_flow(w, STIFF, [-1.0]), "times must be nonnegative"),
        (lambda w: gradient_flow(w, STIFF, [[1.0]]), "times must be a number or a vector"),
        (lambda w: gradient_flow(w, STIFF, "soon"), "times must be real numbers"),
        (lambda w: gradient_flow(w, STIFF, [1j]), "times must hold real numbers"),
        (lambda w: gradient_flow(w, STIFF, [np.inf]), "times must be finite.*use a closed form for the limit"),
        (lambda w: gradient_flow(w[:, :5], STIFF, [1.0]), "W0 must have 24 columns"),
        (lambda w: gradient_descent(w, STIFF, 0.0, 5), "lr must be greater than 0"),
        (lambda w: gradient_descent(w, STIFF, 1e-5, 0), "steps must be a whole number"),
        (lambda w: gradient_descent(w, STIFF, 1e-5, 5, record_every=np.array([7])), "between 0 and 5"),
        (lambda w: gradient_descent(w, STIFF, 0.01, 500), r"lr must be below 0\.00025: training diverged"),
        (lambda w: appendix_flow(w, np.ones(3), [1.0]), "A0 must have 3 columns"),
        (lambda w: appendix_entries(w, STIFF.eigenvalues, [1.0]), "A0 must be upper triangular"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(InputError, match=words):
        call(gaussian_init(2, 24, 1e-3, 0))


@pytest.mark.parametrize("most", integrate.EVALUATIONS, ids=["implicit", "explicit"])
def test_hopeless_times_are_refused_early(most):
    slope = integrate._counted(lambda y: -y, 1e200, most)
    for _ in range(integrate.EARLY):
        slope(1e9, np.ones(2))
    with pytest.raises(InputError, match=r"times must be reached within .*the flow came to t = 1e.09"):
        slope(1e9, np.ones(2))
    slope = integrate._counted(lambda y: -y, 1e12, most)
    for _ in range(2 * integrate.EARLY):  # a hundredth of the way
        slope(1e10, np.ones(2))
