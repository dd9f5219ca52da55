"""Steps detected and forecast on simulated staircases."""

import numpy as np
import pytest

import stairwise as sw
from stairwise.checks import InputError
from stairwise.theory.spectra import alpha_req, effective_rank, grown, participation_ratio
from tests.staircases import SPECTRA, STARTS, isolated, simulate


@pytest.fixture(scope="module")
def staircases():
    return [simulate(gamma, start, seed) for gamma in SPECTRA.values() for start in STARTS for seed in range(3)]


def score(staircases, tolerance):
    """F1 score of isolated steps, matched one to one within a tolerance; a step found elsewhere counts twice."""
    found = missed = wrong = 0
    for t, lam, tau, rise in staircases:
        off = np.abs(sw.detect_steps(t, lam).times[:, None] - tau)
        allowed, free = tolerance(rise, t[1] - t[0]), set(range(len(off)))
        for j in np.flatnonzero(isolated(tau, rise)):
            near = min(free, key=lambda k: off[k, j], default=None)
            hit = near is not None and off[near, j] <= allowed[j]
            found, missed = found + hit, missed + (not hit)
            free -= {near} if hit else set()
        crowded = ~isolated(tau, rise)  # detections near these are not counted
        wrong += sum(not (off[k, crowded] <= 2 * rise[crowded]).any() for k in free)
    return 2 * found / (2 * found + missed + wrong)


def test_isolated_steps_are_found_at_their_time(staircases):
    """Within half a rise time, or within half the time between records if that is longer."""
    assert score(staircases, lambda rise, spacing: np.maximum(rise, spacing) / 2) >= 0.95
    assert score(staircases, lambda rise, spacing: rise / 2) >= 0.93  # some rise between two records
    assert score(staircases, lambda rise, spacing: 2 * rise) >= 0.97


def test_neighbours_are_one_event():
    t = np.linspace(0, 8, 400)
    lam = 1 / (1 + 1e8 * np.exp(-8 * np.outer(t, [2.0, 1.0, 0.98, 0.5])))
    steps = sw.detect_steps(t, lam)
    assert steps.modes.tolist() == [0, 1, 2, 3]
    assert steps.multiplicity.tolist() == [1, 2, 1]
    assert steps.rise_times == pytest.approx(1 / (8 * np.array([2.0, 1.0, 0.98, 0.5])), rel=0.01)
    assert steps.levels == pytest.approx(1, abs=1e-3)


def test_other_levels_and_units():
    """Plateaus of covariances differ from 1, and time may have any unit."""
    t = np.linspace(0, 8, 400)
    lam = 1 / (1 + 1e8 * np.exp(-8 * np.outer(t, [2.0, 1.0, 0.5])))
    plain, scaled = sw.detect_steps(t, lam), sw.detect_steps(1e3 * t, 40 * lam)
    assert scaled.times == pytest.approx(1e3 * plain.times)
    assert scaled.levels == pytest.approx(40 * plain.levels)


def test_steps_of_modes_that_accelerate():
    """y' = r e^{κ y}, as in deep networks: a line through the whole rise would be late by several rise times."""
    t, kappa, end = np.linspace(0, 1000, 2000), 0.4, np.array([200.0, 500.0, 850.0])
    rate = np.expm1(-kappa * np.log(1e-6)) / (kappa * end)
    inner = np.exp(-kappa * np.log(1e-6)) - kappa * rate * t[:, None]
    y = np.where(t[:, None] < end, -np.log(np.maximum(inner, 1e-12)) / kappa, rate * (t[:, None] - end))
    steps = sw.detect_steps(t, 1 / (1 + np.exp(-y)))
    assert steps.modes.tolist() == [0, 1, 2]
    assert (np.abs(steps.times - end) <= t[1]).all()
    assert (steps.rise_times < 3 / rate).all()  # at the crossing, not over the whole rise


