"""The advice: records that make each sentence and each remedy appear, and what holds for all records."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stairwise as sw
from stairwise.checks import InputError
from stairwise.staircase.advice import ENOUGH, STATES, Judge, advise
from stairwise.staircase.growth import History, learned
from stairwise.staircase.steps import FEWEST
from stairwise.staircase.words import REMEDIES, SENTENCES
from tests.staircase.made import (
    SHRINKING,
    VICREG,
    T,
    fall,
    falling,
    ruled_by_one,
    ruled_by_two,
    said,
    shrinking,
    signs,
    staircase,
    steady,
)

CLOCK = sw.Clock(np.arange(T) * 1.0, np.arange(T) * 50.0, np.arange(T) * 10.0)


def said_of_leading(k, t, lam, level=1.0):
    """What is said if only the k leading eigenvalues and the sum of all are known."""
    return advise(t, lam[:, :k], level=level, dimensions=lam.shape[1], total=lam.sum(axis=1))


def grown_then_still(*after):
    """A covariance of four dimensions that are learned early; `after` are lower ones that stay."""
    t = np.arange(T) * 1.0
    early = 1 / (1 + 1e3 * np.exp(-1.5 * np.outer(t, [2.0, 1.7, 1.4, 1.2])))
    return t, np.hstack([early, np.tile(after, (T, 1))])


def lost_at(record):
    t, lam = steady(1.0, 0.5, 0.2)
    lam[record:] = np.nan
    return t, lam


def just_joined():
    """All dimensions have arrived, and growth ended at the record before."""
    t, lam = staircase(2.0, 1.5, until=2.0)
    judge = Judge(t, lam)
    growing = [i for i in range(ENOUGH, len(t)) if len(judge.history.at(i).rising)]
    return t[: growing[-1] + 2], lam[: growing[-1] + 2]


def below():
    """Too few records for a forecast: one dimension is learned, and one grows out of sight."""
    t, lam = steady(1.0, 1.0, records=7)
    lam[:, 1] = np.geomspace(1e-4, 1e-2, 7)
    return t, lam


DISTANCE = {"mean_square": 0.0, "positive": 0.5, "negative": 0.4}  # a loss that falls as the variance does is one
CASES = {
    "too few": lambda: said(*steady(1.0, 0.5, records=3)),
    "few pairs": lambda: said(*staircase(2.0, 1.0, 0.9), samples=300, wanted=np.r_[np.full(99, np.nan), 2048]),
    "not finite": lambda: said(*lost_at(40), clock=CLOCK),
    "huge loss": lambda: said(*steady(1.0, 0.5), loss=np.r_[np.ones(T - 1), 1e12]),
    "zero": lambda: said(*falling(1e-9), level=None),
    "same": lambda: said(*steady(1e-12, 1e-12), level=None, mean_square=1.0),
    "point": lambda: said(*falling(0.3), level=None, positive=0.972, negative=0.97, mean_square=30.0),
    "variance": lambda: said(*falling(0.01), level=None, **DISTANCE, loss=fall(0.01)),
    "falling": lambda: said(*falling(0.05), level=None, **DISTANCE, loss=fall(0.05)),
    "one": lambda: said(*ruled_by_one(), level=None, loss=np.linspace(10, 0.5, T)),
    "few": lambda: said(*ruled_by_two(), level=None, **VICREG),
    "kept": lambda: said(*ruled_by_two(0.3), level=None, **VICREG),
    "shrinking": lambda: said(*shrinking(0.5), level=None, **SHRINKING),
    "still": lambda: said(*steady(1.0, 0.5, 0.2), level=None),
    "none yet": lambda: said(*staircase(2.0, 1.0, 0.5, until=0.3)),
    "rising": lambda: said(*staircase(2.0, 1.0, 0.9)),
    "joined": lambda: said(*just_joined()),
    "too early": lambda: said(*steady(1.0, 0.9, records=6)),
    "quiet": lambda: said(*staircase(2.0, 1.0, 0.9, until=1.3)),
    "all in use": lambda: said(*staircase(2.0, 1.5, 1.2, until=5.0)),
    "no more": lambda: said(*grown_then_still(1e-4, 1e-5), level=None),
    "agreed": lambda: said(*(x[:14] for x in grown_then_still(1e-4)), level=None, positive=0.98, negative=0.1),
    "change": lambda: said(*staircase(2.0, 1.6, 0.9, until=1.15)),
    "next": lambda: said(*staircase(2.0, 1.0, 0.9), clock=sw.Clock(np.arange(2.0), 100 * np.arange(2.0))),
    "soon": lambda: said(*staircase(2.0, 1.0, 0.9, 0.85, 1e-3, until=1.4)),
    "all by": lambda: said(*staircase(2.0, 1.0, 0.9)),
    "below": lambda: said(*below()),
    "nothing below": lambda: said(*steady(1.0, 0.9, 1e-5)),
    "unseen": lambda: said_of_leading(2, *steady(1.0, 0.9, 0.8, 0.7)),
    "mean mode": lambda: said(*steady(1.0, 0.9, 1e-5), mean_square=0.8),
    "telling loss": lambda: said(*steady(1.0, 0.5), level=None, loss=np.log(2 * 64 - 1), batch=64),
}
STATE_OF = {  # where a sentence belongs to one state
    "too few": "cannot tell yet",
    "not finite": "diverged",
    "huge loss": "diverged",
    "zero": "collapsed",
    "same": "collapsed",
    "point": "collapsed",
    "variance": "collapsed",
    "falling": "collapsing",
    "one": "collapsed",
    "few": "collapsed",
    "kept": "collapsed",
    "shrinking": "waiting",
    "still": "not started",
    "none yet": "not started",
    "rising": "learning",
    "joined": "learning",
    "too early": "learning",
    "quiet": "waiting",
    "all in use": "finished",
    "no more": "finished",
    "agreed": "finished",
    "nothing below": "waiting",
    "unseen": "waiting",
}
CURES = {
    "diverged": CASES["not finite"],
    "point": CASES["point"],
    "variance": CASES["falling"],
    "one": CASES["one"],
    "still": CASES["still"],
    "falls": lambda: said(*steady(1.0, 0.5, 0.2), level=None, loss=np.linspace(2, 1, T)),
    "all in use": CASES["all in use"],
    "no more": CASES["no more"],
}


def pattern(sentence):
    """A sentence with anything in the place of its numbers."""
    return ".*".join(re.escape(part) for part in re.split(r"\{[^}]*\}", sentence))


def test_nothing_is_said_without_a_case():
    assert set(CASES) == set(SENTENCES)
    assert set(CURES) == set(REMEDIES)


@pytest.mark.parametrize("kind", SENTENCES)
def test_every_sentence_appears(kind):
    says = CASES[kind]()
    assert any(re.fullmatch(pattern(SENTENCES[kind]), one) for one in says.evidence), str(says)
    assert says.state == STATE_OF.get(kind, says.state)


@pytest.mark.parametrize("kind", REMEDIES)
def test_every_remedy_appears(kind):
    says = CURES[kind]()
    assert re.fullmatch(pattern(REMEDIES[kind]), says.remedy), str(says)


@pytest.mark.parametrize("kind", CASES)
def test_sentences_can_be_read(kind):
    text = str(CASES[kind]())
    assert not re.search(r"\bnan\b|\binf\b|\b1 records|\b1 more are|\{|\}|\d{5,}%|  ", text)
    assert text[0].isupper()
    assert text.endswith(".")


def test_counts_are_in_the_right_number():
    assert "There is 1 record so far" in str(said(*steady(1.0, records=1)))
    t, lam = staircase(2.0, 1.0, 0.9, until=1.5, records=100)
    judge = Judge(t, lam)
    first = next(i for i in range(ENOUGH, 100) if judge.says(i).state == "waiting")
    assert "none has grown for 1 record." in judge.says(first).evidence[0]
    assert "none has grown for 2 records." in judge.says(first + 1).evidence[0]


def test_large_growth_is_said_as_a_factor():
    t = np.arange(10) * 1.0
    lam = np.c_[np.ones(10), np.geomspace(1e-6, 0.4, 10)]
    assert re.search(r"dimension 2 is rising, [\d,]+-fold in", said(t, lam).evidence[0])


def test_a_loss_that_is_fine_is_not_called_infinite():
    """Embeddings may be lost although the last loss was finite."""
    t, lam = lost_at(40)
    assert said(t, lam, loss=0.5).evidence == ("The embeddings have not been finite since t = 40.",)


def test_a_run_that_was_never_finite():
    t, lam = lost_at(0)
    assert said(t, lam).evidence == ("The embeddings have not been finite since the first record.",)


@st.composite
def spectra(draw, negative=True, lost=True):
    """Descending spectra of any kind: noise, staircases, zeros, constants; some rows may be NaN."""
    records, d = draw(st.integers(1, 30)), draw(st.sampled_from([1, 2, 3, 8, 20]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    made = {
        "wild": lambda: 10 ** rng.uniform(-12, 3, (records, d)),
        "noise": lambda: rng.standard_normal((records, d)),
        "zero": lambda: np.zeros((records, d)),
        "constant": lambda: np.tile(10 ** rng.uniform(-3, 1, d), (records, 1)),
        "stairs": lambda: 1 / (1 + 1e5 * np.exp(-np.outer(np.linspace(0, 20, records), rng.uniform(0, 3, d)))),
        "vanishing": lambda: rng.standard_normal((records, d)) * (rng.random((records, 1)) < 0.5),
    }
    lam = made[draw(st.sampled_from(sorted(made)))]()
    lam = -np.sort(-(lam if negative else np.abs(lam)), axis=1)
    if lost and draw(st.booleans()):
        lam[rng.random(records) < 0.2] = np.nan
    return np.cumsum(rng.uniform(0.1, 1, records)), lam


@st.composite
def measured(draw, records, lam):
    """Signs of any kind; some are not measured."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))

    def some(values):
        return values if draw(st.booleans()) else np.full(records, np.nan)

    return signs(
        np.zeros((records, 1)),
        loss=some(rng.choice([1e11, np.nan, 25.0, np.log(64), 0.0, -1.0], records, p=[0.02, 0.08, 0.4, 0.3, 0.1, 0.1])),
        variance=some(np.maximum(np.nan_to_num(lam), 0).sum(axis=1)),
        mean_square=some(rng.uniform(0, 2, records)),
        positive=some(rng.uniform(0.9, 1, records)),
        negative=some(rng.choice([1.0, 0.95], records)),
        batch=some(np.full(records, 64.0)),
    )


