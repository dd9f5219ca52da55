"""What the solver does differently on a GPU, checked on a CPU."""

import numpy as np
import pytest
import torch

from stairwise.kernel import halves, kernels, maps, sums
from stairwise.kernel.arrays import stack
from stairwise.kernel.estimator import KernelSSL
from stairwise.kernel.krylov import _cholesky_qr, krylov
from stairwise.kernel.operators import Blocks, DensePairs
from stairwise.kernel.tiles import TilePairs


def test_tiles_of_halves_multiply_like_those_of_float32():
    """Also columns of very different size, and none of the bits that a single half-precision number would lose."""
    rng = np.random.default_rng(0)
    x_a, x_b = (torch.tensor(rng.standard_normal((300, 6)), dtype=torch.float32) for _ in "ab")
    kernel = kernels.rbf(0.1)
    for scale in (1.0, 1e-12, 1e9):
        blocks = Blocks((x_a, x_b), (lambda X, Y, scale=scale: scale * kernel(X, Y),) * 2, True, "float32")
        exact = blocks.matrix().double()
        block = torch.tensor(rng.standard_normal((600, 5)) * [1, 1e-9, 1e9, 0, 1e-200])
        found = TilePairs(blocks, memory=1 << 21, halves=True).matmul(block)
        off = (found - exact @ block).norm(dim=0) / (exact @ block).norm(dim=0).clamp(min=1e-300)
        assert off.max() < 1e-6


def cut_off(left, right):
    """As tensor cores multiply half precision: exact products, but sums are cut off to 24 bits after every 16 terms."""
    if left.dtype != torch.float16:
        return torch.bmm(left, right)
    total = torch.zeros(len(left), left.shape[1], right.shape[2], dtype=torch.float64)
    for start in range(0, left.shape[2], 16):
        at = slice(start, start + 16)
        total += torch.bmm(left[:, :, at].double(), right[:, at].double())
        total.view(torch.int64).bitwise_and_(-(1 << 29))
    return total.float()


def test_sums_that_are_cut_off_neither_delay_nor_spoil_the_modes(monkeypatch):
    """Beside float32 tiles with products that are not cut off, with blocks of the same width."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((1500, 40)) * np.arange(1, 41) ** -0.6
    x_a, x_b = (torch.tensor(base + 0.3 * rng.standard_normal(base.shape)).float() for _ in "ab")
    blocks = Blocks((x_a, x_b), (kernels.rbf(0.1),) * 2, True, "float32")
    K = blocks.matrix().double()
    exact = krylov(DensePairs(K), 20, tol=1e-10)
    plain = TilePairs(blocks, memory=1 << 26)
    object.__setattr__(plain, "free_columns", 64)
    monkeypatch.setattr(halves, "_products", cut_off)
    block = torch.tensor(rng.uniform(size=(3000, 1)))
    fast = TilePairs(blocks, memory=1 << 26, halves=True)
    assert ((fast.rough(block) / (K @ block) - 1).abs() > 1e-6).any()
    found, expected = (krylov(pairs, 20, spare=10) for pairs in (fast, plain))
    assert found.trusted
    assert found.more is not None
    assert found.products <= expected.products + 62  # one block and the modes
    exact_z = K @ exact.coefficients
    for solution in (found, expected):
        np.testing.assert_allclose(solution.eigenvalues, exact.eigenvalues, rtol=2e-7)
        z = K @ solution.coefficients
        assert ((z - exact_z).norm(dim=0) / z.norm(dim=0)).max() < 1e-4
        z /= torch.tensor(solution.eigenvalues).sqrt()
        C = (z[:1500].T @ z[1500:] + z[1500:].T @ z[:1500]) / 3000
        torch.testing.assert_close(C, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-6)


def test_halves_hold_22_bits():
    values = torch.tensor(np.random.default_rng(0).uniform(-3, 3, (50, 41)), dtype=torch.float32)
    pair = halves.halved(values)
    held = (pair.high.double() + pair.low.double() / halves.SHIFT) / pair.scale
    assert ((held - values).abs() <= halves.EPS * values.abs()).all()
    assert torch.equal(halves.joined(pair).double() / pair.scale, held)
    assert pair.high.stride(0) % halves.ALIGNED == 0


@pytest.mark.parametrize("terms", [1, 7, halves.PIECE, 2 * halves.PIECE + 5])
def test_long_products(terms):
    left, right = (torch.tensor(np.random.default_rng(i).standard_normal((3, terms))).float() for i in range(2))
    torch.testing.assert_close(halves.long_product(left, right.T), left.double() @ right.double().T, rtol=0, atol=1e-4)


def test_orthonormal_columns_from_gram_matrices():
    block = torch.tensor(np.random.default_rng(0).standard_normal((200, 6)) * [1, 1e-3, 1, 1e-5, 1, 1])
    q, strength = _cholesky_qr(block)
    expected, r = torch.linalg.qr(block)
    torch.testing.assert_close(q.T @ q, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close((q * (q * expected).sum(0).sign()), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(strength, r.diagonal().abs(), rtol=1e-9)
    block[:, 3] = block[:, 0] + 1e-11 * block[:, 1]
    assert _cholesky_qr(block) is None


def test_wide_blocks_find_the_same_modes():
    """Those that a GPU multiplies in the time of one column; modes at rest are accepted in spite of rounding."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((700, 40)) * np.arange(1, 41) ** -0.6
    x_a, x_b = ((base + 0.3 * rng.standard_normal(base.shape)).astype(np.float32) for _ in "ab")
    blocks = Blocks((x_a, x_b), (kernels.rbf(0.1),) * 2, True, "float32")
    narrow, wide = (TilePairs(blocks, memory=1 << 25) for _ in range(2))
    object.__setattr__(wide, "free_columns", 64)
    expected, found = (krylov(pairs, 20, spare=10) for pairs in (narrow, wide))
    np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues, rtol=2e-6)
    assert found.trusted
    assert found.more is not None


@pytest.mark.parametrize("modalities", [1, 2])
def test_modes_of_sums_on_the_device(modalities, monkeypatch):
    """Γ is decomposed where the sums are; on a CPU it goes through `Correlation`."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((200, 6))
    x_a, x_b = (torch.tensor(base + 0.2 * rng.standard_normal(base.shape)) for _ in "ab")
    kernel = "rbf" if modalities == 1 else ("rbf", "laplace")
    est = KernelSSL(4, kernel=kernel, method="nystroem", n_features=50)
    expected = est.fit(x_a, X_b=x_b).eigenvalues_, est.transform(x_a)
    monkeypatch.setattr(sums, "on_gpu", lambda x: True)
    found = est.fit(x_a, X_b=x_b).eigenvalues_, est.transform(x_a)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
    torch.testing.assert_close(*found[1:], *expected[1:], rtol=0, atol=1e-8)


def test_both_ways_to_whiten_landmarks():
    """Cholesky's factor if no direction is lost, and eigenvectors otherwise, are the same features up to a rotation."""
    x = np.random.default_rng(0).standard_normal((40, 5))
    for points in (x, torch.tensor(x)):
        K = kernels.rbf(0.3)(points, points)
        factor = maps._inverse_factor(K)
        np.testing.assert_allclose(np.asarray(factor @ factor.T @ K), np.eye(40), atol=1e-8)
        twice = stack([points, points])
        assert maps._inverse_factor(kernels.rbf(0.3)(twice, twice)) is None
