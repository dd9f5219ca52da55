"""Looking back: every record is judged once, and changes of the state are listed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stairwise.report.timeline import BRIEF, MOST, Look, changes, look_back
from stairwise.staircase.advice import STATES, Advice, Judge


def look(i, state):
    return Look(i + 1, 10.0 * i, float(i), Advice(state, 0, 8, ()))


@pytest.mark.parametrize("total", [1, 3, 50, MOST, MOST + 7, 3 * MOST])
def test_all_records_are_judged_or_the_most_that_fit(total):
    t = np.arange(1.0, total + 1)
    judge = Judge(t, 1 / (1 + 1e4 * np.exp(-np.outer(t, [0.3, 0.1]))))
    now = Advice("learning", 1, 2, ("Now.",))
    looks = look_back(judge, 10 * t, now)
    assert len(looks) == min(total, MOST)
    assert (looks[-1].records, looks[-1].advice) == (total, now)
    assert [one.step for one in looks] == [10 * one.records for one in looks]
    assert looks[0].advice == judge.says(0) or total == 1


@given(st.lists(st.sampled_from(STATES), min_size=1, max_size=30))
def test_changes(states):
    looks = [look(i, state) for i, state in enumerate(states)]
    said = changes(looks)
    assert said[0] == looks[0]
    assert all(a.advice.state != b.advice.state for a, b in pairwise(said))
    assert {"collapsed", "diverged", "finished"} & set(states) <= {one.advice.state for one in said}


def test_what_was_said_of_a_single_record_is_left_out():
    states = ["waiting"] * 5 + ["learning"] * (BRIEF - 1) + ["waiting"] * 5 + ["learning"] * BRIEF + ["waiting"] * 3
    said = changes([look(i, state) for i, state in enumerate(states)])
    assert [one.advice.state for one in said] == ["waiting", "learning", "waiting"]
