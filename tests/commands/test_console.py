"""Progress where there is no terminal, the closing tally of `reproduce` and the summary of `train`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stairwise.commands.console import plain_lines
from stairwise.commands.reproduce import _tally
from stairwise.commands.train import _summary
from stairwise.paper.fig5 import _variance
from stairwise.paper.harness import Claim, Result
from stairwise.runs.folder import RunFolder
from stairwise.runs.reader import Run
from stairwise.runs.record import Record


def lines_of(reports, name="photos-bt"):
    """The lines for reports (seconds, done, total, words), with a clock that shows these seconds."""
    written, now = [], [0.0]
    report = plain_lines(name, written.append, lambda: now[0])
    for seconds, done, total, words in reports:
        now[0] = seconds
        report(done, total, words)
    return written


def test_one_line_for_every_tenth():
    lines = lines_of([(i, i, 100, f"loss {i}") for i in range(101)])
    assert [line.split(" %")[0] for line in lines] == [f"photos-bt: loss {i}: {i}" for i in range(10, 101, 10)]
    assert lines[6] == "photos-bt: loss 70: 70 % after 70 s, about 30 s left"
    assert lines[-1] == "photos-bt: loss 100: 100 % after 2 min"


def test_slow_work_speaks_every_half_minute_and_quick_work_not_at_all():
    slow = lines_of([(i, i, 10_000, "") for i in range(1, 101)], "ntk")
    assert [line.split(",")[0] for line in slow] == [
        "ntk: 0 % after 30 s",
        "ntk: 1 % after 60 s",
        "ntk: 1 % after 2 min",
    ]
    assert lines_of([(i / 50, i, 100, "") for i in range(1, 101)]) == []


def test_a_run_that_continues_estimates_from_where_it_began():
    lines = lines_of([(0, 50, 100, ""), (10, 75, 100, "")])
    assert lines == ["photos-bt: 75 % after 10 s, about 10 s left"]


def test_an_unknown_total_is_no_error():
    assert lines_of([(40, 3, 0, "3 MB")], "") == ["3 MB: 0 % after 40 s"]


def test_words_stay_until_others_come():
    assert lines_of([(0, 0, 10, "loss 3"), (5, 5, 10, "")])[0].startswith("photos-bt: loss 3: 50 %")


def test_no_control_codes_in_a_pipe(tmp_path):
    """A pipe gets whole lines, and nothing that only a terminal understands."""
    code = (
        "import stairwise.commands.console as c\n"
        "c.SHORTEST = 0.0\n"
        "with c.bar('work') as report:\n"
        "    for i in range(101): report(i, 100, 'busy [x]')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("work: busy [x]: 10 % after")
    assert done.stdout == ""


def result(name, *claims):
    return Result(name, Path(name), {}, list(claims), {}, cached=False)


def test_tally():
    good, bad = Claim.at_most("error", 0.1, 0.5), Claim.at_most("slope", 2.0, 1.0)
    note = Claim.note("seconds", 3.0)
    said = _tally([result("fig1", good, note), result("fig2", good, bad)], 12.4)
    assert said == "2 figures made in 12 s, 2 of 3 checks held\n  failed: fig2: slope"
    assert _tally([result("fig1", good)], 1.0) == "1 figure made in 1 s, 1 of 1 checks held"
    assert _tally([result("fig2", bad)], 1.0, judged=False) == "1 figure made in 1 s"
    assert _tally([], 0.0) == "0 figures made in 0 s, 0 of 0 checks held"


@pytest.mark.parametrize("holds", [True, False])
def test_a_note_that_fails_is_counted(holds):
    claim = Claim("found at all", 0.0, "any", holds)
    assert _tally([result("f", claim)], 0.0).startswith(f"1 figure made in 0 s, 0 of {0 if holds else 1} checks")


@pytest.mark.parametrize(("values", "unit"), [([2.0, 1.0], "of 9, or more"), ([2.0, 0.1], "of 9")])
def test_a_run_of_leading_eigenvalues_is_summed_up(tmp_path, values, unit):
    """And its total variance, which Fig. 5 compares with that of the representations, is the recorded one."""
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"loss": "vicreg"}}))
    folder = RunFolder(tmp_path)
    lam = np.array(values)
    folder.write(Record(step=1, t=0.1, loss=1.0, seconds=1.0, covariance=lam, dimensions=9, variance=5.0))
    folder.close()
    rows = {name: (unit, value) for name, unit, value in _summary(Run(tmp_path))}
    assert rows["eigenvalues above a tenth of it"] == (unit, int((lam > 0.2).sum()))
    assert _variance(Run(tmp_path), "covariance").tolist() == [5.0]
