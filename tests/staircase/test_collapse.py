"""Collapse: when it is named, when it is not, how long it stays named, and what is never said meanwhile."""

import numpy as np
import pytest

from stairwise.staircase.advice import Judge
from tests.staircase.made import SHRINKING, VICREG, T, falling, ruled_by_two, said, shrinking, signs, steady

ALIKE = {"level": None, "positive": 0.96, "negative": 0.95}  # agreement 0.2
EVEN = np.tile(np.r_[np.ones(8), np.full(8, 0.3)], (30, 1))
EVEN[:3, :8] = 3.0  # more than half of the variance was lost
T30 = np.arange(30.0)


@pytest.mark.parametrize(
    ("known", "bad"),
    [
        ({}, True),
        ({"positive": 0.98}, False),  # agreement 0.6: the mean has drifted
        ({"positive": 0.98, "loss": -0.98}, True),  # but not if the loss is that cosine,
        ({"positive": np.linspace(0.97, 0.99, 30), "loss": -0.98}, False),  # unless the views come to agree
        ({"positive": 0.96, "negative": np.linspace(0.958, 0.9, 30)}, False),  # embeddings come apart
        ({"positive": np.linspace(0.951, 0.972, 30)}, False),  # the views come to agree
        ({"positive": 0.999, "negative": 0.99}, False),  # agreement 0.9
        ({"positive": 0.999, "negative": 0.99, "loss": np.geomspace(1, 1e-5, 30)}, True),  # the loss has vanished
        ({"positive": 0.993, "negative": 0.99}, True),
        ({"loss": np.log(16)}, False),  # no prototype is chosen yet
        ({"loss": np.log(127)}, False),  # a contrastive loss of 64 pairs has not begun
        ({"loss": np.log(127), "batch": np.nan}, True),
        ({"loss": np.r_[0.5 * np.log(16), np.full(29, np.log(16))]}, False),  # the first records may overshoot
        ({"loss": np.r_[np.full(9, 0.5 * np.log(16)), np.full(21, np.log(16))]}, True),  # they had been chosen
    ],
)
def test_when_equal_directions_are_a_collapse(known, bad):
    says = said(T30, EVEN, **{"loss": 1.0, "batch": 64} | ALIKE | known)
    assert (says.state == "collapsed") == bad, str(says)


@pytest.mark.parametrize(
    ("kept", "loss", "bad"),
    [(0.4, 1.0, True), (0.6, 1.0, False), (0.6, -0.96, True), (0.6, -1.002, False)],
)
def test_equal_directions_are_no_collapse_while_the_variance_is_kept_unless_the_loss_is_a_cosine(kept, loss, bad):
    """A loss of −1.002 is within the tolerance of a cosine, but no cosine is below −1."""
    lam = np.r_[EVEN[:1] * 50, EVEN[3:6] / kept, EVEN[4:]]  # the first record may overshoot
    says = said(T30, lam, **ALIKE | {"positive": 0.96, "loss": loss, "batch": 64})
    assert (says.state == "collapsed") == bad, str(says)


@pytest.mark.parametrize(
    ("records", "negative", "loss", "bad"),
    [
        (6, 0.95, 1.0, False),  # the sixth record is the first that shows it
        (7, 0.95, 1.0, True),
        (6, 0.97, 1.0, False),
        (6, 0.95, -0.96, False),  # nearly the cosine
        (6, 0.97, -0.96, True),  # plain: the directions are more alike, and the loss asks for no less
        (3, 0.95, -0.98, False),  # where the loss is the cosine, it is the third
        (4, 0.95, -0.98, True),
        (3, 0.97, -0.98, True),
    ],
)
def test_equal_directions_are_a_collapse_if_two_records_show_it_or_one_plainly(records, negative, loss, bad):
    cosines = np.r_[np.full(30 - records, 0.3), np.full(records, negative)]
    says = said(T30, EVEN, level=None, positive=0.972, negative=cosines, loss=loss, batch=64)
    assert (says.state == "collapsed") == bad, str(says)


@pytest.mark.parametrize(
    ("mean_square", "loss", "level", "bad"),
    [
        (1.4, 3.0, None, False),  # C learns its constant mode
        (1.6, 3.0, None, True),
        (1.05, -0.999, None, False),  # a spectral contrastive loss is −1 then
        (1.4, -0.999, None, True),
        (1.05, -0.999, 1.0, True),  # Barlow Twins is not
    ],
)
def test_a_constant_mode_is_no_collapse(mean_square, loss, level, bad):
    alike = {"positive": 0.999, "negative": 0.9985, "mean_square": mean_square, "loss": loss, "batch": 64}
    says = said(T30, EVEN * np.geomspace(1, 0.1, 30)[:, None], level=level, **alike)
    assert (says.state == "collapsed") == bad, str(says)


CHOOSING = np.linspace(2.5, 0.3, 30)  # a loss over 16 prototypes, of which one is chosen


