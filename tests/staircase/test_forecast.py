"""What forecasts promise beyond their accuracy (`test_steps`, `tests/paper`): curves, words, their own record."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stairwise as sw
from stairwise.staircase.growth import relative
from tests.staircases import SPECTRA, simulate


def shifted_rises(at, t, noise=0.02, seed=0):
    """Modes that all rise alike, and not by the law: from 1e-4 slowly to 3e-3, then eight times as fast."""
    since = t[:, None] - at  # in units in which the fast part has rate 4
    y = np.where(since > -1.45, 4 * since, -5.8 + 0.5 * (since + 1.45))
    lam = 1 / (1 + np.exp(-np.clip(y, -9.2, 30)))
    return -np.sort(-lam * np.exp(noise * np.random.default_rng(seed).standard_normal(lam.shape)), axis=1)


@pytest.fixture(scope="module")
def halving():
    """A noisy staircase of the linear theory, seen until four of eight steps were taken."""
    t, lam, tau, _ = simulate(SPECTRA["1/j"], 1e-6, 0)
    end = int(np.searchsorted(t, (tau[3] + tau[4]) / 2))
    return t[:end], lam[:end]


def test_curves_start_on_the_data_and_reach_half_at_the_step(halving):
    t, lam = halving
    ahead = sw.forecast_steps(t, lam)
    assert len(ahead.modes) >= 2
    begin = ahead.eigenvalues(ahead.now)
    latest = lam[-3:, ahead.modes]
    assert (begin > 0.6 * latest.min(axis=0)).all()
    assert (begin < 1.6 * latest.max(axis=0)).all()
    assert np.diag(ahead.eigenvalues(ahead.times)) == pytest.approx(ahead.level / 2)
    assert (np.diff(ahead.eigenvalues(np.linspace(ahead.now, ahead.times.max(), 50)), axis=0) > 0).all()
    exact = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t / t[-1] * 1.5, [2.0, 1.0, 0.9])))
    ahead = sw.forecast_steps(t / t[-1] * 1.5, exact)
    assert ahead.eigenvalues(1.5) == pytest.approx(exact[-1, 1:], rel=0.02)


def test_modes_that_rise_alike_are_forecast_by_the_ones_before():
    """The mode's own records, of the slow part only, would have it several times too late."""
    t, at = np.linspace(0, 60, 600), np.array([8.0, 15.0, 22.0, 30.0, 38.0, 47.0])
    lam = shifted_rises(at, t)
    end = int(np.searchsorted(t, 47.0 - 2.5))  # in the slow part
    ahead = sw.forecast_steps(t[:end], lam[:end])
    assert ahead.modes.tolist() == [5]
    left = 47.0 - ahead.now
    assert -ahead.odds[0] / ahead.rates[0] > 4 * left
    assert abs(ahead.times[0] - 47.0) < 0.5 * left
    assert ahead.low[0] <= 47.0 <= ahead.high[0]


def test_missed_is_what_would_have_been_said():
    t, at = np.linspace(0, 60, 600), np.array([8.0, 15.0, 22.0, 30.0, 38.0, 47.0])
    lam = shifted_rises(at, t)
    ahead, expected = sw.forecast_steps(t, lam), []
    for time, mode, level in zip(ahead.done.times[1:], ahead.done.modes[1:], ahead.done.levels[1:], strict=True):
        end = int(np.flatnonzero((lam[:, mode] < 0.01 * level) & (t < time))[-1]) + 2
        then = sw.forecast_steps(t[:end], lam[:end])
        guess = then.times[then.modes == mode][0]
        expected.append(abs(guess - time) / (time - t[end - 1]))
    assert ahead.missed == pytest.approx(expected)
    assert ahead.typical_miss == pytest.approx(np.median(expected))
    assert ahead.track_record == f"The last five steps were forecast {100 * np.median(expected):.0f} % off."


def test_no_word_about_fewer_than_two_steps():
    t = np.linspace(0, 60, 600)
    one = sw.forecast_steps(t, shifted_rises(np.array([20.0]), t))
    assert len(one.done) == 1
    assert (one.typical_miss, one.track_record) == (None, "")
    none = sw.forecast_steps(t[:100], shifted_rises(np.array([20.0]), t)[:100])
    assert len(none.missed) == 0


def test_steps_that_were_not_foreseen_are_said_to_be():
    """Modes that appear from noise within two records."""
    t = np.arange(100.0)
    rng = np.random.default_rng(0)
    lam = np.where(t[:, None] > [20, 40, 60], 1.0, 1e-4) * np.exp(0.05 * rng.standard_normal((100, 3)))
    lam[[20, 40, 60], [0, 1, 2]] = 0.05
    ahead = sw.forecast_steps(t, -np.sort(-lam, axis=1))
    assert len(ahead.done) == 3
    assert np.isinf(ahead.missed).all()
    assert ahead.track_record == "Most of the last three steps were not foreseen."


def test_nearness(halving):
    ahead = sw.forecast_steps(*halving)
    words = ahead.nearness
    assert words[0] == "next"
    assert words.count("next") == 1
    for word, high in zip(words[1:], ahead.high[1:], strict=True):
        assert (word == "soon") == (high - ahead.now <= 0.5 * (ahead.now - ahead.since))
        assert word in ("soon", "far off")
    assert {"soon", "far off"} & set(words)
    t = np.linspace(0, 1, 50)
    assert sw.forecast_steps(t, np.ones((50, 2))).nearness == []


