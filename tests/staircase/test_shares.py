"""Shares of representations along new modes, and the score of events, on runs with a known answer."""

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.staircase.events import score_events, share_events, spectrum_events
from stairwise.staircase.shares import Shares, between, shares_along
from stairwise.staircase.steps import detect_steps

T, VIEWS, K = 300, 128, 7
STEPS = np.array([4.0, 9.0, 11.5, 17.0, 22.5, 30.0, 41.0])


def simulated(hidden, seed=0, scale=None):
    """A staircase of K modes; `hidden`: at which times the representations learn each, or None if they hold all of
    them from the beginning. Returns t, z (T, VIEWS, 12), h (T, VIEWS, 24) and the steps of the covariance of z."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 50, T)
    modes = np.linalg.qr(rng.standard_normal((VIEWS, K)) @ np.eye(K))[0]
    modes -= modes.mean(axis=0)
    embed, represent = rng.standard_normal((K, 12)), rng.standard_normal((K, 24))

    def grown(times):
        return 1 / (1 + np.exp(-4 * (t[:, None] - times)))

    noise = 0.005 * rng.standard_normal((T, VIEWS, 24))
    # orthonormal readout, so that every mode keeps its own eigenvalue
    embed, represent = (np.linalg.qr(m.T)[0].T for m in (embed, represent))
    weights = np.sqrt(0.01 + 0.5 * (np.ones((T, K)) if hidden is None else grown(hidden)))
    z = np.einsum("tk,nk,km->tnm", np.sqrt(1e-7 + grown(STEPS)), modes, embed)
    h = np.einsum("tk,nk,km->tnm", weights, modes, represent) + noise
    if scale is not None:
        h = h * scale(t)[:, None, None]
    spectra = np.array([np.linalg.svd(x - x.mean(axis=0), compute_uv=False)[:K] ** 2 for x in z])
    return t, z, h, detect_steps(t, spectra)


def test_coupled():
    t, z, h, steps = simulated(STEPS)
    found = shares_along(t, z, h, steps)
    assert found.times == pytest.approx(STEPS, abs=0.2)
    assert found.events.z > 8
    assert abs(found.events.lag) <= 1
    assert found.correlation > 0.5
    before, after = (np.searchsorted(t, STEPS + apart) for apart in (-1.0, 1.0))
    for j, (first, last) in enumerate(zip(before, after, strict=True)):
        assert found.h[last, j] > 2 * found.h[first, j]


def test_between_the_steps_nothing_rises():
    t, z, h, steps = simulated(STEPS)
    control = between(steps)
    assert len(control) >= 3
    assert (np.abs(control.times[:, None] - steps.times).min(axis=1) > 4 * control.rise_times).all()
    assert set(control.modes) <= set(steps.modes[1:])
    assert shares_along(t, z, h, control).events.z < 4 < shares_along(t, z, h, steps).events.z


def test_at_the_steps_of_others_nothing_rises():
    found = shares_along(*simulated(STEPS))
    assert found.elsewhere.count == K * (K - 1)
    assert found.elsewhere.z < 1 < 8 < found.events.z
    t, z, h, steps = simulated(STEPS)
    on = np.searchsorted(STEPS, t) % 2  # all modes at once, at every other step
    restless = shares_along(t, z, h + 3 * on[:, None, None] * (z[-1] @ np.ones((12, 24))), steps)
    assert restless.elsewhere.z > 4


def test_around_the_steps():
    """Relative to what comes after, at records before and after, nan where the run has none."""
    t, z, h, steps = simulated(STEPS)
    found = shares_along(t, z, h, steps)
    around_z, around_h = found.around(reach=8)
    assert around_z.shape == around_h.shape == (len(STEPS), 17)
    for shares in (around_z, around_h):
        assert np.nanmean(shares[:, 8:], axis=1) == pytest.approx(1)
        assert (np.nanmedian(shares[1:, :4], axis=1) < 0.6).all()  # the first mode is all that z has at first
    at = int(np.searchsorted(t, STEPS[1]))
    assert around_h[1, 8] / around_h[1, 9] == pytest.approx(found.h[at, 1] / found.h[at + 1, 1])
    beyond = found.around(reach=len(t))[1]
    assert np.isnan(beyond[:, 0]).all()
    assert np.isfinite(beyond).sum() == len(STEPS) * len(t)


def test_the_scale_of_h_does_not_matter():
    drift = simulated(STEPS, scale=lambda t: np.exp(0.3 * np.sin(t)) * (1 + t) ** -1.5)
    plain = simulated(STEPS)
    found, expected = shares_along(*drift), shares_along(*plain)
    assert found.h == pytest.approx(expected.h, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hidden", ["other times", "late", "from the beginning"])
def test_uncoupled(hidden, seed):
    """h learns the same modes in another order, ten records later, or holds them all from the beginning."""
    rng = np.random.default_rng(seed)
    moments = {"other times": np.roll(STEPS, 1 + seed), "late": STEPS + 3 + rng.random(), "from the beginning": None}
    found = shares_along(*simulated(moments[hidden], seed))
    assert found.events.z < 4
    assert found.correlation < 0.3
    if hidden == "late":
        assert 50 / (T - 1) * found.events.lag == pytest.approx((moments["late"] - STEPS)[0], abs=0.3)


def test_shapes_of_spectra():
    """The spectrum of h moves when it learns modes; its scale does not count."""
    for hidden, moves in ((STEPS, True), (np.array([6.5, 14.2, 20, 26, 35, 38, 45]), False)):
        t, _, h, steps = simulated(hidden, scale=lambda t: (1 + t) ** -1.5)
        lam = np.array([np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2 for x in h])
        assert (spectrum_events(t, lam, steps.times).z > 4) == moves


def test_a_score_that_leans_on_one_step():
    """One sharp rise among shares that rise all the time; without it nothing is left."""
    t, times = np.linspace(0, 50, 300), np.array([6.0, 14.0, 22.0, 31.0, 43.0])
    h = np.cumsum(np.random.default_rng(0).exponential(size=(300, 5)), axis=0)
    h[:, 0] = t > times[0]
    found = Shares(t, times, (t[:, None] > times).astype(float), h)
    assert found.events.z > 10
    assert found.own.z > found.events.z, "z rises at every step"
    assert found.without_best.z < 2
    assert found.without_best == share_events(t, h[:, 1:], times[1:])


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_event(seed):
    rng = np.random.default_rng(seed)
    assert abs(score_events(rng.exponential(size=200), rng.uniform(0, 199, 9)).z) < 3.5
    walks = np.cumsum(rng.standard_normal((200, 9)), axis=0)
    assert abs(share_events(np.arange(200.0), walks, rng.uniform(0, 199, 9)).z) < 3.5


def test_bad_input():
    t, z, h, steps = simulated(STEPS)
    with pytest.raises(InputError, match=r"h must be finite, \(300, views, dimensions\)"):
        shares_along(t, z, h[:-1], steps)
    with pytest.raises(InputError, match="records before and after"):
        shares_along(t[:40], z[:40], h[:40], detect_steps(t[:40], np.ones((40, 3))))
    with pytest.raises(InputError, match="at least 24 records"):
        score_events(np.ones(20), [3.0])
    with pytest.raises(InputError, match="1 or 2 rows"):
        score_events(np.ones((3, 50)), [3.0, 4.0])
