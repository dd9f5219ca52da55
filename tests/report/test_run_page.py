"""The page of a run, and the sentences about its spectra."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from stairwise.checks import InputError
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.report.live import live_page
from stairwise.report.run_page import run_page
from stairwise.runs.folder import RunFolder
from stairwise.runs.log import MetricsLog
from stairwise.runs.record import Record
from stairwise.staircase.advice import advise

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
        loss = ((1 - row) ** 2).sum()
        log.write(Record(step=10 * i, t=t, loss=loss, eigenvalues=row, covariance=2 * row, hidden=row))
    log.close()
    return tmp_path


def test_page_says_what_was_measured(run):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 99')
    page = run_page(run, "eigenvalues")
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
    assert page.facts["records"] == "300 records, 1 damaged lines left out"
    assert run_page(run).panels[1].title == "Eigenvalues of the covariance of z"


DAMAGE = [
    {"t": None}, {"t": "2"}, {"t": [1]}, {"t": 10**400}, {"t": float("nan")}, {"t": 1e9}, {"t": True},
    {"step": "7"}, {"step": None}, {"covariance": [1.0]}, {"covariance": "high"}, {"covariance": None},
    {"covariance": {"a": 1}}, {"covariance": [1.0, None, 0.1]}, {"covariance": []}, {"hidden": None}, {"hidden": [1.0]},
    {"hidden": "x"}, {"loss": "low"}, {"seconds": "late"}, {"loss": None},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
@pytest.mark.parametrize("where", [0, 10, 299])
def test_damaged_records_are_left_out(run, damage, where):
    if where == 299 and damage == {"t": 1e9}:
        pytest.skip("the last time may be any")
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[where] = json.dumps(json.loads(lines[where]) | damage)
    path.write_text("\n".join([*lines, "[" * 100_000, "{}"]))
    page = run_page(run)
    assert page.lead.startswith("2 of 3 dimensions learned")
    counted = 300 if set(damage) & {"hidden", "loss", "seconds"} else 299
    assert page.facts["records"].startswith(f"{counted} records")
    no_record = set(damage) <= {"t", "step"} and damage != {"t": 1e9}
    assert f"{3 if no_record else 2} damaged lines" in page.facts["records"]
    page.write(run / "report.html")


def test_records_without_a_spectrum_are_no_damage(run):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3000, "t": 6.1, "knn": 0.5}\n')
    assert run_page(run).facts["records"] == "300 records"


def test_a_damaged_recipe(run):
    for text in ('{"recipe": 3}', "{}", '{"recipe": {"loss": "vicreg"}}', "{"):
        (run / "recipe.json").write_text(text)
        with pytest.raises(InputError, match=r"recipe\.json"):
            run_page(run)


def test_collapse_to_a_point_that_is_not_the_origin(tmp_path):
    """All embeddings are 0.7 in every dimension: the eigenvalues are rounding error, or come from the mean."""
    monitor, run = SpectrumMonitor(), RunFolder(tmp_path)
    for i in range(20):
        monitor.reset()
        monitor.update(torch.full((64, 4), 0.7), torch.full((64, 4), 0.7))
        run.write(Record(step=i, t=float(i), **vars(monitor.compute())))
    run.close()
    for spectrum in ("eigenvalues", "covariance"):
        assert run_page(tmp_path, spectrum).lead.startswith("Collapsed")


@pytest.mark.parametrize("fall", [1e-3, 1e-5])
def test_falling_after_steps_have_been_taken(fall):
    lam = staircase([2.0, 1.0, 0.8]) * np.where(T[:, None] > 4, np.maximum(fall, np.exp(-20 * (T[:, None] - 4))), 1.0)
    assert advise(T, lam)[0].startswith("Collapsing: 3 dimensions had been learned")


@pytest.mark.parametrize("scale", [1e4, 1.0, 1e-3])
def test_covariances_may_have_any_scale(scale):
    """There is no forecast before the first step; afterwards it does not depend on the scale."""
    lam = staircase([2.0, 0.8, 0.25])
    early = advise(T[:30], scale * lam[:30], level=None)
    assert early[0].startswith("No step has been seen yet")
    assert advise(T, scale * lam, level=None) == advise(T, lam, level=None)
    flat = np.full((300, 3), [5.0, 4.0, 3.0])
    assert advise(T, scale * flat, level=None)[0].startswith("No step has been seen yet")


def test_command_line(run):
    command = [sys.executable, "-m", "stairwise", "report", run, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dimensions learned" in json.loads(done.stdout)["says"]
    assert "Steps to come" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("finite", [0, 1])
def test_a_run_that_was_not_finite_from_its_start(tmp_path, finite):
    """The page says so instead of waiting for records; also as a command, and live."""
    watch = SpectrumMonitor().attach(log=tmp_path, every=2)
    z = torch.randn(16, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(8):
            watch.update(z, z if i < 2 * finite else z * float("nan"))
        watch.close()
    page = run_page(tmp_path)
    assert page.lead.startswith("Diverged: embeddings, loss or gradient are not finite.")
    assert f"The first such batch was number {2 * finite + 1}; " in page.lead
    assert page.facts["records"] == f"{finite or 'none'} of 4 records has a spectrum"
    command = [sys.executable, "-m", "stairwise", "report", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Diverged")
    assert "Diverged" in (tmp_path / "report.html").read_text(encoding="utf-8")
    server = live_page(tmp_path)
    assert server.current()[1].lead == page.lead
    server.server_close()


def test_bad_runs(tmp_path, run):
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        run_page(tmp_path / "nowhere")
    with pytest.raises(InputError, match="known: eigenvalues, covariance"):
        run_page(run, "eigen")
    few = tmp_path / "few"
    log = MetricsLog(few / "metrics.jsonl")
    log.write(Record(step=1, t=1.0, covariance=np.array([1.0, 0.5])))
    log.close()
    with pytest.raises(InputError, match="at least two records"):
        run_page(few)
