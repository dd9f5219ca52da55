"""Looking back: where a change of the state is found, and that nothing is judged twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stairwise.report.timeline import EFFORT, LEAST, MOST, changes, evenly, look_back
from stairwise.staircase.advice import Advice
from stairwise.staircase.steps import FEWEST


def run(total, d=2, seed=0):
    t = np.arange(1.0, total + 1)
    return t, 10 * t, np.random.default_rng(seed).random((total, d))


class Judge:
    """Waits until record `change`, then learns; counts how often it is asked."""

    def __init__(self, change=50):
        self.change, self.asked = change, []

    def __call__(self, n):
        self.asked.append(n)
        return Advice("learning" if n >= self.change else "waiting", n // 100, 8, (f"{n} records",))


@given(total=st.integers(1, 2000), data=st.data())
def test_one_change_is_found_at_its_record(total, data):
    judge = Judge(data.draw(st.integers(1, total)))
    looks = look_back(*run(total), judge)
    assert len(judge.asked) == len(set(judge.asked)) == len(looks) <= MOST
    assert looks[-1].records == total
    assert [look.step for look in looks] == [10 * look.records for look in looks]
    said = changes(looks)
    assert said[-1].records == max(judge.change, min(FEWEST, total))
    assert [look.advice.state for look in said] in (["learning"], ["waiting", "learning"])


def test_long_spectra_are_looked_at_less_often():
    for total, d in ((300, 32), (300, 512), (2000, 512)):
        judge = Judge()
        look_back(*run(total, d), judge)
        assert len(judge.asked) == pytest.approx(max(LEAST, EFFORT / (total * d)), abs=1)


def test_nothing_is_judged_twice():
    memory, judge, everything = {}, Judge(), run(400)
    for total in range(100, 401):
        before = len(judge.asked)
        looks = look_back(*(array[:total] for array in everything), judge, memory)
        # the new record, and one at which half of an earlier gap is
        assert len(judge.asked) - before <= (MOST if total == 100 else 2)
        assert looks[-1].records == total
    assert len(set(judge.asked)) == len(judge.asked)
    assert [look.records for look in looks] == sorted(judge.asked)  # all that was said is shown


def test_another_run_in_the_same_folder_is_judged_anew():
    memory, judge = {}, Judge()
    look_back(*run(100, seed=0), judge, memory)
    first = set(judge.asked)
    look_back(*run(100, seed=1), judge, memory)
    assert len(judge.asked) == 2 * len(first)


@given(total=st.integers(1, 10_000), most=st.integers(1, 60))
def test_even_looks(total, most):
    now, later = evenly(total, most), evenly(total + 1, most)
    assert len(now) <= most
    assert set(later) - {total + 1} <= set(now)
