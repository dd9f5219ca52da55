"""The modes that come next, with known answers."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from stairwise.checks import InputError
from stairwise.ntk import coming
from stairwise.ntk.coming import KERNELS, beyond, captured, grown_modes, new_modes, study_coming
from stairwise.ntk.predict import kernel_pca, predict_embeddings

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
    assert grown_modes(z, 4).shape == (N, 4)


def test_new_modes(basis):
    turned = basis[:, :4] @ np.linalg.qr(np.random.default_rng(1).standard_normal((4, 4)))[0]
    found = new_modes(basis[:, :3], turned)
    assert np.abs(found.T @ basis[:, 3]) == pytest.approx([1.0])
    assert new_modes(basis[:, :3], basis[:, :3]).shape == (N, 0)


@pytest.mark.parametrize(("coming", "share"), [(range(6), 1.0), ([0, 1, 2, 3, 8, 9], 1 / 3), ([6, 7, 8, 9, 10, 11], 0)])
@pytest.mark.parametrize("predict", [predict_embeddings, kernel_pca])
def test_captured(basis, coming, share, predict):
    """Three modes have grown, three are new; the kernel knows all, one or none of these."""
    features = basis[:, list(coming)] * np.linspace(2, 1, 6)
    noise = 1e-3 * np.random.default_rng(2).standard_normal((N, 30))
    K = features @ features.T + noise @ noise.T / 30
    now = basis[:, :3]
    found = beyond(predict(K, 6), now)
    assert captured(new_modes(now, basis[:, :6]), found) == pytest.approx(share, abs=0.02)
    assert 3 <= found.shape[1] <= 6
    assert np.abs(found.T @ now).max() < 1e-7


def test_nothing_to_predict(basis):
    assert np.isnan(captured(basis[:, :0], basis))
    assert captured(basis[:, :2], beyond(np.zeros((N, 1)), basis[:, 2:3])) == 0


class Normed(nn.Module):
    """x → W x, after a hidden layer that changes nothing and that batch norm follows."""

    def __init__(self, weight):
        super().__init__()
        self.hidden, self.norm = nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12, affine=False)
        self.readout = nn.Linear(12, len(weight), bias=False)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.eye(12))
            self.readout.weight.copy_(torch.as_tensor(weight))

    def forward(self, x):
        return self.readout(self.norm(self.hidden(x)))


COUNTS = [1, 3, 3, 6]


def linear_staircase():
    """A linear network learns the directions of its inputs one by one, the largest first; and three draws of pairs."""
    rng = np.random.default_rng(0)
    size = 3.0 * np.arange(1, 13) ** -1.0
    shared = [rng.standard_normal((80, 12)) for _ in range(3)]
    noisy = [np.concatenate([x + 0.05 * rng.standard_normal(x.shape) for _ in "ab"]) * size for x in shared]
    views = [torch.tensor(x) for x in noisy]
    models = []
    turn = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    for step, count in enumerate(COUNTS):
        weight = np.zeros((8, 12))
        weight[np.arange(8), np.arange(8)] = np.where(np.arange(8) < count, 1.0, 1e-4) / size[:8]
        models.append((100 * step, Normed(turn @ weight).double().eval()))
    return models, views


def test_study():
    models, views = linear_staircase()
    found = study_coming("tiny", models, views, predicted=6)
    assert found.grown.tolist() == COUNTS
    assert found.until.tolist() == [1, 3, 3], "the first later moment at which more have grown"
    assert found.shares.shape == (3, 3, 2, len(KERNELS), 2)
    plain = found.shares[:, :, 0, KERNELS.index("as it is"), 0]
    assert plain.min() > 0.9
    assert plain[:, 1:] == pytest.approx(found.shares[:, 1:, 1, 0, 0]), "there the next moment is the end"
    assert found.chance[:, 0, 0] == pytest.approx(np.full((3, 2), 5 / (160 - 2)), rel=0.25)
    own = found.shares[:, :, 0, KERNELS.index("embeddings"), 1]
    assert own.min() > 0.4, "modes that have not grown are alike in size here, and some of them are the next"
    last = found.shares[:, :, 0, KERNELS.index("inputs of the last layer")]
    assert last.min() > 0.9, "which are the inputs here"
    still = study_coming("still", [models[0], (1, deepcopy(models[0][1]))], views)
    assert still.until.tolist() == [-1]
    assert np.isnan(still.shares).all()


def test_a_kernel_that_predicts_nothing_is_not_counted_as_a_miss(monkeypatch):
    def refuse(*_, **__):
        raise InputError("K", "must be positive semidefinite", None)

    monkeypatch.setattr(coming, "predict_embeddings", refuse)
    found = study_coming("tiny", *linear_staircase(), predicted=6)
    assert np.isnan(found.shares[..., 0]).all()
    assert np.isnan(found.chance[..., 0]).all()
    assert np.isfinite(found.shares[..., 1]).all(), "kernel PCA needs no prediction"
