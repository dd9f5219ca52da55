"""Expected losses of batches by Monte Carlo, and their minima by general solvers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

import stairwise as sw
from stairwise.checks import InputError
from stairwise.theory.batch_noise import SOLVERS, carried, expected_hinge, expected_log_sum, smallest_batch, useful_d

PAPER = {"lambda_": 1.0, "batch_norm": False, "symmetric": True}
CASES = [
    ("barlow_twins", PAPER),
    ("barlow_twins", {"lambda_": 1.0, "batch_norm": False}),
    ("barlow_twins", {"lambda_": 0.1, "batch_norm": False, "symmetric": True}),
    ("barlow_twins", {"lambda_": 0.02, "batch_norm": False}),
    ("barlow_twins", {"lambda_": 0.05}),
    ("vicreg", {}),
    ("simclr", {"temperature": 0.3}),
]
RHO = 0.95 * 0.9 ** np.arange(16)


def hadamard(n):
    H = np.ones((1, 1))
    while len(H) < n:
        H = np.block([[H, H], [H, -H]])
    return H / np.sqrt(n)


def pairs(n, rho, seed):
    rng = np.random.default_rng(seed)
    base = np.sqrt(rho) * rng.standard_normal((n, len(rho)))
    return tuple(base + np.sqrt(1 - rho) * rng.standard_normal((n, len(rho))) for _ in "ab")


def mean_loss(loss, options, variance, rho, batch, batches=3000):
    """Of batches of Gaussian modes that a Hadamard matrix spreads evenly over the outputs, and its standard error."""
    W = hadamard(len(rho)) * np.sqrt(variance)
    a, b = (torch.tensor(x @ W.T).view(batches, batch, -1) for x in pairs(batches * batch, rho, 1))
    values = [float(getattr(sw.losses, loss)(x, y, **options)) for x, y in zip(a, b, strict=True)]
    return np.mean(values), np.std(values) / np.sqrt(batches)


@pytest.mark.parametrize(("loss", "options"), CASES)
@pytest.mark.parametrize("batch", [32, 128])
def test_expected_loss_by_monte_carlo(loss, options, batch):
    """SimCLR's is an approximation: unit vectors are treated as Gaussian."""
    found = carried(RHO, batch, loss, **options)
    mean, error = mean_loss(loss, options, found.variance, RHO, batch, 3000 if batch == 32 else 800)
    small = 0.06 if loss == "simclr" else 0.03 if options.get("batch_norm", True) else 0.0
    assert found.loss == pytest.approx(mean, abs=4 * error + small * mean)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("lambda_", [1.0, 0.02])
def test_barlow_twins_minimizes_the_expected_loss(lambda_, symmetric):
    """Written out entry by entry: E (Ĉ_ij − δ_ij)² with Isserlis' theorem, minimized by a general solver."""
    N, n = 40, len(RHO)
    H = hadamard(n)

    def expected(root):
        S, C = (H @ np.diag(x) @ H.T for x in (root**2, RHO * root**2))
        spread = np.outer(np.diag(S), np.diag(S)) + C * C.T  # Var of a_i b_j
        mixed = S * S + np.outer(np.diag(C), np.diag(C))  # Cov of a_i b_j and a_j b_i
        variance = (spread + mixed) / 2 if symmetric else spread
        weight = np.where(np.eye(n), 1.0, lambda_)
        return (weight * ((C - np.eye(n)) ** 2 + variance / N)).sum()

    found = carried(RHO, N, lambda_=lambda_, batch_norm=False, symmetric=symmetric)
    assert found.loss == pytest.approx(expected(np.sqrt(found.variance)))
    best = minimize(expected, np.full(n, 0.7), method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-14})
    assert best.fun == pytest.approx(found.loss, rel=1e-5)
    assert best.fun >= found.loss * (1 - 1e-9)
    assert best.x**2 == pytest.approx(found.variance, abs=0.02)


def test_the_law_of_the_paper_loss():
    """λ = 1 − (T + ρ tr C + (1 + ρ²) λ/ρ)/2Nρ, and a further mode needs ρ > (T/N)/(2 − tr C/N)."""
    N = 24
    found = carried(RHO, N, **PAPER)
    lam, T, trace = found.eigenvalues, found.variance.sum(), found.eigenvalues.sum()
    law = 1 - (T + RHO * trace + (1 + RHO**2) * lam / RHO) / (2 * N * RHO)
    assert lam == pytest.approx(np.maximum(law, 0))
    assert found.threshold == pytest.approx((T / N) / (2 - trace / N))
    assert 0 < found.alive < len(RHO)
    assert RHO[found.alive - 1] > found.threshold >= RHO[found.alive]


def test_hinge_by_monte_carlo():
    rng = np.random.default_rng(0)
    for variance in (0.5, 0.9, 1.0, 1.3):
        sigma = np.sqrt(variance * rng.standard_normal((20_000, 33)).var(axis=1, ddof=1) + 1e-4)
        assert expected_hinge(variance, 32) == pytest.approx(np.maximum(0, 1 - sigma).mean(), abs=0.003)


