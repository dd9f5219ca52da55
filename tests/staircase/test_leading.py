"""Records that hold the leading eigenvalues only, and records of too few pairs."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpus.score import PARTS
from benchmarks.corpus.store import read
from stairwise.checks import InputError
from stairwise.staircase.advice import SURE, Judge, advise
from stairwise.staircase.forecast import forecast_steps
from stairwise.staircase.growth import NEXT, Rest, learned, typical
from stairwise.staircase.words import SENTENCES
from tests.staircase.made import ruled_by_one, signs, staircase, steady
from tests.staircase.test_advice import pattern, spectra
from tests.staircase.test_collapse import T30

PAGE = Path(__file__).parents[2] / "docs" / "staircase.md"


@pytest.fixture(scope="module")
def corpus():
    """Every twentieth run of the first and the fourth part."""
    return [run for part in ("first", "fourth") for run in read(PARTS[part])[::20]]


def compare(run, k, same):
    """Count the records at which k leading eigenvalues give the state that all of them give."""
    t, lam = run.scalars["t"], run.lam
    d = lam.shape[1]
    whole, cut = (Judge(t, lam[:, :n], run.level, run.signs(), d, lam.sum(axis=1)) for n in (d, k))
    for i in range(len(lam)):
        true, said = whole.says(i), cut.says(i)
        assert said.state == true.state or said.state not in SURE, (run.name, i)
        assert said.dimensions == d
        where = "seen" if true.learned + NEXT <= k else "at the edge" if true.learned < k else "beyond"
        same[where, said.state == true.state] += 1
        if true.state == "learning" and where == "beyond":
            same["growth beyond", said.state == "learning"] += 1


def test_leading_eigenvalues_give_the_state_that_all_of_them_give(corpus):
    """Stored runs, cut to a half and to a quarter of their columns; and no cut is a reason to stop or to accuse."""
    same: Counter[tuple[str, bool]] = Counter()
    for run in corpus:
        for share in (2, 4):
            compare(run, max(NEXT, run.lam.shape[1] // share), same)
    counts = {where: f"{same[where, True]} of {same[where, True] + same[where, False]}" for where, _ in same}
    print(len(corpus), counts)
    assert same["seen", True] >= 0.99 * (same["seen", True] + same["seen", False]) > 1000
    page = PAGE.read_text(encoding="utf-8")
    assert f"{len(corpus)} runs of the corpus" in page
    assert all(f"{counts[where]} records" in page for where in ("seen", "at the edge", "growth beyond"))


def test_nothing_changes_if_all_eigenvalues_are_given(corpus):
    for run in corpus[::10]:
        t, lam = run.scalars["t"], run.lam
        plain, told = (
            Judge(t, lam, run.level, run.signs(), *more) for more in ((), (lam.shape[1], np.zeros(len(lam))))
        )
        assert all(str(plain.says(i)) == str(told.says(i)) for i in range(len(lam)))


def test_all_recorded_eigenvalues_in_use_is_no_finish():
    t, lam = steady(*[1.0] * 12)
    assert advise(t, lam).state == "finished"
    says = advise(t, lam[:, :5], dimensions=12, total=lam.sum(axis=1))
    assert (says.state, says.learned, says.at_least, says.count) == ("waiting", 5, True, "at least 5 of 12")
    assert says.evidence[0].startswith("At least 5 of 12 dimensions are in use")
    assert "All dimensions" not in str(says)
    assert not says.remedy


def test_what_grows_below_the_recorded_eigenvalues_is_seen_in_their_sum():
    """Six dimensions of a covariance have been in use for long, and six more rise."""
    t = np.linspace(0, 10, 60)
    later = 1 / (1 + np.exp(-2 * (t - 9)))
    lam = np.hstack([np.ones((60, 6)), np.outer(later, np.linspace(0.95, 0.9, 6))])
    says = advise(t, lam[:, :6], level=None, dimensions=12, total=lam.sum(axis=1))
    assert advise(t, lam, level=None).state == says.state == "learning"
    assert "those that are not recorded are rising" in says.evidence[0]


def test_one_dimension_of_many_is_judged_against_the_total():
    """The largest of two recorded eigenvalues holds 99 % of them, but a small share of the variance."""
    t, lam = ruled_by_one()
    known = signs(lam, loss=np.linspace(10, 0.5, len(t)))
    assert advise(t, lam[:, :2], None, None, known, dimensions=20, total=lam.sum(axis=1)).state == "collapsed"
    more = lam.sum(axis=1) + 18 * 0.001 * 100
    assert advise(t, lam[:, :2], None, None, known, dimensions=2000, total=more).state != "collapsed"


def test_typical_variance_with_an_equal_rest_is_exact():
    lam = np.array([[3.0, 2.0, 0.5, 0.5, 0.5, 0.5]])
    rest = Rest.of(lam[:, :2], lam.sum(axis=1), 6)
    assert typical(lam[:, :2], rest) == pytest.approx(typical(lam))
    assert learned(np.array([1.0, 0.05]), rest=Rest(np.array([0.0]), 5)) == 1
    assert learned(np.array([1.0, 0.05]), rest=Rest(np.array([4.0]), 100)) == 2  # the typical variance is 0.23


def test_forecasts_are_those_of_all_eigenvalues():
    gamma = 2.0 * 0.8 ** np.arange(12)
    t, lam = staircase(*gamma, until=2.2)
    for level in (1.0, None):
        whole = forecast_steps(t, lam, level=level)
        part = forecast_steps(t, lam[:, :9], level=level, dimensions=12, total=lam.sum(axis=1))
        shown = whole.modes < 9
        assert part.modes.tolist() == whole.modes[shown].tolist()
        assert part.times == pytest.approx(whole.times[shown], rel=1e-3)
        assert part.missed == pytest.approx(whole.missed, rel=1e-2)
        assert part.dimensions == 12
        assert part.when(1.0) == np.inf
        assert part.loss(t[-1]) == pytest.approx(whole.loss(t[-1]), abs=0.01)


@settings(max_examples=150, deadline=None)
@given(st.data(), spectra(), st.sampled_from([1.0, None]))
def test_any_leading_eigenvalues_give_advice(data, records, level):
    """With any total, also one that is too small, and with any records of too few pairs."""
    t, lam = records
    d = lam.shape[1] + data.draw(st.integers(0, 50))
    total = np.nan_to_num(lam).sum(axis=1) * data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    few = np.where(np.random.default_rng(len(t)).random(len(t)) < data.draw(st.sampled_from([0, 0.3, 1])), 99.0, np.nan)
    known = signs(lam, samples=50.0, wanted=few)
    judge = Judge(t, lam, level, known, d, total)
    for i in range(len(t)):
        says = judge.says(i)
        assert 0 <= says.learned <= lam.shape[1] <= says.dimensions == d
        assert says.at_least == (lam.shape[1] == says.learned < d)
        assert not re.search(r"\bnan\b|\binf\b", str(says))
        assert all(any(re.fullmatch(pattern(one), said) for one in SENTENCES.values()) for said in says.evidence)
        then = advise(
            t[: i + 1], lam[: i + 1], level=level, signs=known.until(i + 1), dimensions=d, total=total[: i + 1]
        )
        assert (says.state, says.learned, says.evidence[0]) == (then.state, then.learned, then.evidence[0])


FINISHED = np.tile(np.r_[np.ones(8), np.full(8, 0.3)], (30, 1))
LATE = np.r_[np.full(29, np.nan), 64.0]


def test_the_last_record_of_too_few_pairs_does_not_undo_what_was_known():
    """As when a run ends in the middle of a window: the spectrum of few pairs is spread out."""
    lam = FINISHED.copy()
    lam[-1] *= np.geomspace(9, 1e-9, 16)
    before, after = (advise(T30, lam, signs=signs(lam, samples=10, wanted=wanted)) for wanted in (np.nan, LATE))
    assert before.state != "finished"
    assert (after.state, after.learned) == ("finished", 8)
    assert (
        after.evidence[-1] == "The record has 10 pairs of the 64 that 16 dimensions need, so its spectrum says little."
    )


def test_too_few_pairs_are_no_reason_to_stop_or_to_accuse():
    for lam, known in ((FINISHED, {}), (1e-12 * FINISHED, {"mean_square": 1.0})):
        says = [advise(T30, lam, signs=signs(lam, samples=10, wanted=wanted, **known)) for wanted in (np.nan, 64)]
        assert says[0].state in SURE
        assert says[1].state == "cannot tell yet"
        assert len(says[1].evidence) == 1
        assert not says[1].remedy
    lost = FINISHED.copy()
    lost[-1] = np.nan
    assert advise(T30, lost, signs=signs(lost, samples=10, wanted=64)).state == "diverged"


def test_what_is_missing_is_named():
    t, lam = steady(1.0, 0.5)
    with pytest.raises(InputError, match="total must be given if lam has 2 of 9"):
        advise(t, lam, dimensions=9)
    with pytest.raises(InputError, match="dimensions must be at least 2"):
        advise(t, lam, dimensions=1)
    with pytest.raises(InputError, match="total must have 60 numbers"):
        forecast_steps(t, lam, dimensions=9, total=[1.0])