def test_modes_of_a_covariance_that_grow_only_with_its_scale_are_not_forecast():
    t = np.linspace(0, 1, 50)
    lam = 1e-6 * np.exp(np.outer(t, [8.0, 6.0]))
    ahead = sw.forecast_steps(t, lam, level=None)
    assert len(ahead.modes) == len(ahead.missed) == 0
    assert ahead.arriving == 1, "the first mode holds the variance"
    assert ahead.level == pytest.approx((lam[-1] ** 2).sum() / lam[-1].sum())
    assert len(sw.forecast_steps(t, lam, level=1.0).modes) == 2


def test_a_covariance_is_forecast_before_its_first_step():
    """The second mode grows towards the first, whose scale overshoots by two orders of magnitude."""
    t = np.linspace(0, 3.0, 200)
    share = 1 / (1 + 1e5 * np.exp(-8 * t))
    step = np.log(1e5) / 8
    scale = 1e-3 + 0.3 * np.exp(-(((t - 0.6) / 0.3) ** 2))
    lam = scale[:, None] * np.stack([np.ones(200), share], axis=1)
    end = int(np.searchsorted(t, 0.7 * step))
    ahead = sw.forecast_steps(t[:end], lam[:end], level=None)
    assert len(ahead.done) == 0
    assert ahead.modes.tolist() == [1]
    assert abs(ahead.times[0] - step) < 0.1 * (step - ahead.now)
    assert ahead.low[0] <= step <= ahead.high[0]
    assert ahead.eigenvalues(ahead.now)[0] == pytest.approx(lam[end - 1, 1], rel=0.02)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 6), rough=st.floats(0.05, 2))
@example(seed=0, d=3, rough=2.0)  # a mode that falls by thirty powers of e
def test_the_scale_of_a_covariance_does_not_matter(seed, d, rough):
    """Not even if it drifts: forecasts are the same, and the plateau is that of the last record."""
    rng = np.random.default_rng(seed)
    t = np.cumsum(rng.uniform(0.1, 1, 40))
    lam = -np.sort(-np.exp(np.cumsum(rough * rng.standard_normal((40, d)) + 0.2, axis=0) - 8), axis=1)
    drift = np.exp(rng.uniform(-5, 5, (40, 1)))
    one, other = (sw.forecast_steps(t, x, level=None) for x in (lam, drift * lam))
    assert one.modes.tolist() == other.modes.tolist()
    for key in ("times", "low", "high"):
        assert getattr(one, key) == pytest.approx(getattr(other, key))
    assert other.level == pytest.approx(drift[-1, 0] * one.level)
    assert relative(relative(lam)) == pytest.approx(relative(lam))
    assert one.missed == pytest.approx(other.missed)


@pytest.mark.parametrize("start", [1e-2, 3e-2, 0.1])
def test_from_standard_initialization(start):
    """Modes that begin at 1 to 10 % of their plateau: sensible forecasts or none."""
    rates = np.geomspace(2.0, 0.2, 8)
    t = np.linspace(0, 30, 200)
    rng = np.random.default_rng(0)
    true = np.log(1 / start - 1) / rates
    lam = 1 / (1 + (1 / start - 1) * np.exp(-np.outer(t, rates)))
    lam = -np.sort(-lam * np.exp(0.03 * rng.standard_normal(lam.shape)), axis=1)
    for level in (1.0, None):
        for end in range(8, 200, 12):
            ahead = sw.forecast_steps(t[:end], lam[:end], level=level)
            assert np.isfinite([ahead.times, ahead.low, ahead.high]).all()
            if level:
                factor = (ahead.times - ahead.now) / np.maximum(true[ahead.modes] - ahead.now, 0.3)
                assert (factor < 6).all()
            assert len(ahead.missed) <= 5


def test_intervals_do_not_contradict_the_ones_before():
    """Of the next step, from one record to the next."""
    pairs = apart = 0
    for name in ("halving", "0.8^j"):
        t, lam, *_ = simulate(SPECTRA[name], 1e-6, 1)
        before = {}
        for end in range(20, len(t)):
            ahead = sw.forecast_steps(t[:end], lam[:end])
            spans = dict(zip(ahead.modes.tolist(), zip(ahead.low, ahead.high, strict=True), strict=True))
            if len(ahead.modes) and (first := int(ahead.modes[0])) in before:
                pairs += 1
                apart += before[first][1] < spans[first][0] or spans[first][1] < before[first][0]
            before = spans
    assert pairs > 300
    assert apart <= 0.02 * pairs


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), records=st.integers(8, 60), d=st.integers(1, 6), rough=st.floats(0.05, 2))
def test_invariants(seed, records, d, rough):
    """Of any spectra: ordered ends, nothing in the past, later modes later, and no dependence on units."""
    rng = np.random.default_rng(seed)
    t = np.cumsum(rng.uniform(0.1, 1, records))
    lam = np.exp(np.cumsum(rough * rng.standard_normal((records, d)) + 0.2, axis=0) - 8)
    lam = -np.sort(-np.where(rng.random(lam.shape) < 0.02, -lam, lam), axis=1)
    ahead = sw.forecast_steps(t, lam)
    assert (t[-1] <= ahead.low).all()
    assert (ahead.low <= ahead.times).all()
    assert (ahead.times <= ahead.high).all()
    assert (np.diff(ahead.times) >= 0).all()
    assert not set(ahead.modes) & set(ahead.done.modes)
    assert len(ahead.nearness) == len(ahead.modes)
    other = sw.forecast_steps(50 * t, 3 * lam, level=3.0)
    assert other.modes.tolist() == ahead.modes.tolist()
    assert other.times == pytest.approx(50 * ahead.times, rel=1e-6)
    assert other.high - other.now == pytest.approx(50 * (ahead.high - ahead.now), rel=1e-5)
