"""Losses against independent statements of their formulas, finite differences, symmetries and modewise rates."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stairwise as sw
from stairwise import losses
from stairwise.checks import InputError, TheoryWarning
from stairwise.losses.preconditioning import cubic_rounds, inverse_root
from stairwise.theory import landscapes
from tests.two_processes import cases, joint, run_two


def views(n=24, d=5, seed=0):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n, d)) @ rng.standard_normal((d, d))
    return tuple(torch.tensor(base + 0.5 * rng.standard_normal((n, d)), dtype=torch.float64) for _ in "ab")


def paper_loss(z_a, z_b):
    return losses.barlow_twins(z_a, z_b, lambda_=1.0, batch_norm=False, symmetric=True)


# entry by entry, with loops and without torch


def barlow_by_hand(a, b, lambda_=0.0051, standardize=True):
    if standardize:
        a, b = ((z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5) for z in (a, b))
    n, d = a.shape
    total = 0.0
    for i in range(d):
        for j in range(d):
            c = sum(a[k, i] * b[k, j] for k in range(n)) / n
            total += (c - 1) ** 2 if i == j else lambda_ * c**2
    return total


def symmetric_by_hand(a, b):
    C = (a.T @ b + b.T @ a) / (2 * len(a))
    return ((C - np.eye(a.shape[1])) ** 2).sum()


def simclr_by_hand(a, b, tau=0.2):
    z = [row / np.sqrt((row**2).sum()) for row in np.concatenate([a, b])]
    n, total = len(a), 0.0
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        others = sum(np.exp(z[i] @ z[k] / tau) for k in range(2 * n) if k != i)
        total -= np.log(np.exp(z[i] @ z[partner] / tau) / others)
    return total / (2 * n)


def vicreg_by_hand(a, b, weights=(25, 25, 1)):
    n, d = a.shape
    variance = covariance = 0.0
    for z in (a, b):
        S = np.cov(z.T, ddof=1)
        variance += np.maximum(0, 1 - np.sqrt(np.diag(S) + 1e-4)).mean() / 2
        covariance += sum(S[i, j] ** 2 for i in range(d) for j in range(d) if i != j) / d
    return weights[0] * ((a - b) ** 2).sum() / (n * d) + weights[1] * variance + weights[2] * covariance


def frossl_by_hand(a, b):
    d, spread = a.shape[1], 0.0
    a, b = ((z - z.mean(0)) / np.sqrt(((z - z.mean(0)) ** 2).sum(0)) * np.sqrt(d) for z in (a, b))
    for z in (a, b):
        p = np.linalg.svd(z, compute_uv=False) ** 2
        spread += np.log(((p / p.sum()) ** 2).sum())
    return ((a - b) ** 2).mean() + spread


def spectral_contrastive_by_hand(a, b):
    n = len(a)
    alike = sum(a[i] @ b[i] for i in range(n)) / n
    apart = sum((a[i] @ b[k]) ** 2 for i in range(n) for k in range(n) if i != k) / (n * (n - 1))
    return -2 * alike + apart


def byol_by_hand(a, b):
    return np.mean([2 - 2 * p @ q / np.linalg.norm(p) / np.linalg.norm(q) for p, q in zip(a, b, strict=True)])


def spectral_by_hand(h):
    def loss(a, b):
        return sum(h(x) for x in np.linalg.eigvals((a.T @ b + b.T @ a) / (2 * len(a))).real)

    return loss


FORMULAS = {
    "barlow_twins": (losses.barlow_twins, barlow_by_hand),
    "paper": (paper_loss, symmetric_by_hand),
    "simclr": (losses.simclr, simclr_by_hand),
    "vicreg": (losses.vicreg, vicreg_by_hand),
    "frossl": (losses.frossl, frossl_by_hand),
    "spectral_contrastive": (losses.spectral_contrastive, spectral_contrastive_by_hand),
    "byol": (losses.byol, byol_by_hand),
    "sharpened": (losses.sharpened, spectral_by_hand(lambda x: (1 - np.sign(x) * np.sqrt(abs(x))) ** 2)),
    "smoothed": (losses.smoothed, spectral_by_hand(lambda x: (min(x, 1 + 0.1 * (x - 1)) - 1) ** 2)),
    "min": (lambda a, b: losses.smoothed(a, b, epsilon=0.0), spectral_by_hand(lambda x: (min(x, 1) - 1) ** 2)),
    "fourth_power": (losses.fourth_power, spectral_by_hand(lambda x: (1 - x) ** 4)),
    "hinged": (losses.hinged, spectral_by_hand(lambda x: max(abs(1 - x) - 0.25, 0) ** 2)),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(3))
def test_formula(name, seed):
    ours, by_hand = FORMULAS[name]
    z_a, z_b = views(seed=seed)
    assert float(ours(z_a, z_b)) == pytest.approx(by_hand(z_a.numpy(), z_b.numpy()), rel=1e-9)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_is_the_finite_difference(name):
    ours, _ = FORMULAS[name]
    z_a, z_b = (z.requires_grad_() for z in views(n=9, d=4, seed=1))
    inputs = (z_a, z_b.detach()) if name == "byol" else (z_a, z_b)
    assert torch.autograd.gradcheck(ours, inputs, atol=1e-5, rtol=1e-4)


def test_byol_sends_no_gradient_into_the_target():
    p, target = (z.requires_grad_() for z in views())
    losses.byol(p, target).backward()
    assert target.grad is None
    assert p.grad.abs().max() > 0


@pytest.mark.parametrize("name", [n for n in FORMULAS if n not in {"paper", "min"}])
def test_module_is_the_function(name):
    module = losses.MODULES[name]()
    z_a, z_b = views()
    assert module(z_a, z_b) == FORMULAS[name][0](z_a, z_b)
    assert not list(module.parameters())


def test_modules_pass_their_arguments_on():
    z_a, z_b = views()
    for module, value in (
        (losses.BarlowTwins(1.0, False, True), paper_loss(z_a, z_b)),
        (losses.SimCLR(0.7), losses.simclr(z_a, z_b, 0.7)),
        (losses.VICReg(1, 2, 3), losses.vicreg(z_a, z_b, 1, 2, 3)),
        (losses.FroSSL(2), losses.frossl(z_a, z_b, 2)),
        (losses.Smoothed(0.3), losses.smoothed(z_a, z_b, 0.3)),
        (losses.Hinged(0.1), losses.hinged(z_a, z_b, 0.1)),
    ):
        assert module(z_a, z_b) == value


# symmetries (footnote of Sec. 6; errata A27)

INVARIANT = {
    "paper",
    "simclr",
    "sharpened",
    "smoothed",
    "min",
    "fourth_power",
    "hinged",
    "spectral_contrastive",
    "byol",
}


@pytest.mark.parametrize("name", FORMULAS)
def test_rotations_of_the_embedding(name):
    ours, _ = FORMULAS[name]
    z_a, z_b = views()
    Q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    before, after = float(ours(z_a, z_b)), float(ours(z_a @ Q, z_b @ Q))
    change = abs(after / before - 1)
    assert change < 1e-9 if name in INVARIANT else change > 1e-3


def test_batch_norm_breaks_rotation_invariance_at_lambda_1():
    z_a, z_b = views()
    Q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    before, after = (
        losses.barlow_twins(z_a @ R, z_b @ R, lambda_=1.0, symmetric=True) for R in (torch.eye(5).double(), Q)
    )
    assert abs(after / before - 1) > 1e-2


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"byol", "barlow_twins"}))
def test_views_are_interchangeable(name):
    ours, _ = FORMULAS[name]
    z_a, z_b = views()
    assert float(ours(z_a, z_b)) == pytest.approx(float(ours(z_b, z_a)), rel=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_order_of_samples_does_not_matter(name, seed):
    ours, _ = FORMULAS[name]
    z_a, z_b = views(seed=seed)
    order = torch.as_tensor(np.random.default_rng(seed).permutation(len(z_a)))
    assert float(ours(z_a[order], z_b[order])) == pytest.approx(float(ours(z_a, z_b)), rel=1e-9, abs=1e-9)


# a linear model: the gradient of the loss is the rate of each mode

GAMMA = np.array([3.0, 1.0, 0.4])
LANDSCAPES = {
    "paper": landscapes.BarlowTwins(),
    "sharpened": landscapes.Sharpened(),
    "smoothed": landscapes.Smoothed(0.1),
    "min": landscapes.Smoothed(0.0),
    "fourth_power": landscapes.FourthPower(),
    "hinged": landscapes.Hinged(0.25),
}


def pairs_with(gamma, spread=0.3, n=400):
    """Views with exactly diagonal moments: Γ = diag(γ), covariance of each view diag(γ + spread), means zero."""
    rng = np.random.default_rng(0)
    m = len(gamma)
    Q = np.linalg.qr(np.column_stack([np.ones(n), rng.standard_normal((n, 3 * m))]))[0][:, 1:] * np.sqrt(n)
    shared, own_a, own_b = Q[:, :m] * np.sqrt(gamma), Q[:, m : 2 * m], Q[:, 2 * m :]
    return tuple(torch.tensor(shared + np.sqrt(spread) * own) for own in (own_a, own_b))


@pytest.mark.parametrize("name", LANDSCAPES)
@pytest.mark.parametrize("size", [0.05, 0.6, 1.3])
def test_spectral_losses_descend_their_landscape(name, size):
    x_a, x_b = pairs_with(GAMMA)
    s_bar = size * np.array([1.0, 0.7, 1.1])
    W = torch.tensor(np.diag(s_bar / np.sqrt(GAMMA)), requires_grad=True)
    FORMULAS[name][0](x_a @ W.T, x_b @ W.T).backward()
    rate = -np.sqrt(GAMMA) * np.diag(W.grad.numpy())
    assert rate == pytest.approx(LANDSCAPES[name].rate(s_bar, GAMMA), rel=1e-6, abs=1e-9)
    assert W.grad.numpy() - np.diag(np.diag(W.grad.numpy())) == pytest.approx(0, abs=1e-9)


def test_vicreg_modewise_rate():
    n, spread, s = 400, 0.3, np.array([0.2, 0.5, 0.1])
    x_a, x_b = pairs_with(GAMMA, spread, n)
    W = torch.tensor(np.diag(s), requires_grad=True)
    losses.vicreg(x_a @ W.T, x_b @ W.T).backward()
    variance = (GAMMA + spread) * n / (n - 1)  # of one view's feature j, unbiased
    root = np.sqrt(s**2 * variance + 1e-4)
    assert (root < 1).all()
    by_hand = 25 * 2 * s * (2 * spread) / 3 - 25 * (s * variance / root) / 3
    assert np.diag(W.grad.numpy()) == pytest.approx(by_hand, rel=1e-9)


def test_spectral_contrastive_modewise_rate():
    """L → −2 Σ γ s² + Σ s⁴ Σ_j² up to O(1/N): the same staircase with λ = γs² and another resting value."""
    n, spread, s = 400, 0.3, np.array([0.2, 0.5, 0.1])
    x_a, x_b = pairs_with(GAMMA, spread, n)
    W = torch.tensor(np.diag(s), requires_grad=True)
    losses.spectral_contrastive(x_a @ W.T, x_b @ W.T).backward()
    by_hand = -4 * GAMMA * s + 4 * s**3 * (GAMMA + spread) ** 2
    assert np.diag(W.grad.numpy()) == pytest.approx(by_hand, rel=0.05, abs=0.01)


def test_equal_eigenvalues_have_a_gradient():
    z = torch.eye(4, dtype=torch.float64, requires_grad=True)
    losses.sharpened(z, z).backward()
    assert torch.isfinite(z.grad).all()


# preconditioning


def reference_stretch(z_a, z_b, g_a, g_b, damping, power, keep_norm):
    z, g = torch.cat([z_a, z_b]), torch.cat([g_a, g_b])
    C = z.T @ z / len(z)
    values, V = torch.linalg.eigh(C + damping * C.diagonal().mean() * torch.eye(len(C)).to(C))
    out = g @ (V * values**-power) @ V.T
    return out * (g.norm() / out.norm() if keep_norm else 1)


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("damping", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("keep_norm", [True, False])
def test_precondition_is_the_inverse_power(power, damping, keep_norm):
    z_a, z_b = (z.requires_grad_() for z in views(40, 6))
    a, b = sw.precondition(z_a, z_b, damping, power, keep_norm)
    assert torch.equal(a, z_a)
    assert torch.equal(b, z_b)
    plain = torch.autograd.grad(losses.vicreg(z_a, z_b), (z_a, z_b))
    losses.vicreg(a, b).backward()
    expected = reference_stretch(z_a.detach(), z_b.detach(), *plain, damping, power, keep_norm)
    assert torch.cat([z_a.grad, z_b.grad]).numpy() == pytest.approx(expected.numpy(), rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("d", [2, 64, 300])
def test_inverse_root_in_single_precision(d):
    """Even for one large eigenvalue and the rest at the damping: the hardest case there is."""
    A = torch.ones(d, d) + 0.1 * torch.eye(d)
    values, V = torch.linalg.eigh(A.double())
    off = inverse_root(A, 0.1, d + 0.1).double() - (V * values**-0.5) @ V.T
    assert off.norm() / (values**-0.5).norm() < 1e-5


@given(least=st.floats(1e-6, 0.999))
def test_cubic_rounds_reach_one(least):
    x = np.linspace(least, 1, 50)
    for a, b in cubic_rounds(least, 1e-7):
        x = a * x - b * x**3
    assert np.abs(x - 1).max() < 1e-6


def test_precondition_of_zero_embeddings():
    z = torch.zeros(4, 3, requires_grad=True)
    a, b = sw.precondition(z, z)
    (a + 2 * b).sum().backward()
    assert torch.isfinite(z.grad).all()


def test_preconditioned_descent_learns_sooner():
    """Modes of a linear model until all λ > ½ (App. G): far fewer steps at the same learning rate."""
    x_a, x_b = pairs_with(np.array([1.0, 0.3, 0.1]))

    def steps(stretch):
        W = (1e-3 * torch.ones(3, 3, dtype=torch.float64) + 1e-3 * torch.eye(3).double()).requires_grad_()
        for i in range(20_000):
            z_a, z_b = x_a @ W.T, x_b @ W.T
            if torch.linalg.eigvalsh((z_a.T @ z_b + z_b.T @ z_a) / (2 * len(z_a)))[0] > 0.5:
                return i
            views_ = sw.precondition(z_a, z_b, 0.1, 1.0, True) if stretch else (z_a, z_b)
            (gradient,) = torch.autograd.grad(paper_loss(*views_), W)
            W = (W - 0.05 * gradient).detach().requires_grad_()
        return 20_000

    assert steps(True) < 0.6 * steps(False)


# precision, bad input


@pytest.mark.parametrize("name", FORMULAS)
def test_low_precision_is_promoted_even_under_autocast(name):
    ours, _ = FORMULAS[name]
    z_a, z_b = (z.bfloat16() for z in views())
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(z_a, z_b)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(ours(z_a.float(), z_b.float())), rel=1e-6)


@pytest.mark.parametrize("call", [losses.barlow_twins, losses.simclr, losses.vicreg, losses.sharpened, sw.precondition])
@pytest.mark.parametrize(
    ("z_a", "z_b", "says"),
    [
        (torch.zeros(3), torch.zeros(3), "2-D"),
        (torch.zeros(3, 2), torch.zeros(3, 4), "same shape"),
        (torch.zeros(1, 2), torch.zeros(1, 2), "at least two samples"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), "floats"),
        (np.zeros((3, 2)), torch.zeros(3, 2), "tensor"),
        (torch.zeros(3, 0), torch.zeros(3, 0), "one dimension"),
    ],
)
def test_bad_views(call, z_a, z_b, says):
    with pytest.raises(InputError, match=says):
        call(z_a, z_b)


def test_bad_arguments():
    z_a, z_b = views()
    for call in (
        lambda: losses.simclr(z_a, z_b, temperature=0.0),
        lambda: losses.smoothed(z_a, z_b, epsilon=2.0),
        lambda: losses.hinged(z_a, z_b, width=1.0),
        lambda: sw.precondition(z_a, z_b, damping=0.0),
        lambda: sw.precondition(z_a.float(), z_b.float(), damping=1e-7),
        lambda: sw.precondition(z_a, z_b, power=2.0),
    ):
        with pytest.raises(InputError):
            call()


def test_small_batch_warns_in_spectral_losses():
    z_a, z_b = views(n=4, d=6)
    with pytest.warns(TheoryWarning, match="2 eigenvalues"):
        losses.sharpened(z_a, z_b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.barlow_twins(z_a, z_b)


# two processes


def test_two_processes_equal_one(tmp_path):
    """Loss, gradient, and preconditioned gradient: averaged over processes they are the joint batch's."""
    script = Path(__file__).parents[1] / "two_processes.py"
    assert run_two(script, tmp_path) == [0, 0]
    parts = [np.load(tmp_path / f"{r}.npz") for r in range(2)]
    for name, loss in cases().items():
        value, gradient = joint(loss)
        for part in parts:
            assert part[f"{name}.loss"] == pytest.approx(value, rel=1e-10), name
        averaged = (parts[0][f"{name}.gradient"] + parts[1][f"{name}.gradient"]) / 2
        assert averaged == pytest.approx(gradient, rel=1e-8, abs=1e-12), name
