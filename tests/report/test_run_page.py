"""The page of a run."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from stairwise.checks import InputError
from stairwise.losses.vicreg_loss import VICReg
from stairwise.monitor.commentary import judged
from stairwise.monitor.spectrum import SpectrumMonitor
from stairwise.report import reading
from stairwise.report.reading import read_run
from stairwise.report.run_page import run_page
from stairwise.runs.folder import RunFolder
from stairwise.runs.log import MetricsLog
from stairwise.runs.record import Record
from stairwise.staircase.advice import Advice, Judge
from stairwise.staircase.forecast import forecast_steps
from stairwise.staircase.noise import noise_sentence
from stairwise.theory.spectra import effective_rank, participation_ratio
from tests.command_lines import stairwise

T = np.linspace(0, 6, 300)


def staircase(gamma, t=T):
    return 1 / (1 + 1e6 * np.exp(-8 * np.outer(t, gamma)))


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
    assert page.lead == str(page.advice)
    assert page.advice.learned == 2
    assert [panel.title for panel in page.panels] == [
        "Loss",
        "Eigenvalues of C",
        "Eigenvalues of the representations",
        "Dimensions in use",
        "Eigenvalues now, learned to the right of the dotted line",
    ]
    now, taken, coming, said = page.tables
    assert now.rows[0][1:] == ["2 of 3", "–"]
    assert [row[0] for row in taken.rows] == ["1", "2"]
    assert float(taken.rows[0][1]) == pytest.approx(np.log(1e6) / 16, rel=0.02)
    assert float(coming.rows[0][2]) == pytest.approx(np.log(1e6) / 2.0, rel=0.1)
    assert said.rows[-1][2] == page.advice.state
    assert page.facts["records"] == "300 records, 1 damaged lines left out"
    assert run_page(run).panels[1].title == "Eigenvalues of the covariance of z"


def test_every_curve_over_time_knows_its_steps(run):
    for panel in run_page(run).panels[:4]:
        assert panel.steps(np.array([T[7], T[100]])) == pytest.approx([70, 1000])
        for line in panel.lines:
            assert len(line.steps) == len(line.x)
            assert line.steps == pytest.approx(10 * line.x / (T[1] - T[0]), abs=0.01)  # ten steps per record
    assert run_page(run).panels[4].lines[0].steps is None


def scales(page):
    return {panel.title: chart["scale"] for panel, chart in zip(page.panels, page.parts()["data"], strict=True)}


def test_axes_start_logarithmic(run):
    start = scales(run_page(run))
    assert start["Loss"] == start["Eigenvalues of the covariance of z"] == "log"
    assert start["Dimensions in use"] == "linear"


def test_values_below_zero(tmp_path):
    """Negative eigenvalues, which are noise, start on a symmetric logarithm; a negative loss on a linear axis."""
    rng = np.random.default_rng(0)
    noise = -np.sort(-1e-4 * rng.standard_normal((300, 3)), axis=1)
    write(tmp_path, T, staircase([2.0, 0.8, 0.25]) + noise, loss=-np.cos(T))
    page = run_page(tmp_path)
    start = scales(page)
    assert start["Eigenvalues of the covariance of z"] == "symlog"
    assert start["Loss"] == "linear"
    chart = page.parts()["data"][1]
    assert 1e-5 < chart["unit"] < 1e-3  # linear below the noise
    assert page.advice.learned == 2


def write(folder, t, lam, loss=None, **more):
    log = MetricsLog(folder / "metrics.jsonl")
    for i, row in enumerate(lam):
        value = None if loss is None else float(loss[i])
        log.write(Record(step=10 * i, t=float(t[i]), loss=value, covariance=row, eigenvalues=row, **more))
    log.close()


class Sayings(Judge):
    """Judges as it is told: what to say at every number of records."""

    told = None

    def says(self, record=None, clock=None, ahead=None):
        assert clock is None or len(clock.t) == len(self.times)
        return type(self).told(len(self.times) if record is None else record + 1)


def saying(monkeypatch, told):
    monkeypatch.setattr(Sayings, "told", staticmethod(told))
    monkeypatch.setattr(reading, "Judge", Sayings)


def test_one_number_for_learned(run, monkeypatch):
    """Tables, curves and the histogram count what the advice counts."""
    saying(monkeypatch, lambda n: Advice("learning", n // 150, 3, (f"{n} records.",)))
    page = run_page(run)
    assert page.tables[0].rows[0] == ["dimensions learned", "2 of 3", "–"]
    (learned,) = [line for line in page.panels[3].lines if line.name == "learned"]
    assert learned.y[-1] == 2
    assert set(learned.y) == {0, 1, 2}
    assert learned.x[learned.y >= 1][0] == pytest.approx(T[149])  # found at its record
    (mark,) = page.panels[4].marks
    last = np.log10(2 * staircase([2.0, 0.8, 0.25])[-1])
    assert (last > mark).sum() == 2
    text = json.dumps(page.parts())
    assert "grown" not in text


def test_timeline(run, monkeypatch):
    states = [(100, "not started"), (160, "waiting"), (10_000, "finished")]

    def says(n):
        state = next(state for end, state in states if n < end)
        return Advice(state, 1, 3, (f"It is {state}.",), "Stop." if state == "finished" else "")

    saying(monkeypatch, says)
    page = run_page(run)
    (said,) = [table for table in page.tables if table.title.startswith("What this page said")]
    assert [row[0] for row in said.rows] == ["0", "990", "1,590"]
    assert [row[2:] for row in said.rows] == [[s, f"It is {s}."] for s in ("not started", "waiting", "finished")]
    assert "of 300 records" in said.note
    strip = page.panels[0].strip
    assert np.array([(s.start, s.end) for s in strip]) == pytest.approx(T[[(0, 99), (99, 159), (159, 299)]])
    lead = page.parts()["lead"]
    assert "✓</span> finished" in lead
    assert "<li>It is finished.</li>" in lead
    assert "<b>What to do:</b> Stop." in lead
    assert page.parts()["tab"].startswith("✓")


def test_backtest_and_nearness(tmp_path):
    """The page says how far off the last steps were forecast, and which step is next."""
    lam = 2 * staircase([2.0, 0.8, 0.5, 0.25])
    write(tmp_path, T, lam, loss=np.ones(len(T)))
    (coming,) = [table for table in run_page(tmp_path).tables if table.title == "Steps to come"]
    ahead = forecast_steps(T, lam, level=None)
    assert coming.note == ahead.track_record != ""
    assert coming.rows[0][1] == "next"
    assert " to " in coming.rows[0][3]


@pytest.mark.parametrize("records", [1, 2, 3, 8])
@pytest.mark.parametrize("d", [1, 3])
def test_few_records_and_few_dimensions(tmp_path, records, d):
    lam = staircase([2.0, 0.8, 0.25][:d])[:records]
    write(tmp_path, T, lam, loss=lam.sum(axis=1), hidden=np.ones(2))
    page = run_page(tmp_path)
    page.write(tmp_path / "report.html")
    if records < 4:
        assert page.advice.state == "cannot tell yet"
        assert f"{records} record" in page.advice.evidence[0]
    assert page.facts["records"] == ("1 record" if records == 1 else f"{records} records")
    assert len(page.panels) >= 3
    assert json.loads(json.dumps(page.parts(), allow_nan=False))


@pytest.mark.parametrize("finite", [0, 1, 20])
@pytest.mark.parametrize("failed", [True, False])
def test_embeddings_that_are_not_finite(tmp_path, finite, failed):
    """NaN from some record on, or from the start; a monitor writes such records without a spectrum."""
    write(tmp_path, T, staircase([2.0, 0.8])[:finite])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        for i in range(finite, finite + 5):
            spectrum = {"failed": "not finite"} if failed else {"covariance": [None, None]}
            stream.write(json.dumps({"step": 10 * i, "t": float(i), **spectrum}) + "\n")
    page = run_page(tmp_path)
    assert page.advice.state == "diverged"
    assert (f"step {10 * finite}" if finite else "the first record") in page.advice.evidence[0]
    assert page.advice.remedy
    assert not any(line.dashed for panel in page.panels for line in panel.lines)  # nothing is expected any more
    assert "Steps to come" not in {table.title for table in page.tables}
    page.write(tmp_path / "report.html")
    rows = page.tables[-1].rows
    assert rows[-1][:3] == [str(10 * finite), f"{finite:.4g}", "diverged"]


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
    assert page.advice.learned == 2
    assert page.advice.state != "diverged"
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


@pytest.mark.parametrize("finite", [0, 1])
def test_a_run_that_was_not_finite_from_its_start(tmp_path, finite):
    """As a monitor records it."""
    criterion, z = VICReg(), torch.randn(16, 3)
    watch = SpectrumMonitor().attach(loss=criterion, log=tmp_path, every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(8):
            criterion(z, z if i < 2 * finite else z * float("nan"))
        watch.close()
    page = run_page(tmp_path)
    assert page.lead.startswith("Diverged. ")
    assert f"The first batch that was not finite was number {2 * finite + 1}." in page.lead
    assert page.facts["records"].startswith(f"{finite} record")
    assert f"{4 - finite} without a valid covariance" in page.facts["records"]


def test_embeddings_that_are_one_point(tmp_path):
    """All embeddings are 0.7 in every dimension: the eigenvalues are rounding error, or come from the mean."""
    monitor, run = SpectrumMonitor(), RunFolder(tmp_path)
    for i in range(20):
        monitor.reset()
        monitor.update(torch.full((64, 4), 0.7), torch.full((64, 4), 0.7))
        run.write(Record(step=i, t=float(i), **vars(monitor.compute())))
    run.close()
    for spectrum in ("eigenvalues", "covariance"):
        assert run_page(tmp_path, spectrum).advice.state == "collapsed"


def test_command_line(run, tmp_path):
    done = stairwise("report", run, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["says"] == str(run_page(run).advice)
    assert "Steps to come" in (run / "report.html").read_text(encoding="utf-8")


def test_bad_runs(tmp_path, run):
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        run_page(tmp_path / "nowhere")
    with pytest.raises(InputError, match="known: eigenvalues, covariance"):
        run_page(run, "eigen")
    probes = tmp_path / "probes"
    probes.mkdir()
    (probes / "metrics.jsonl").write_text('{"step": 1, "t": 1.0, "knn": 0.5}\n')
    with pytest.raises(InputError, match="records with a finite covariance"):
        run_page(probes)


def test_little_is_loaded(run):
    """Importing scipy.stats, matplotlib and plotly takes longer than the whole page."""
    code = (
        "import sys; from stairwise.cli import app;"
        f"app(['report', {str(run)!r}, '--json'], standalone_mode=False);"
        "print([m for m in ('torch', 'scipy', 'matplotlib', 'plotly', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Plotly" in (run / "report.html").read_text(encoding="utf-8")


def noisy(folder, loss, value, fixed_views=False, sizes=(16, 16)):
    """A run with batches of these sizes, before and at its last record, and a loss of this value."""
    d = 40
    lam = staircase(np.linspace(2.0, 0.5, d), T[:60])
    log = MetricsLog(folder / "metrics.jsonl")
    for i, row in enumerate(lam):
        batch = sizes[i == len(lam) - 1]
        scatter = {f"scatter_{name}": float(d) ** 2 for name in ("diagonal", "symmetric", "plain", "covariance")}
        more = scatter | {"correlations": np.linspace(0.9, 0.45, d), "batch": batch, "mean_square": 0.1}
        log.write(Record(step=10 * i, t=T[i], loss=value, eigenvalues=row, covariance=row, **more))
    log.close()
    recipe = {"loss": loss, "lr": 0.01, "schedule": "constant", "fixed_views": fixed_views}
    facts = {"recipe": recipe, "alpha": 1e-3, "steps": 1200, "training_images": 100, "batch": 10}
    (folder / "recipe.json").write_text(json.dumps(facts))
    return read_run(folder)


@pytest.mark.parametrize(("loss", "value"), [("barlow_twins", 2.0), ("vicreg", 20.0)])
def test_noise_of_the_batch_is_named(loss, value, tmp_path):
    """At the last record only: the timeline is about states."""
    page = noisy(tmp_path, loss, value, sizes=(8, 16))
    sentence = noise_sentence(page.records[-1], loss, None, value)
    assert "of your loss at batch 16 is sampling noise" in sentence
    assert page.advice.evidence[-1] == sentence
    assert sentence in run_page(tmp_path).lead
    assert not any("noise" in str(look.advice) for look in page.looks[:-1])


def test_noise_that_is_unknown_is_not_named(tmp_path):
    assert "noise" not in str(noisy(tmp_path, "byol", 2.0).advice)
    (tmp_path / "metrics.jsonl").unlink()
    assert "noise" not in str(noisy(tmp_path, "vicreg", 20.0, fixed_views=True).advice)  # every batch is the same
    (tmp_path / "recipe.json").unlink()
    assert "noise" not in str(read_run(tmp_path).advice)


K, D = 8, 200


@pytest.fixture
def leading_run(tmp_path):
    """Records of 8 of 200 eigenvalues of z, 8 of 300 of h, the last one of too few pairs."""
    lam = staircase(0.95 ** np.arange(D))
    folder = RunFolder(tmp_path)
    for i, (t, row) in enumerate(zip(T, lam, strict=True)):
        known = {"dimensions": D, "variance": row.sum(), "hidden_dimensions": 300, "hidden_variance": row.sum()}
        few = {"wanted": 800, "samples": 50} if i == len(T) - 1 else {}
        folder.write(Record(step=10 * i, t=t, covariance=row[:K], hidden=row[:K], rankme=3.0, **known, **few))
    folder.close()
    return tmp_path, lam


def test_a_page_of_leading_eigenvalues_says_so(leading_run):
    page = run_page(leading_run[0])
    assert page.advice.count == "at least 8 of 200"
    assert [panel.title for panel in page.panels] == [
        "Eigenvalues of the covariance of z: the leading 8 of 200",
        "Eigenvalues of the representations: the leading 8 of 300",
        "Dimensions in use",
        "Eigenvalues now: the leading 8 of 200",
    ]
    assert page.facts["eigenvalues"] == "the leading 8 of 200 are shown, with the sum of all"
    now, scores = page.tables[:2]
    assert [row[1:] for row in now.rows if row[0] == "dimensions learned"] == [["at least 8 of 200", "–"]]
    assert scores.rows[0][:2] == ["RankMe of z", "3"]


def test_the_effective_rank_is_a_band_that_holds_the_true_one(leading_run):
    folder, lam = leading_run
    lines = {line.name: line for line in run_page(folder).panels[2].lines}
    for name, measure in (("effective rank", effective_rank), ("participation ratio", participation_ratio)):
        low, high = (lines[f"{name}, at {end}"] for end in ("least", "most"))
        assert (low.y <= measure(lam) * (1 + 1e-5)).all()
        assert (high.y >= measure(lam) * (1 - 1e-5)).all()
        assert (low.band, high.band) == (False, True)
    assert "learned, at least" in lines


def test_records_of_too_few_pairs_are_marked(leading_run):
    page = run_page(leading_run[0])
    assert "300 records, 1 of them of too few pairs" in page.facts["records"]
    (mark,) = [line for line in page.panels[0].lines if line.kind == "points"]
    assert (mark.name, mark.x.tolist(), mark.steps.tolist()) == ("too few pairs", [T[-1]], [2990])
    assert ["pairs", "50 of the 800 that 200 dimensions need", "–"] in page.tables[0].rows
    assert "50 pairs of the 800 that 200 dimensions need" in str(page.advice)
    assert page.parts()["data"][0]["lines"][-1]["band"] is False


def test_the_logger_says_what_the_page_says_of_leading_eigenvalues(leading_run):
    reading = read_run(leading_run[0])
    advice, _ = judged(reading.records[-150:])
    assert advice.count == reading.advice.count
    assert judged(reading.records[::2] + reading.records[-1:])[0].state == reading.advice.state
