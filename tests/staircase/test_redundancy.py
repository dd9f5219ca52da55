"""What a loss charges for redundancy: read from real losses of embeddings that are copies of few dimensions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.staircase.growth import Rest
from stairwise.staircase.redundancy import few, uncharged
from stairwise.staircase.signs import Signs
from tests.staircase.made import VICREG, T, ruled_by_two, signs

D, RECORDS = 32, 6


def views(k, noise, scale=1.0, mean=0.0):
    """Two views of 32 coordinates that are copies of k dimensions."""
    torch.manual_seed(0)
    shared = torch.randn(512, k).repeat_interleave(D // k, dim=1)
    return [scale * (shared + noise * torch.randn(512, k).repeat_interleave(D // k, dim=1)) + mean for _ in range(2)]


def judged(loss, z_a, z_b):
    """Whether the loss is seen not to charge, after some records of it."""
    monitor = sw.SpectrumMonitor()
    monitor.collect(z_a, z_b)
    s = monitor.compute()
    numbers = (loss, s.covariance.sum(), s.mean_square, s.positive, s.negative, 512, s.eigenvalues.sum())
    lam = np.tile(s.covariance, (RECORDS, 1))
    return uncharged(lam, Signs(*(np.full(RECORDS, float(x)) for x in numbers)), Rest.of(lam))[-1]


@pytest.mark.parametrize("noise", [0.2, 0.6])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_a_missing_term_is_seen_and_a_present_one_is_not_missed(k, noise, mean):
    for scale in (0.1, 3.0, 30.0):  # at 1, Barlow Twins may have the value of VICReg without covariance by chance
        pair = views(k, noise, scale, mean)
        assert judged(sw.losses.barlow_twins(*pair, 0.0), *pair)
        assert not judged(sw.losses.barlow_twins(*pair), *pair)
    for scale in (0.7, 1.0):
        pair = views(k, noise, scale, mean)
        assert judged(sw.losses.vicreg(*pair, 25.0, 25.0, 0.0), *pair)
        assert not judged(sw.losses.vicreg(*pair), *pair)


def test_other_losses_do_not_look_like_a_missing_term():
    for k in (1, 2):
        for noise in (0.2, 0.6, 1.0):
            pair = views(k, noise)
            assert not judged(sw.losses.simclr(*pair), *pair)
            assert not judged(sw.losses.spectral_contrastive(*pair), *pair)


def test_what_is_not_known_is_no_reason():
    _, lam = ruled_by_two()
    known = signs(lam, **VICREG)
    assert uncharged(lam, known, Rest.of(lam))[-1]
    for name in ("loss", "mean_square", "trace"):
        assert not uncharged(lam, replace(known, **{name: np.full(T, np.nan)}), Rest.of(lam)).any()


def test_a_loss_that_was_ever_below_is_another_loss():
    _, lam = ruled_by_two()
    once = np.array(VICREG["loss"])
    once[7] *= 0.7
    out = uncharged(lam, signs(lam, **VICREG | {"loss": once}), Rest.of(lam))
    assert out[6]
    assert not out[7:].any()


def test_dimensions_that_come_back_are_no_collapse():
    _, lam = ruled_by_two()
    lam[20:40] = np.geomspace(lam[20], lam[20] + np.r_[-4.0, 0, 4.0, np.zeros(29)], 20)
    lam[40:] = lam[39]
    out = uncharged(lam, signs(lam, **VICREG), Rest.of(lam))
    assert few(lam, Rest.of(lam))[3:].all()
    assert out[10:20].all()
    assert not out[35:40].any()
    assert out[-1]


def test_few_of_fewer_than_16_dimensions_are_no_collapse():
    lam = np.tile(np.r_[1.0, np.zeros(14)], (RECORDS, 1))
    assert not few(lam, Rest.of(lam)).any()
    assert few(np.pad(lam, ((0, 0), (0, 1))), Rest.of(np.pad(lam, ((0, 0), (0, 1))))).all()
