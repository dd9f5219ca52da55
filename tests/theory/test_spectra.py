"""Bounds on ranks of spectra of which only the leading eigenvalues and the sum of all are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from stairwise.checks import InputError
from stairwise.theory.spectra import (
    effective_rank,
    effective_rank_bounds,
    participation_ratio,
    participation_ratio_bounds,
    subspace_alignment,
)

MEASURES = {
    "effective rank": (effective_rank, effective_rank_bounds),
    "participation ratio": (participation_ratio, participation_ratio_bounds),
}
each_measure = pytest.mark.parametrize("name", MEASURES)


@st.composite
def spectra(draw):
    """Descending spectra with decades between their values, some of them zero."""
    d, rng = draw(st.integers(1, 40)), np.random.default_rng(draw(st.integers(0, 10**6)))
    lam = 10 ** rng.uniform(-draw(st.sampled_from([0.0, 1.0, 6.0])), 0, d)
    return np.sort(lam * (rng.random(d) < draw(st.sampled_from([0.5, 1]))))[::-1]


@each_measure
@settings(max_examples=300, deadline=None)
@given(data=st.data(), lam=spectra())
def test_the_true_rank_lies_between_the_bounds(name, data, lam):
    measure, bounds = MEASURES[name]
    k = data.draw(st.integers(1, len(lam)))
    low, high = bounds(lam[:k], lam.sum(), len(lam))
    assert low * (1 - 1e-6) <= measure(lam) <= high * (1 + 1e-6)  # a rest that is rounding counts as √rest
    if k == len(lam):
        assert low == pytest.approx(measure(lam), rel=1e-12)
        assert high == pytest.approx(measure(lam), rel=1e-12)


@each_measure
@pytest.mark.parametrize("seed", range(12))
def test_no_other_rest_has_a_rank_beyond_the_bounds(name, seed):
    """Sequential quadratic programming over all rests, from random ones, finds the bounds and nothing beyond."""
    measure, bounds = MEASURES[name]
    rng = np.random.default_rng(seed)
    leading = np.sort(rng.uniform(0.2, 3, 3))[::-1]
    unseen, most = 4, leading[-1]
    total = leading.sum() + unseen * most * rng.uniform(0.1, 0.9)

    def rank(rest):
        return float(measure(np.r_[leading, np.clip(rest, 0, most)]))

    whole = {"type": "eq", "fun": lambda rest: rest.sum() - (total - leading.sum())}
    found = []
    for sign in (1, -1):
        starts = rng.dirichlet(np.full(unseen, 0.4), 12) * (total - leading.sum())
        answers = [
            minimize(lambda rest, sign=sign: sign * rank(rest), start, bounds=[(0, most)] * unseen, constraints=[whole])
            for start in np.clip(starts, 1e-3 * most, most)
        ]
        found.append([rank(a.x) for a in answers if abs(whole["fun"](a.x)) < 1e-6])
    low, high = bounds(leading, total, 7)
    assert min(found[0]) == pytest.approx(low, rel=2e-3)
    assert min(found[0]) >= low * (1 - 1e-4)
    assert max(found[1]) == pytest.approx(high, rel=1e-4)
    assert max(found[1]) <= high * (1 + 1e-4)


@each_measure
def test_the_bounds_are_reached(name):
    measure, bounds = MEASURES[name]
    low, high = bounds([3.0, 1.0], 6.5, 9)
    assert low == pytest.approx(measure([3.0, 1, 1, 1, 0.5]))
    assert high == pytest.approx(measure([3.0, 1] + [2.5 / 7] * 7))


@each_measure
def test_many_records_at_once(name):
    bounds = MEASURES[name][1]
    lam = np.sort(np.random.default_rng(0).random((5, 8)))[:, ::-1]
    together = bounds(lam[:, :3], lam.sum(axis=1), 8)
    alone = [bounds(row[:3], row.sum(), 8) for row in lam]
    assert np.transpose(together) == pytest.approx(np.array(alone))


@each_measure
@pytest.mark.parametrize("total", [2.9999, 3.0])
def test_rounding_of_the_total_is_clipped(name, total):
    measure, bounds = MEASURES[name]
    assert bounds([2.0, 1.0], total, 10) == (pytest.approx(measure([2.0, 1.0])),) * 2
    assert bounds([2.0, 1.0], 1e9, 4) == (pytest.approx(measure([2.0, 1, 1, 1])),) * 2
    assert bounds([0.0, 0.0], 0.0, 4) == (0.0, 0.0)


@each_measure
def test_impossible_values_are_errors(name):
    bounds = MEASURES[name][1]
    with pytest.raises(InputError, match="dimensions must be at least 2"):
        bounds([2.0, 1.0], 3.0, 1)
    with pytest.raises(InputError, match="total must be finite"):
        bounds([2.0, 1.0], np.nan, 5)


@pytest.mark.parametrize("scale", [1e-250, 1e-12, 1e250])
def test_ranks_do_not_depend_on_the_scale(scale):
    lam = np.array([3.0, 2.0, 1.0, 0.0])
    for measure in (effective_rank, participation_ratio):
        assert measure(scale * lam) == pytest.approx(measure(lam), rel=1e-12)


def test_a_collapsed_embedding_does_not_align_with_a_whole_one():
    whole = np.random.default_rng(0).standard_normal((30, 3))
    collapsed = whole[:, [0, 0, 1]]
    assert subspace_alignment(collapsed, whole) == pytest.approx(2 / 3)
    assert subspace_alignment(collapsed, collapsed) == pytest.approx(2 / 3)
