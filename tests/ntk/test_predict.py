"""Predicted embeddings are the trained ones; they are computed once; errors name what the caller passed."""

import numpy as np
import pytest
import torch
from torch import nn

import stairwise as sw
from stairwise.checks import InputError
from stairwise.kernel.estimator import KernelSSL
from stairwise.ntk import predict
from stairwise.ntk.empirical import empirical_ntk
from stairwise.ntk.predict import kernel_pca, predict_embeddings, unit_diagonal
from stairwise.theory.spectra import chance_alignment, subspace_alignment


def pairs(n=60, m=12, noise=0.3):
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((n, m)) * np.linspace(1.5, 0.3, m)
    return [shared + noise * rng.standard_normal((n, m)) for _ in "ab"]


def test_predicted_embeddings_of_a_linear_model_are_the_trained_ones():
    """Gradient flow of the linear model ends in the span that its kernel predicts."""
    x_a, x_b = pairs()
    corr = sw.Correlation.from_pairs(x_a, x_b)
    run = sw.gradient_flow(sw.gaussian_init(3, 12, 1e-5, seed=0), corr, np.linspace(0, 40, 50), weights=True)
    both = np.concatenate([x_a, x_b])
    K = empirical_ntk(nn.Linear(12, 3, bias=False).double(), torch.tensor(both), precision="float64")
    F = predict_embeddings(K, 3)
    assert subspace_alignment(F, both @ run.weights[-1].T) > 0.999
    n = len(x_a)
    assert (F[:n].T @ F[n:] + F[n:].T @ F[:n]) / (2 * n) == pytest.approx(np.eye(3), abs=1e-8)
    assert subspace_alignment(kernel_pca(K, 3), F) < 0.9995  # nearly the same here, because noise is isotropic


def test_the_eigenproblem_is_solved_once(monkeypatch):
    both, calls, solve = np.concatenate(pairs()), [], predict.solve
    monkeypatch.setattr(predict, "solve", lambda *args, **options: (calls.append(1), solve(*args, **options))[1])
    K = both @ both.T
    F = predict_embeddings(K, 4)
    assert len(calls) == 1
    assert pytest.approx(KernelSSL(4, kernel="precomputed").fit(K).embedding_) == F
    with pytest.raises(InputError, match="d must be at most 12"):
        predict_embeddings(K, 20)
    assert len(calls) == 2


def test_kernels_that_are_symmetric_up_to_low_precision():
    """They are symmetrized once; the estimator beneath would refuse them."""
    both = np.concatenate(pairs())
    K = both @ both.T
    upper = np.triu(np.ones_like(K), 1)
    off = K + 4e-5 * K.max() * (upper - upper.T)
    assert predict_embeddings(off, 3) == pytest.approx(predict_embeddings(K, 3), abs=1e-6)
    assert kernel_pca(off, 3) == pytest.approx(kernel_pca(K, 3), abs=1e-6)
    for kind in (torch.float32, torch.bfloat16):
        assert predict_embeddings(torch.eye(8).to(kind), 1).shape == (8, 1)


@pytest.mark.parametrize(
    ("K", "d", "says"),
    [
        (np.eye(5), 2, "K must have two rows per pair"),
        (np.ones((4, 2)), 2, "K must be square"),
        (np.eye(4) * np.nan, 1, "K must be finite"),
        (np.triu(np.ones((4, 4))), 1, "K must be symmetric"),
        (np.zeros((4, 4)), 1, "K must not be zero"),
        (np.zeros((0, 0)), 1, "K must be square and not empty"),
        (np.diag([1.0, 1.0, 1.0, -1.0]), 1, "K must be positive semidefinite"),
        (np.kron([[1.0, -1.0], [-1.0, 1.0]], np.eye(2)), 1, "K must have modes .* that both views share"),
        (np.eye(4), 5, "d must be at most 4"),
        (np.ones((6, 6), dtype=np.float32), 3, "d must be at most 1: .* lower d to 1, or compute K in float64"),
        (np.ones((6, 6)), 3, "d must be at most 1: .* lower d to 1$"),
    ],
)
def test_bad_kernels(K, d, says):
    with pytest.raises(InputError, match=says):
        predict_embeddings(K, d)


def test_bad_dimension_of_kernel_pca():
    with pytest.raises(InputError, match="between 1 and 4"):
        kernel_pca(np.eye(4), 5)


def test_alignment():
    rng = np.random.default_rng(0)
    F = rng.standard_normal((200, 5))
    assert subspace_alignment(F, F @ rng.standard_normal((5, 5))) == pytest.approx(1)
    mean, spread = chance_alignment(200, 5)
    assert mean == pytest.approx(5 / 200, rel=0.1)
    assert 0 < spread < mean
    Q = np.linalg.qr(rng.standard_normal((200, 10)))[0]
    assert subspace_alignment(Q[:, :5], Q[:, 5:]) < 1e-20
    assert subspace_alignment(Q[:, :5], Q[:, :8]) == pytest.approx(1)
    z = torch.randn(8, 3, requires_grad=True)
    assert subspace_alignment(z, z.detach().bfloat16()) == pytest.approx(1, abs=1e-4)
    for bad, says in (
        ((F, F[:5]), "same points"),
        ((F * np.nan, F), "finite"),
        ((F * 0, F), "zero"),
        ((F[:3], F), "points"),
    ):
        with pytest.raises(InputError, match=says):
            subspace_alignment(*bad)


def test_dense_decomposition_predicts_the_same(monkeypatch):
    """The way of a GPU, with tensors on the CPU."""
    both = np.concatenate(pairs())
    K = both @ both.T
    expected, pca = predict_embeddings(K, 5), kernel_pca(K, 5)
    monkeypatch.setattr(predict, "on_gpu", torch.is_tensor)
    F = predict_embeddings(torch.tensor(K), 5)
    assert np.abs(F) == pytest.approx(np.abs(expected), abs=1e-8)
    assert np.abs(kernel_pca(torch.tensor(K), 5)) == pytest.approx(np.abs(pca), abs=1e-8)
    single = predict_embeddings(torch.tensor(K).float(), 5)
    assert subspace_alignment(single, expected) > 1 - 1e-9
    with pytest.raises(InputError, match="d must be at most 12"):
        predict_embeddings(torch.tensor(K), 20)
    with pytest.raises(InputError, match="K must be positive semidefinite"):
        predict_embeddings(torch.tensor(K - 5.0 * np.eye(len(K))), 5)
    with pytest.raises(InputError, match="K must be finite"):
        predict_embeddings(torch.full((4, 4), torch.nan), 1)


def test_as_many_modes_as_there_are():
    both = np.concatenate(pairs())
    assert predict_embeddings(both @ both.T, 20, at_most=True).shape == (120, 12)


def test_unit_diagonal():
    both = np.concatenate(pairs()).astype(np.float32)
    K = both @ both.T
    found = unit_diagonal(K)
    assert found.dtype == np.float32
    assert np.diagonal(found) == pytest.approx(1.0, abs=1e-6)
    assert unit_diagonal(torch.tensor(K)).numpy() == pytest.approx(found, abs=1e-6)