def test_steps_that_begin_on_a_low_plateau():
    """One eigenvalue stays at 0.05; the others overtake it, so their sorted curves begin there."""
    t = np.linspace(0, 100, 400)
    at = np.array([20.0, 50.0, 80.0])
    lam = 1 / (1 + np.exp(-2 * (t[:, None] - at)))
    lam = -np.sort(-np.column_stack([lam, np.full(len(t), 0.05)]), axis=1)
    noisy = lam * np.exp(0.03 * np.random.default_rng(0).standard_normal(lam.shape))
    steps = sw.detect_steps(t, noisy)
    high = steps.levels > 0.5
    assert steps.modes[high].tolist() == [0, 1, 2]
    assert np.abs(steps.times[high] - at).max() < 1.0
    assert steps.rise_times[high].max() < 1.5  # 0.5, measured with records 0.25 apart


def test_coupling_against_chance():
    """Staircases that rise together correlate more than shifted ones; staircases that rise apart do not."""
    t = np.linspace(0, 100, 400)
    rng = np.random.default_rng(0)

    def stairs(at):
        return 1 / (1 + np.exp(-2 * (t[:, None] - at))) * np.exp(0.02 * rng.standard_normal((len(t), len(at))))

    at = np.array([12.0, 30.0, 41.0, 63.0, 88.0])
    together, apart = (sw.staircase.steps.coupling(t, stairs(at), 7 * stairs(other)) for other in (at, at + 6))
    assert together.unshifted > 2 * together.by_chance
    assert apart.unshifted < apart.by_chance < 0.6


def test_what_is_no_step():
    t = np.linspace(0, 1, 50)
    rng = np.random.default_rng(0)
    flat = 1 + 0.1 * rng.standard_normal((50, 3))
    growing = 1e-8 * np.exp(5 * t)[:, None]
    noise = 1e-9 * np.abs(rng.standard_normal((50, 2)))
    for lam in (flat, growing, noise, np.zeros((50, 2)), -np.ones((50, 1))):
        assert len(sw.detect_steps(t, lam)) == 0


def test_forecasts_when_a_mode_has_reached_a_hundredth(staircases):
    """The median error is at most 10 % of the remaining time, and 80 % intervals cover 70 to 90 %."""
    errors, inside = [], []
    for t, lam, tau, rise in staircases:
        for j, (step, width) in enumerate(zip(tau, rise, strict=True)):
            end = np.searchsorted(t, step - width * np.log(99)) + 1
            if end < 10 or t[end - 1] >= step:
                continue
            ahead = sw.forecast_steps(t[:end], lam[:end])
            which = np.flatnonzero(ahead.modes == j)
            errors.append(abs(ahead.times[which[0]] - step) / (step - t[end - 1]) if len(which) else np.inf)
            inside.append(len(which) > 0 and ahead.low[which[0]] <= step <= ahead.high[which[0]])
    assert len(errors) > 200
    assert np.median(errors) <= 0.10
    assert 0.70 <= np.mean(inside) <= 0.90


def test_acceleration_is_learned_from_earlier_steps():
    """y' = r e^{κ y}: without acceleration the forecast would be late by half of the remaining time."""
    t = np.linspace(0, 520, 3000)
    kappa, rates = 0.35, np.array([4.0, 1.6, 1.0, 0.7, 0.5])
    start = np.log(1e-6)
    # e^{−κy} falls in a straight line until y = 0, then the logistic law takes over at its final rate
    step = (np.exp(-kappa * start) - 1) / (kappa * rates)
    y = np.where(
        t[:, None] < step,
        -np.log(np.maximum(np.exp(-kappa * start) - kappa * rates * t[:, None], 1e-300)) / kappa,
        rates * (t[:, None] - step),
    )
    lam = 1 / (1 + np.exp(-y)) * np.exp(0.03 * np.random.default_rng(0).standard_normal(y.shape))
    lam = -np.sort(-lam, axis=1)
    mode = 3
    end = int(np.searchsorted(t, step[mode])) - 60
    ahead = sw.forecast_steps(t[:end], lam[:end])
    assert mode in ahead.modes
    guess = ahead.times[ahead.modes == mode][0]
    assert abs(guess - step[mode]) < 0.15 * (step[mode] - t[end - 1])


