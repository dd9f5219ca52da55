"""How stepwise a run is: staircases whose sharpness is known are ranked, and smooth growth scores low."""

from itertools import pairwise

import numpy as np
import pytest

import stairwise as sw
from stairwise.staircase.separation import FIRST, FLOOR, loss_contrast, relative_variance, separation

RATES = {"1/k": 1 / np.arange(1, 33), "k^-2": np.arange(1, 33.0) ** -2, "2^-k": 0.5 ** np.arange(16)}
STARTS = (1e-12, 1e-9, 1e-6, 1e-3, 1e-2)


def staircase(gamma, start, records=600):
    """Times, eigenvalues and loss of the linear theory; every λ_j begins at `start`."""
    modes = sw.Modes(gamma, np.sqrt(start / gamma))
    t = np.geomspace(1e-3, 1, records) * modes.step_times()[min(20, len(gamma) - 1)]
    return t, modes.eigenvalues(t), modes.loss(t)


def scores(t, lam, loss):
    found = separation(t, relative_variance(lam))
    return found, loss_contrast(t, loss, found)


def flattening(records=400):
    """A spectrum j^-a that flattens: its rank rises smoothly, without steps."""
    t = np.linspace(0.01, 2, records)
    lam = np.arange(1, 65) ** -np.interp(t, [0, 2], [6, 0.5])[:, None]
    return t, lam, ((1 - lam) ** 2).sum(axis=1)


@pytest.mark.parametrize("rates", RATES)
def test_smaller_initialization_is_more_stepwise(rates):
    gaps = [scores(*staircase(RATES[rates], start))[0].gap for start in STARTS]
    deepest = np.log10(0.5 / FLOOR)
    assert all(more > less or less == pytest.approx(deepest) for more, less in pairwise(gaps))
    assert gaps[0] > 3 * gaps[-1]


@pytest.mark.parametrize("start", STARTS)
def test_rates_that_are_further_apart_are_more_stepwise(start):
    gaps, contrasts = zip(
        *((found.gap, contrast) for found, contrast in (scores(*staircase(RATES[r], start)) for r in RATES)),
        strict=True,
    )
    assert np.all(np.diff(gaps) > 0)
    assert contrasts[-1] == max(contrasts)


def test_the_gap_is_that_of_the_theory():
    """(1 − γ_{j+1}/γ_j) log₁₀ 1/(2 λ(0)), if λ(0) is small and modes are far apart."""
    gamma, start = RATES["2^-k"], 1e-5
    found = scores(*staircase(gamma, start, 4000))[0]
    assert len(found.times) == 9, "others rise before the first record, and the last mode has no next one"
    assert found.gaps == pytest.approx(0.5 * np.log10(1 / (2 * start)), abs=0.2)
    assert found.clean == 9


def test_steps_are_seen_in_the_loss():
    sharp, blunt = (scores(*staircase(RATES["2^-k"], start))[1] for start in (1e-12, 1e-2))
    assert sharp > 3 > 1.5 > blunt


def test_smooth_growth_scores_low():
    found, contrast = scores(*flattening())
    assert len(found.times) == FIRST
    assert found.gap < 0.15
    assert found.clean == 0
    assert 0.8 < contrast < 1.1
    t = np.linspace(0.01, 4, 300)
    proportional = (1 - np.exp(-t))[:, None] * RATES["1/k"]
    found, contrast = scores(t, proportional, 1 - proportional.sum(axis=1))
    assert (len(found.times), found.gap, contrast) == (0, 0.0, 1.0)


def test_scales_and_clocks_do_not_matter():
    t, lam, loss = staircase(RATES["k^-2"], 1e-6, 2000)
    drift = np.exp(3 * np.sin(5 * np.log(t)))[:, None]
    found, contrast = scores(t, lam, loss)
    for other in (scores(t, lam * drift, loss), scores(0.03 * t, lam, 50 - 7 * (1 - loss))):
        assert other[0].gaps == pytest.approx(found.gaps, abs=0.02)
        assert other[1] == pytest.approx(contrast, abs=0.05)
    assert separation(t**1.5, relative_variance(lam)).gaps == pytest.approx(found.gaps, abs=0.02)


def test_a_mode_that_falls_back_has_not_risen():
    t = np.arange(1.0, 61)
    lam = np.ones((60, 3))
    lam[:, 1] = np.where((t > 10) & (t < 20), 0.9, 0.05)
    lam[:, 2] = 1e-3
    assert len(separation(t, relative_variance(lam)).times) == 0
    lam[40:, 1] = 0.9
    found = separation(t, relative_variance(lam))
    assert found.modes.tolist() == [1]
    assert 40 <= found.times[0] <= 41


def test_noise_of_measured_spectra_makes_no_steps():
    """Eigenvalues of a fixed covariance, measured by 1024 samples at every record."""
    rng = np.random.default_rng(0)
    scales = np.sqrt(np.concatenate([np.ones(8), np.full(24, 0.05)]))
    lam = np.array([np.linalg.eigvalsh(np.cov((rng.standard_normal((1024, 32)) * scales).T))[::-1] for _ in range(60)])
    assert len(separation(np.arange(1.0, 61), relative_variance(lam)).times) == 0