@pytest.mark.parametrize(("p", "q", "negatives"), [(4.0, 0.5, 62), (2.0, 1.5, 254), (4.0, 3.0, 30), (0.5, 0.1, 2046)])
def test_log_sum_by_monte_carlo(p, q, negatives):
    x = np.sqrt(q) * np.random.default_rng(0).standard_normal((4000, negatives))
    values = np.log(np.exp(p) + np.exp(x).sum(axis=1))
    assert expected_log_sum(p, q, negatives) == pytest.approx(values.mean(), abs=4 * values.std() / 60)


def test_many_negatives():
    """log M + q/2 + e^{p − q/2}/M − (e^q − 1)/2M."""
    p, q, M = 1.0, 0.8, 4000
    first = np.log(M) + q / 2 + np.exp(p - q / 2) / M - (np.exp(q) - 1) / (2 * M)
    assert expected_log_sum(p, q, M) == pytest.approx(first, abs=3e-7)


@pytest.mark.parametrize("temperature", [0.1, 0.2, 0.5])
def test_simclr_fills_modes_up_to_a_threshold(temperature):
    """With many negatives s = τ(ρ − ρ*)₊, Σ s = 1."""
    found = carried(RHO, 2**20, "simclr", temperature=temperature)
    assert found.variance.sum() / len(RHO) == pytest.approx(1)
    filled = temperature * np.maximum(RHO - found.threshold, 0) * len(RHO)
    assert found.variance == pytest.approx(filled, rel=1e-3, abs=1e-3)


def test_vicreg_without_noise():
    """4 s = 50(ρ − ρ*), 50(1 − ρ*) = 12.5/√v + 4v for outputs of variance v: a mode must be shared, at any batch."""
    found = carried(np.linspace(0.99, 0.1, 100), 2**24, "vicreg")
    steps = np.diff(found.variance[: found.alive]) / np.diff(found.rho[: found.alive])
    assert steps == pytest.approx(12.5, rel=1e-3)
    v = found.variance.sum() / 100
    assert v < 0.95
    assert 50 * (1 - found.threshold) == pytest.approx(12.5 / np.sqrt(v + 1e-4) + 4 * v, rel=1e-3)


def test_batch_norm_removes_the_dependence_on_the_batch():
    small, large = (carried(RHO, batch, lambda_=0.0051) for batch in (64, 4096))
    assert abs(small.above_tenth - large.above_tenth) <= 1
    c = small.eigenvalues.sum() / 16
    assert small.noise == pytest.approx((0.0051 * 16 * 15 + 16 * (1 - c**2) ** 2) / 64)
    without = [carried(RHO, batch, lambda_=0.0051, batch_norm=False) for batch in (8, 4096)]
    assert without[0].above_tenth < without[1].above_tenth


@settings(deadline=None, max_examples=60)
@given(
    rho=st.lists(st.floats(-0.5, 1.0), min_size=2, max_size=20).filter(lambda r: max(r) > 0.05),
    batch=st.integers(4, 3000),
    case=st.sampled_from(CASES),
)
def test_laws_of_every_loss(rho, batch, case):
    """Modes fill in the order of their correlation, the threshold separates them, and noise is part of the loss."""
    loss, options = case
    found = carried(rho, batch, loss, **options)
    assert np.all(np.diff(found.rho) <= 0)
    assert np.isfinite(found.variance).all()
    assert (found.variance >= 0).all()
    usable = np.maximum(found.rho, 1e-9)
    assert (usable[found.variance > 1e-9] >= found.threshold - 1e-6).all()
    assert (usable[found.variance == 0] <= found.threshold + 1e-6).all() or (found.rho[found.variance == 0] <= 0).all()
    assert found.alive >= found.above_tenth >= 0
    assert loss == "simclr" or 0 <= found.noise <= found.loss * (1 + 1e-9)


@pytest.mark.parametrize("loss", SOLVERS)
def test_a_larger_batch_carries_no_less(loss):
    options = PAPER if loss == "barlow_twins" else {}
    counts = [carried(RHO, 2**k, loss, **options) for k in range(3, 14)]
    for name in ("above_tenth", "above_half"):
        assert np.all(np.diff([getattr(c, name) for c in counts]) >= 0), name
    assert counts[-1].threshold < counts[0].threshold


def test_smallest_batch_and_useful_d():
    batch = smallest_batch(RHO, 10, **PAPER)
    assert carried(RHO, batch, **PAPER).above_half >= 10 > carried(RHO, batch - 1, **PAPER).above_half
    assert smallest_batch(RHO, 15, "vicreg") is None
    d = useful_d(np.full(60, 0.5), 64, **PAPER)
    counts = [carried(np.full(60, 0.5), 64, d=k, **PAPER).above_half for k in range(1, 61)]
    assert counts[d - 1] == max(counts) == d < 60


def test_more_noise_than_gaussian_modes_is_a_smaller_batch():
    assert carried(RHO, 64, excess=2.0, **PAPER).variance == pytest.approx(carried(RHO, 32, **PAPER).variance)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0.5, 1.5], 32), "rho must be correlations"),
        (([], 32), "rho must be correlations"),
        (([0.5], 1), "batch must be at least 2"),
        (([0.5], 32, "byol"), "loss is unknown"),
        (([0.5], 32, "simclr", 0), "d must be"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(InputError, match=words):
        carried(*arguments)
