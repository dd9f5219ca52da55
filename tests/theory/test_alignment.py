"""QR, the alignment transformation, and the distribution of the effective start."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stairwise.checks import InputError
from stairwise.dynamics.flow import gradient_flow
from stairwise.theory.alignment import (
    align,
    aligned_init,
    effective_singular_values,
    gaussian_init,
    qr_nonnegative,
    step_time_quantiles,
)
from stairwise.theory.correlation import Correlation
from stairwise.theory.laws import closed_form
from stairwise.theory.modes import Modes

CORR = Correlation.from_matrix(np.diag([1.0, 0.6, 0.35, 0.2, 0.1]))


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6)).flatmap(lambda s: arrays(float, s, elements=st.floats(-1e3, 1e3)))
)
def test_qr(m):
    q, r = qr_nonnegative(m)
    np.testing.assert_allclose(q @ r, m, atol=1e-9)
    np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-12)
    assert (np.diag(r) >= 0).all()
    assert not np.tril(r, -1).any()


def test_gram_schmidt_of_orthogonalized_vectors():
    """Errata A2: s*_j is what is left of u_j without the *orthogonalized* earlier ones."""
    W0 = gaussian_init(4, 5, 1.0, seed=0)
    u, basis, expected = W0[:, :4], [], []
    for j in range(4):
        left = u[:, j] - sum((b @ u[:, j]) * b for b in basis)
        expected.append(np.linalg.norm(left))
        basis.append(left / expected[-1])
    np.testing.assert_allclose(effective_singular_values(W0, CORR), expected, rtol=1e-12)


def test_align_keeps_aligned_weights():
    q, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))
    aligned = q @ np.diag([3.0, 2.0, 1.0]) @ np.eye(3, 5)
    np.testing.assert_allclose(align(aligned), aligned, atol=1e-14)


@pytest.mark.parametrize("rotate", [False, True])
def test_trajectory_follows_the_aligned_one_in_the_eigenbasis(rotate):
    """Errata A4: W*(0) = 𝒜(W₀V)Vᵀ; the error vanishes as α^{1 − max γ_{j+1}/γ_j}."""
    v = np.linalg.qr(np.random.default_rng(3).standard_normal((5, 5)))[0] if rotate else np.eye(5)
    corr = Correlation.from_matrix(v @ np.diag(CORR.eigenvalues) @ v.T)
    t = np.linspace(0, 90, 400)
    errors = []
    for alpha in (1e-4, 1e-8):
        W0 = gaussian_init(3, 5, alpha, seed=0)
        true = gradient_flow(W0, corr, t, weights=True).weights
        start = aligned_init(W0, corr)
        law = closed_form(W0, corr, t, law="aligned", weights=True).weights
        np.testing.assert_allclose(law[0], start, atol=1e-15)
        errors.append(np.linalg.norm(true - law, axis=(1, 2)).max())
    assert errors[1] < 0.01
    slope = np.log(errors[0] / errors[1]) / np.log(1e4)
    assert slope == pytest.approx(1 - 0.6, abs=0.1)


def test_effective_start_is_chi_distributed():
    """Errata A6: R_jj² / α² is χ² with d − j + 1 degrees of freedom."""
    d, alpha = 4, 1e-3
    s = np.array([effective_singular_values(gaussian_init(d, 5, alpha, seed), CORR) for seed in range(2000)])
    for j in range(d):
        assert scipy.stats.kstest((s[:, j] / alpha) ** 2, scipy.stats.chi2(d - j).cdf).pvalue > 1e-3


def test_step_time_quantiles_by_sampling():
    gamma, alpha = np.array([2.0, 1.0, 0.5]), 1e-4
    corr = Correlation.from_matrix(gamma)
    tau = np.array(
        [Modes(gamma, effective_singular_values(gaussian_init(3, 3, alpha, s), corr)).step_times() for s in range(4000)]
    )
    predicted = step_time_quantiles(gamma, alpha, [0.1, 0.5, 0.9])
    np.testing.assert_allclose(np.quantile(tau, [0.1, 0.5, 0.9], axis=0), predicted, rtol=0.02)


def test_beyond_the_rank_nothing_starts():
    corr = Correlation.from_pairs(*np.random.default_rng(0).standard_normal((2, 1, 6)))
    s = effective_singular_values(gaussian_init(4, 6, 1.0, 0), corr)
    assert (s[:2] > 0).all()
    assert (s[2:] == 0).all()


@pytest.mark.parametrize("q", [0.0, 1.0, [0.5, 2.0]])
def test_bad_quantiles(q):
    with pytest.raises(InputError, match="q must lie strictly between 0 and 1"):
        step_time_quantiles([1.0], 1e-3, q)