@settings(max_examples=300, deadline=None)
@given(st.data(), spectra(), st.sampled_from([1.0, None]))
def test_any_records_give_advice(data, records, level):
    """Finite or not, negative or zero, one record or many, one dimension or many; warnings are errors here."""
    t, lam = records
    known = data.draw(st.none() | measured(len(t), lam))
    says = advise(t, lam, level=level, signs=known)
    assert says.state in STATES
    assert 0 <= says.learned <= says.dimensions == lam.shape[1]
    assert says.evidence
    assert not re.search(r"\bnan\b|\binf\b|\b1 records|\b1 more are|\d{5,}%", str(says))
    remedies = "|".join(pattern(remedy) for remedy in REMEDIES.values())
    assert re.fullmatch(f"({remedies})?", says.remedy)
    assert all(any(re.fullmatch(pattern(one), sentence) for one in SENTENCES.values()) for sentence in says.evidence)


@settings(max_examples=60, deadline=None)
@given(st.data(), spectra(), st.sampled_from([1.0, None]))
def test_advice_does_not_depend_on_the_future(data, records, level):
    t, lam = records
    known = data.draw(measured(len(t), lam))
    judge = Judge(t, lam, level, known)
    for i in range(len(t)):
        then = advise(t[: i + 1], lam[: i + 1], level=level, signs=known.until(i + 1))
        now = judge.says(i)
        assert (now.state, now.learned, now.remedy) == (then.state, then.learned, then.remedy)
        assert now.evidence[0] == then.evidence[0]


