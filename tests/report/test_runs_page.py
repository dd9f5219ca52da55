"""Several runs on one page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from stairwise.checks import InputError
from stairwise.report.page import Page
from stairwise.report.runs_page import distinct_names, runs_page
from stairwise.runs.log import MetricsLog
from stairwise.runs.record import Record
from tests.command_lines import stairwise


def make(folder, gamma, records=200, end=6.0, lr=0.01, spectrum="covariance", loss=True):
    t = np.linspace(0, end, records)
    lam = 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, gamma)))
    log = MetricsLog(folder / "metrics.jsonl")
    for time, row in zip(t, lam, strict=True):
        value = float(((1 - row) ** 2).sum()) if loss else None
        log.write(Record(step=round(time / lr), t=float(time), loss=value, **{spectrum: row}))
    log.close()
    return folder


@pytest.fixture
def pair(tmp_path):
    return [make(tmp_path / "one", [2.0, 0.8, 0.25]), make(tmp_path / "two", [2.0, 1.0, 0.9, 0.8, 0.7], 120, 3.0)]


def test_table_overlays_and_own_charts(pair):
    page = runs_page(pair)
    (table,) = page.summary
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["one"]["learned"] == "2 of 3"
    assert rows["one"]["step"] == "600"
    assert int(rows["one"]["next step"]) == pytest.approx(100 * np.log(1e6) / 2, rel=0.1)
    assert rows["two"]["loss"] == f"{page.panels[0].lines[1].y[-1]:.4g}"
    loss, learned, *own = page.panels
    assert [line.name for line in loss.lines] == ["one", "two"]
    assert [line.name for line in learned.lines] == ["one (d = 3)", "two (d = 5)"]
    assert [panel.about[0] for panel in own] == ["one", "two"]
    for panel, line, row in zip(own, learned.lines, table.rows, strict=True):
        advice = panel.about[1]
        assert row[1:3] == [advice.state, f"{advice.learned} of {advice.dimensions}"]
        assert line.y[-1] == advice.learned
        assert panel.strip
    assert {line.run for line in loss.lines} == {0, 1}
    assert page.lead.startswith("2 runs: ")
    assert "one and two" in page.title
    page.write(pair[0] / "both.html")


def test_axis(pair, tmp_path):
    """The time t where a step means the same time, and steps otherwise; hovering shows both."""
    assert runs_page(pair).axis == "t"
    fast = make(tmp_path / "fast", [2.0, 0.8], lr=0.02)
    page = runs_page([*pair, fast])
    assert page.axis == "step"
    assert all(line.steps is not None for panel in page.panels for line in panel.lines)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a/x", "a/y"], ["x", "y"]),
        (["a/x", "b/x"], ["a/x", "b/x"]),
        (["c/a/x", "d/a/x", "d/b/y"], ["c/a/x", "d/a/x", "y"]),
    ],
)
def test_names(tmp_path, names, short):
    assert distinct_names([tmp_path / name for name in names]) == short


def test_nested_folders_have_different_names():
    assert len(set(distinct_names([Path("/x"), Path("/x/x"), Path("/x/x/x")]))) == 3


def test_a_run_given_twice(pair):
    with pytest.raises(InputError, match="given once"):
        runs_page([pair[0], pair[0]])


def test_a_run_without_records(pair, tmp_path):
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        runs_page([pair[0], tmp_path / "nothing"])
    page = runs_page([pair[0], tmp_path / "nothing"], patient=True)
    assert page.summary[0].rows[1] == ["nothing", "not started", "–", "–", "0", "–", "–"]
    assert re.fullmatch(r"2 runs: 1 [a-z ]+, 1 not started\.", page.lead)
    assert page.tables[-1].rows[0][-1].startswith("Nothing to show yet: run must be a folder with a metrics.jsonl")
    assert page.tables[-1].note == ""
    assert page.tables[-2].note.startswith("Judged at ")
    assert len(page.panels[0].lines) == 1
    page.write(tmp_path / "report.html")


def test_runs_that_have_little_in_common(tmp_path, pair):
    """One record; no loss; another spectrum; NaN from the start."""
    few, silent = make(tmp_path / "few", [2.0], records=1), make(tmp_path / "silent", [2.0, 1.0], loss=False)
    other = make(tmp_path / "other", [2.0, 1.0], spectrum="eigenvalues")
    (other / "recipe.json").write_text(json.dumps(facts("barlow_twins", batch_norm=False)))
    lost = tmp_path / "lost"
    lost.mkdir()
    lines = ({"step": i, "t": float(i), "covariance": [None, None]} for i in range(9))
    (lost / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = runs_page([few, silent, other, lost, pair[0]])
    states = {row[0]: row[1] for row in page.summary[0].rows}
    assert states["few"] == "cannot tell yet"
    assert states["lost"] == "diverged"
    titles = [panel.title for panel in page.panels if panel.about]
    assert titles.count("Eigenvalues of C") == 1
    assert [line.name for line in page.panels[0].lines] == ["few", "other", "one"]
    page.write(tmp_path / "report.html")


def facts(loss, lr=0.01, **options):
    recipe = {"loss": loss, "loss_options": options, "lr": lr, "schedule": "constant"}
    return {"recipe": recipe, "alpha": 1e-3, "steps": 600, "training_images": 100, "batch": 10}


def test_settings_that_differ(pair):
    for folder, lr in zip(pair, (0.01, 0.02), strict=True):
        (folder / "recipe.json").write_text(json.dumps(facts("vicreg", lr)))
    (table,) = [table for table in runs_page(pair).tables if table.title == "Settings that differ"]
    assert table.rows == [["lr", "0.01", "0.02"]]


def test_command_line(pair, tmp_path):
    """Several runs go to report.html in the current folder, so that no run's own report is replaced."""
    answer = json.loads(stairwise("report", *pair, "--json", cwd=tmp_path).stdout)
    assert [run["run"] for run in answer["runs"]] == ["one", "two"]
    assert answer["says"].startswith("2 runs")
    assert "Learned dimensions" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (pair[0] / "report.html").exists()
    assert "2 of 3" in stairwise("report", *pair, "--out", tmp_path / "x.html", cwd=tmp_path).stdout
    assert (tmp_path / "x.html").is_file()


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_draws_in_a_browser(pair, tmp_path):
    """Every chart is drawn, the strip names the states, and hovering shows name, step, t and value."""
    page: Page = runs_page(pair)
    page.write(tmp_path / "page.html")
    hover = "setTimeout(() => { Plotly.Fx.hover('chart2', [{curveNumber: 1, pointNumber: 100}]); }, 500);"
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{hover}</script></body>"), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    command = ["chromium", *flags.split(), "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count('class="main-svg"') >= 4
    for panel in page.panels[2:]:
        assert re.search(rf'class="bartext[^>]*>[^<]*{panel.strip[-1].state}', dom)
    label = dom[dom.index('class="hovertext"') :][:2000]
    line = page.panels[2].lines[1]
    for words in ("λ2", f"step {line.steps[100]:.0f}", f"t = {line.x[100]:.4g}", f"λ {line.y[100]:.4g}"):
        assert words in label