def test_forecast_of_the_staircase():
    t = np.linspace(0, 1.5, 100)
    gamma = np.array([2.0, 1.0, 0.9, 1e-3])
    lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, gamma)))
    ahead = sw.forecast_steps(t, lam)
    true = np.log(1e6) / (8 * gamma[1:3])
    assert [ahead.when(0.5), ahead.when(0.75)] == pytest.approx(true, rel=0.03)
    assert (ahead.low <= true).all()
    assert (true <= ahead.high).all()
    later = np.array([1.6, 3.0])
    true = ((1 - 1 / (1 + 1e6 * np.exp(-8 * 1.6 * gamma))) ** 2).sum()
    assert ahead.loss(later)[0] == pytest.approx(true, abs=0.1)
    assert ahead.loss(later)[1] == pytest.approx(1.0, abs=0.05)
    with pytest.raises(InputError, match="share"):
        ahead.when(0)


@pytest.mark.parametrize("call", [sw.detect_steps, sw.forecast_steps])
def test_bad_input(call):
    t, lam = np.arange(10.0), np.ones((10, 2))
    for arguments, says in (
        ((t[:5], lam[:5]), "at least 8 records"),
        ((t[:9], lam), "10 times"),
        ((t[::-1], lam), "must increase"),
        ((t, lam * np.nan), "finite"),
        ((t, lam[:, 0]), "2-D"),
    ):
        with pytest.raises(InputError, match=says):
            call(*arguments)


def test_ranks():
    lam = np.array([[1.0, 1.0, 0.0, -1e-9], [4.0, 1.0, 1.0, 0.0]])
    assert effective_rank(lam)[0] == pytest.approx(2)
    assert participation_ratio(lam) == pytest.approx([2, 36 / 18])
    sigma = np.array([2.0, 1.0, 1.0]) / 4
    assert effective_rank(lam)[1] == pytest.approx(np.exp(-(sigma * np.log(sigma)).sum()))
    assert float(effective_rank(np.zeros(3))) == 0
    assert float(participation_ratio(np.zeros(3))) == 0
    with pytest.raises(InputError, match="collapsed"):
        alpha_req([1.0, 0.0])
    with pytest.raises(InputError, match="finite"):
        effective_rank([np.nan])


def test_grown_threshold():
    rng = np.random.default_rng(0)
    bimodal = np.r_[np.exp(0.3 * rng.standard_normal(20)), 1e-4 * np.exp(0.8 * rng.standard_normal(40))]
    count, threshold = grown(bimodal)
    assert count == 20
    assert 1e-3 < threshold < 0.5
    assert grown(np.exp(0.3 * rng.standard_normal(30))) == (30, 0.0)
    assert grown([2.0, 2.0]) == (2, 0.0)
    assert grown([0.0, -1e-9]) == (0, 0.0)
    waiting = np.r_[1.0, 0.9, 0.8, 10.0 ** -np.linspace(4, 9, 29)]  # of very different sizes
    assert grown(waiting)[0] == 3


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_jumps_from_one_record_to_the_next(noise):
    """Before them there is no rise to fit a line to; they are placed between the two records."""
    t, at = np.linspace(0, 5, 200), np.array([1.0, 2.2, 3.4])
    rng = np.random.default_rng(0)
    for _ in range(20):
        lam = np.where(t[:, None] > at, 1.0, 1e-9) * np.exp(noise * rng.standard_normal((200, 3)))
        found = sw.detect_steps(t, np.sort(lam, axis=1)[:, ::-1])
        assert found.times == pytest.approx(at, abs=t[1])
        assert found.modes.tolist() == [0, 1, 2]
