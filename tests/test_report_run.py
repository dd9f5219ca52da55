"""The page of a run, and the words that its spectra are put into."""

import json
import subprocess
import sys

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.experiments.training import page_of
from stairwise.monitor.advice import advise
from stairwise.monitor.log import MetricsLog

T = np.linspace(0, 6, 300)


def staircase(gamma, t=T):
    return 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, gamma)))


@pytest.mark.parametrize(
    ("lam", "says"),
    [
        (staircase([2.0, 1.0, 0.8]), "All dimensions are in use"),
        (staircase([2.0, 0.25, 0.2]), "This plateau is normal: dimension 2"),
        (staircase([2.0, 0.3, 1e-9]), "2 of 3 dimensions learned"),  # the second is just arriving
        (staircase([2.0, 1e-9, 1e-9]), "stop here, or choose d near 1"),
        (staircase([2.0, *[1e-9] * 19]), "dimensional collapse"),
        (staircase([1e-9, 1e-9]), "No step has been seen yet"),
        (np.maximum(1e-9, np.exp(-5 * T))[:, None] * [1.0, 0.5], "Collapsed"),
        (np.zeros((300, 2)), "Collapsed"),
    ],
)
def test_advice(lam, says):
    assert says in " ".join(advise(T, lam))


@pytest.fixture
def run(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for i, (t, row) in enumerate(zip(T, staircase([2.0, 0.8, 0.25]), strict=True)):
        log.write(
            {
                "step": 10 * i,
                "t": t,
                "loss": ((1 - row) ** 2).sum(),
                "eigenvalues": row,
                "covariance": 2 * row,
                "hidden": row,
            }
        )
    log.close()
    return tmp_path


def test_page_says_what_was_measured(run):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 99')
    page = page_of(run, "eigenvalues")
    assert page.lead.startswith("2 of 3 dimensions learned. This plateau is normal: dimension 3")
    assert [panel.title for panel in page.panels] == [
        "Loss",
        "Eigenvalues of C",
        "Eigenvalues of the representations",
        "Dimensions in use",
        "Eigenvalues now, grown to the right of the dotted line",
    ]
    now, taken, coming = page.tables
    assert now.rows[0][1] == "3 of 3"  # the third is within a factor of ten
    assert [row[0] for row in taken.rows] == ["1", "2"]
    assert float(taken.rows[0][1]) == pytest.approx(np.log(1e6) / 16, rel=0.02)
    assert float(coming.rows[0][1]) == pytest.approx(np.log(1e6) / 2.0, rel=0.1)
    assert "1 damaged lines" in page.facts["records"]
    assert page_of(run).panels[1].title == "Eigenvalues of the covariance of z"


def test_command_line(run):
    command = [sys.executable, "-m", "stairwise", "report", run, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dimensions learned" in json.loads(done.stdout)["says"]
    assert "Steps to come" in (run / "report.html").read_text(encoding="utf-8")


def test_bad_runs(tmp_path, run):
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        page_of(tmp_path / "nowhere")
    with pytest.raises(InputError, match="known: eigenvalues, covariance"):
        page_of(run, "eigen")
    few = tmp_path / "few"
    log = MetricsLog(few / "metrics.jsonl")
    log.write({"step": 1, "t": 1.0, "covariance": [1.0, 0.5]})
    log.close()
    with pytest.raises(InputError, match="at least two records"):
        page_of(few)
