"""Each defect of torch that we step around is still there; where it is mended, the test says what to remove."""

import re
from pathlib import Path

import pytest
import torch

from stairwise.defects import DEFECTS, MENDED, SHOWS, UNSUITED, Defect, state

ROOT = Path(__file__).parents[1]
UNREPRODUCED = {"batch norm in evaluation mode"}  # not every machine shows it, and which do is not known


@pytest.mark.parametrize("name", DEFECTS)
def test_it_is_still_there(name):
    defect = DEFECTS[name]
    states = [state(defect)]
    if states == [MENDED] and name not in UNREPRODUCED:  # what is overwritten by accident may not matter at once
        states.append(state(defect, threads=2))
    if UNSUITED in states:
        pytest.skip(f"this machine cannot show it: needs {defect.machines}")
    if SHOWS not in states and name in UNREPRODUCED:
        pytest.skip(f"does not show on this CPU, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    assert SHOWS in states, f"{name}: mended in torch {torch.__version__}: remove the workaround: {defect.way_around}"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("", MENDED),
        ("import sys; sys.exit(1)", SHOWS),
        ("import os; os.abort()", SHOWS),
        ("import sys; sys.exit(77)", UNSUITED),
        ("while True: pass", SHOWS),
    ],
)
def test_crashes_and_endless_loops_show_a_defect(program, found, monkeypatch):
    monkeypatch.setattr("stairwise.defects.SECONDS", 1.0)
    assert state(Defect("", "", "", "", "", program)) == found


def test_a_broken_reproducer_shows_nothing():
    with pytest.raises(RuntimeError, match="reproducer itself failed"):
        state(Defect("", "", "", "", "", "nonsense"))


@pytest.mark.parametrize("name", DEFECTS)
def test_the_places_named_exist(name):
    for path, function in re.findall(r"`([\w/]+\.py)`(?: \(`(\w+)`\))?", DEFECTS[name].way_around):
        assert function in (ROOT / "stairwise" / path).read_text(encoding="utf-8")