@settings(max_examples=100, deadline=None)
@given(spectra(), st.integers(-30, 30))
def test_advice_for_a_covariance_has_no_scale(records, power):
    """A power of two, so that no digit is lost."""
    t, lam = records
    one, other = (advise(t, scale * lam, level=None) for scale in (1.0, 2.0**power))
    assert (one.state, one.learned, one.remedy) == (other.state, other.learned, other.remedy)
    assert one.evidence[0] == other.evidence[0]


@settings(max_examples=60, deadline=None)
@given(spectra(negative=False, lost=False), st.floats(0.1, 10.0))
def test_advice_has_no_unit_of_time(records, unit):
    t, lam = records
    assert Judge(t, lam).says().evidence[0] == Judge(unit * t, lam).says().evidence[0]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 8),
    st.floats(0.5, 0.85),
    st.floats(-8, -3),
    st.integers(60, 200),
    st.sampled_from([1.0, None]),
    st.integers(0, 10**6),
)
def test_a_staircase_of_the_linear_theory_is_not_called_finished_too_early(d, ratio, start, records, level, seed):
    """Modes spaced in time, records scattered by 5 %, as long as a mode that can be seen is still to come.

    From the eighth record on, before which pages say nothing. For a covariance, after the first step: before it all
    dimensions are alike, and count as in use.
    """
    gamma = ratio ** np.arange(d)
    last = np.log(10.0**-start) / (8 * gamma[-1])
    t, lam = staircase(*gamma, until=1.3 * last, records=records, start=10.0**start)
    noisy = lam * np.exp(0.05 * np.random.default_rng(seed).standard_normal(lam.shape))
    judge = Judge(t, -np.sort(-noisy, axis=1), level)
    to_come = ((lam > 1e-5) & (lam < (0.5 if level else 0.1))).any(axis=1)
    if level is None:
        to_come &= lam[:, 0] > 0.9
    to_come[: FEWEST - 1] = False
    assert [i for i in np.flatnonzero(to_come) if judge.says(i).state == "finished"] == []