@pytest.mark.parametrize(
    ("known", "bad"),
    [
        ({"positive": 0.98}, True),  # agreement 0.6
        ({"positive": 0.98, "loss": np.r_[38.0, CHOOSING[1:]]}, True),  # it has settled since
        ({"positive": 0.98, "loss": np.r_[CHOOSING[:12], 38.0, CHOOSING[13:]]}, False),  # it may swing back
        ({"positive": 0.98, "loss": np.linspace(2.5, 1.8, 30)}, False),
        ({"positive": 0.9955, "negative": np.r_[np.full(10, 0.5), np.full(20, 0.95)]}, False),  # agreement 0.91
        ({"positive": 0.9955}, True),  # alike from the start
        ({"positive": 0.9955, "loss": np.r_[3.5, CHOOSING[1:]]}, False),
    ],
)
def test_when_all_samples_choose_one_prototype(known, bad):
    says = said(T30, EVEN, **{"loss": CHOOSING, "batch": 64} | ALIKE | known)
    assert (says.state == "collapsed") == bad, str(says)


def test_small_embeddings_are_a_collapse_where_the_loss_vanishes_too():
    fall = np.geomspace(1, 1e-5, 30)
    agreeing = {"level": None, "positive": 0.8, "negative": 0.1}
    assert said(T30, EVEN * fall[:, None], **agreeing, loss=fall).state == "collapsed"
    assert said(T30, EVEN * fall[:, None], **agreeing, loss=1.0).state != "collapsed"


@pytest.mark.parametrize(
    ("size", "loss", "bad"),
    [
        (3.0, (20, 10), False),  # 60 % is needed: it is, but the loss charges for redundancy
        (3.0, (20, 0.4), True),
        (3.0, (0.6, 0.4), False),
    ],
)
def test_when_one_dimension_is_a_collapse(size, loss, bad):
    lam = np.tile(size * np.r_[0.99, np.full(15, 0.01 / 15)], (30, 1))
    lam[:3] = size / 16
    says = said(T30, lam, level=None, loss=np.linspace(*loss, 30), positive=0.8, negative=0.1)
    assert (says.state == "collapsed") == bad, str(says)


UNIT = np.geomspace(0.4, 0.004, T)  # variance of normalized z that collapse


@pytest.mark.parametrize(
    ("mean_square", "bad"),
    [
        (1 - UNIT, True),  # of norm 1: all point the same way in the end
        (1.03, False),  # C has learned its constant mode, whose eigenvalue is near 1
    ],
)
def test_normalized_embeddings_that_point_the_same_way(mean_square, bad):
    t, lam = steady(0.5, 0.3, 0.2)
    alike = {"positive": 1 - UNIT / 3, "negative": 1 - UNIT, "mean_square": mean_square}
    says = said(t, lam * UNIT[:, None], level=None, loss=3.0, **alike)
    assert (says.state == "collapsed") == bad, str(says)


@pytest.mark.parametrize(("loss", "bad"), [(1.0, True), (0.1, False)])
def test_small_embeddings_are_a_collapse_where_the_loss_is_their_distance(loss, bad):
    """Views agree, which they also do in healthy runs whose scale drifts; the loss tells them apart."""
    fall = np.geomspace(1, 0.005, T)
    t, lam = steady(1.0, 0.6, 0.3, 0.1)
    says = said(t, lam * fall[:, None], level=None, mean_square=0, positive=0.6, negative=0.1, loss=fall**loss)
    assert (says.state == "collapsed") == bad, str(says)


@pytest.mark.parametrize("share", [0.05, 0.09])
def test_nothing_is_finished_while_the_variance_is_small(share):
    t, lam = falling(share)
    agreeing = {"level": None, "positive": 0.99, "negative": 0.1}
    assert said(t, lam, **agreeing).state != "finished"
    steady_one = said(*steady(1.0, 0.9, 0.8), **agreeing)
    assert steady_one.state in ("finished", "not started")


@pytest.mark.parametrize("known", [VICREG, VICREG | {"trace": np.nan}])
def test_copies_of_two_dimensions_are_not_a_finish(known):
    t, lam = ruled_by_two()
    judge = Judge(t, lam, None, signs(lam, **known))
    states = [judge.says(i).state for i in range(T)]
    assert "finished" not in states
    assert set(states[12:]) == {"collapsed" if known is VICREG else "waiting"}


@pytest.mark.parametrize(
    ("scale", "loss", "bad"),
    [
        (0.03, 3.8, False),
        (1.0, 3.8, True),  # C, at 20 times its plateau
        (1.0, 25.0, False),  # from the start: nothing has been learned
    ],
)
def test_when_few_dimensions_of_c_are_a_collapse(scale, loss, bad):
    t, lam = ruled_by_two()
    assert (said(t, scale * lam, loss=np.r_[25.0, np.full(T - 1, loss)]).state == "collapsed") == bad


@pytest.mark.parametrize(("others", "kept"), [(0.3, True), (0.9, False)])
def test_a_collapse_is_kept_until_it_is_mended(others, kept):
    says = said(*ruled_by_two(others), level=None, **VICREG)
    assert (says.state == "collapsed") == kept, str(says)
    assert ("last seen at t = 58" in str(says)) == kept


def test_a_shrinking_run_has_no_outlook():
    t, lam = shrinking(0.5)
    lam[:, 3] = np.geomspace(1e-4, 1e-2, T)  # seems to come
    says = said(t, lam, level=None, **SHRINKING)
    assert "z becomes shorter" in str(says)
    assert "Check the term that keeps the variance up" in says.remedy
    assert "comes next" not in str(says)
    assert "has not moved" not in str(says)
    assert "comes next" in str(said(t, lam, level=None, **SHRINKING | {"loss": np.geomspace(1, 0.8, T)}))
