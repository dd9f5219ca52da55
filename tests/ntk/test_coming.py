"""The modes that come next, with known answers."""

import numpy as np
import pytest

from stairwise.ntk.coming import captured, grown_modes, new_modes

N = 200


@pytest.fixture
def basis():
    """Orthonormal directions about the mean, alike for both views of 100 pairs."""
    half = np.random.default_rng(0).standard_normal((N // 2, 12))
    half -= half.mean(axis=0)
    return np.linalg.qr(np.concatenate([half, half]))[0]


def test_grown_modes(basis):
    z = basis[:, :5] * [1.0, 0.9, 0.8, 1e-4, 1e-4] + 7.0
    found = grown_modes(z)
    assert found.shape == (N, 3)
    assert np.linalg.norm(found.T @ basis[:, :3]) ** 2 == pytest.approx(3)


def test_new_modes(basis):
    turned = basis[:, :4] @ np.linalg.qr(np.random.default_rng(1).standard_normal((4, 4)))[0]
    found = new_modes(basis[:, :3], turned)
    assert np.abs(found.T @ basis[:, 3]) == pytest.approx([1.0])
    assert new_modes(basis[:, :3], basis[:, :3]).shape == (N, 0)


@pytest.mark.parametrize(("coming", "share"), [(range(6), 1.0), ([0, 1, 2, 3, 8, 9], 1 / 3), ([6, 7, 8, 9, 10, 11], 0)])
def test_captured(basis, coming, share):
    """Three modes have grown, three are new; the kernel knows all, one or none of these."""
    features = basis[:, list(coming)] * np.linspace(2, 1, 6)
    noise = 1e-3 * np.random.default_rng(2).standard_normal((N, 30))
    K = features @ features.T + noise @ noise.T / 30
    now = basis[:, :3]
    new = new_modes(now, basis[:, :6])
    found, chance = captured(new, now, K, 6)
    assert found == pytest.approx(share, abs=0.02)
    assert 3 / N < chance < 7 / (N - 5)


def test_nothing_to_predict(basis):
    assert np.isnan(captured(basis[:, :0], basis[:, :3], np.eye(N), 6)).all()