def test_dimensions_that_grow_alike_are_not_called_finished():
    t, lam = staircase(1.0, 0.9, until=0.8, records=60)
    assert lam[-1].max() < 0.01
    assert said(t, lam, level=None).state != "finished"


def test_a_staircase_of_the_linear_theory_is_called_finished_in_the_end():
    t, lam = staircase(*0.7 ** np.arange(5), until=20.0)
    assert said(t, lam).state == "finished"
    assert said(t, lam, level=None).state == "finished"


@pytest.mark.parametrize("level", [1.0, None])
def test_learned_is_the_count_that_is_said(level):
    t, lam = staircase(2.0, 1.0, 0.9)
    assert said(t, lam, level=level).learned == learned(lam[-1], level)


def test_dimensions_in_use_by_hand():
    """Σλ²/Σλ = (4 + 1 + 0.25)/3.5 = 1.5, a fifth of it 0.3."""
    assert learned(np.array([2.0, 1.0, 0.5])) == 3
    assert learned(np.array([2.0, 1.0, 0.29, 0.21])) == 2
    assert learned(np.zeros(3)) == 0
    assert learned(np.array([1.0, 0.51, 0.49]), level=1.0) == 2
    assert learned(np.array([2.0, 1.1, 0.9]), level=2.0) == 2


def test_history_counts_the_quiet_records():
    t, lam = staircase(2.0, 1e-3, until=2.0)
    history = History(lam, 1.0)
    quiet = [history.at(i).quiet for i in range(len(t))]
    end = np.flatnonzero(history.active)[-1]
    assert quiet[end:] == list(range(len(t) - end))


T3, LAM3 = np.arange(10) * 1.0, np.ones((10, 2))


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("lam", {"lam": np.ones(10)}),
        ("lam", {"lam": np.ones((0, 3)), "t": []}),
        ("lam", {"lam": [["a", "b"]] * 10}),
        ("lam", {"lam": [[1.0], [1.0, 2.0]]}),
        ("t", {"t": np.arange(9.0)}),
        ("t", {"t": np.zeros(10)}),
        ("t", {"t": np.arange(10.0)[::-1]}),
        ("t", {"t": np.full(10, np.nan)}),
        ("level", {"level": 0.0}),
        ("level", {"level": -1.0}),
        ("level", {"level": np.nan}),
        ("level", {"level": "one"}),
        ("signs", {"signs": signs(np.ones((9, 2)))}),
    ],
)
def test_wrong_arguments(argument, options):
    with pytest.raises(InputError, match=f"^`?{argument}") as error:
        advise(**{"t": T3, "lam": LAM3} | options)
    assert len(str(error.value)) > len(argument) + 10


@pytest.mark.parametrize("record", [-1, 10])
def test_records_that_do_not_exist(record):
    with pytest.raises(InputError, match="record"):
        Judge(T3, LAM3).says(record)


def test_more_dimensions_than_a_handful_are_followed():
    """A step every few records, far beyond the first dozens: it is learning, and never finished."""
    t = np.linspace(0, 400, 400)
    lam = np.sort(1 / (1 + 1e4 * np.exp(-8 * np.outer(t, 1 / (1 + np.arange(256) / 2)))), axis=1)[:, ::-1]
    judge = Judge(t, lam)
    states = {judge.says(i).state for i in range(50, 400) if judge.history.at(i).learned < 250}
    assert states <= {"learning", "waiting"}
    assert judge.says(200).learned > 64


def test_counts_that_fluctuate_are_not_called_growth_and_rest_at_once():
    """Spectra without any law: where none has grown for some records, no smaller number is named of any of these."""
    quiet, contradictions = 0, []
    for seed in range(30):
        lam = -np.sort(-np.exp(np.random.default_rng(seed).normal(size=(12, 8))), axis=1)
        said = str(sw.advise(np.arange(12.0), lam, level=None))
        rest = re.search(r"(\d+) of 8 dimensions are in use, and none has grown for (\d+) record", said)
        earlier = re.search(r"(\d+) (?:was|were) in use at t = (\d+)", said)
        quiet += rest is not None
        if rest and earlier and int(earlier[2]) >= 12 - int(rest[2]) and int(earlier[1]) < int(rest[1]):
            contradictions.append(said)
    assert quiet > 5
    assert contradictions == []
