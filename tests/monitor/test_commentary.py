"""What is said about a run while it trains, and how it reaches the loggers."""

import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import stairwise as sw
from stairwise.checks import RunWarning
from stairwise.monitor import commentary
from stairwise.monitor.commentary import MOST, Commentary, judged
from stairwise.monitor.loggers import destinations, send
from stairwise.report.reading import read_run
from stairwise.runs.folder import RunFolder
from stairwise.runs.record import Record

GAMMA = np.array([2.0, 0.8, 0.25])
RATE = 0.02  # learning rate: t per step
STEPS = np.log(1e6) / (8 * GAMMA) / RATE  # the optimizer steps at which the modes pass half of their plateau


def staircase(number, until=1.9):
    t = np.linspace(0, until, number)
    lam = 2 / (1 + 1e6 * np.exp(-8 * np.outer(t, GAMMA)))
    return [
        Record(step=round(time / RATE), t=float(time), seconds=i / 10, covariance=row, eigenvalues=row / 2)
        for i, (time, row) in enumerate(zip(t, lam, strict=True))
    ]


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(commentary, "REST", 0)  # tiny runs are over before a rest is


@pytest.mark.parametrize("number", [9, 60, MOST])
@pytest.mark.parametrize("spectrum", ["covariance", "eigenvalues"])
def test_it_says_what_the_page_says(number, spectrum, tmp_path):
    records, folder = staircase(number), RunFolder(tmp_path)
    for record in records:
        folder.write(record)
    folder.close()
    page, (advice, _) = read_run(tmp_path, spectrum).advice, judged(records, spectrum)
    assert (advice.state, advice.learned, advice.dimensions) == (page.state, page.learned, page.dimensions)
    assert advice.learned == 1
    assert str(advice) == str(page)


def test_the_next_dimension_is_announced():
    """The second mode has grown for long, and the first has taken its step."""
    advice, step = judged(staircase(100))
    assert advice.learned == 1
    assert step == pytest.approx(STEPS[1], rel=0.15)
    assert f"step {step:,}" in str(advice)


def test_a_schedule_that_ends_before():
    records = staircase(100)
    known, planned = judged(records)[1], RATE * np.arange(1, 200)
    assert judged(records, planned=planned)[1] == pytest.approx(known, abs=2)
    assert judged(records, planned=planned[:100])[1] is None
    moved = planned - 0.5  # the run was made longer: its own times count
    assert judged(records, planned=moved)[1] == pytest.approx(known, abs=2)


def test_a_run_that_ends_before(tmp_path):
    """Records that know their last step: in words and on the page; one that comes before the end is announced."""
    for end, announced in ((100, False), (140, True)):  # the last record is at 95, the next step at 106
        records, folder = [replace(r, planned_updates=end) for r in staircase(100)], RunFolder(tmp_path / str(end))
        for record in records:
            folder.write(record)
        folder.close()
        advice, step = judged(records)
        assert (step is not None) == announced
        late = [text for text in advice.evidence if "comes next" in text and "after the end of this run" in text]
        assert len(late) == (not announced)
        assert str(read_run(tmp_path / str(end)).advice) == str(advice)


def test_the_present_rate_counts():
    """Of a schedule that falls, not the mean rate of the last quarter."""
    t = np.cumsum(np.r_[0.0, np.geomspace(1.0, 0.01, 40)])
    clock = sw.Clock(t, np.arange(41.0) * 10)
    assert clock.steps(t[-1] + 0.01) == pytest.approx(410)


def test_of_a_rate_that_goes_up_and_down_the_mean_counts():
    rates = 0.5 + 0.499 * np.cos(np.arange(200) / 3)
    clock = sw.Clock(np.cumsum(np.r_[0.0, rates]), np.arange(201.0) * 10)
    assert clock.steps(clock.t[-1] + 20) == pytest.approx(2010 + 10 * 20 / 0.5, rel=0.05)


@pytest.mark.parametrize("end", [-1, 0, 7, 1e300])
def test_an_end_that_cannot_be_is_ignored(end):
    """It was passed, or another program means something else."""
    records = staircase(100)
    line = records[-1].as_json() | {"planned_updates": end}
    again = [*records[:-1], Record.from_json(line)]
    assert judged(again)[1] == judged(records)[1]


def test_two_records_of_one_step():
    """The learning rate is that before: a record may be made again at the end of a run."""
    t, step = np.array([0.0, 1.0, 2.0, 2.001]), np.array([0.0, 10.0, 20.0, 20.0])
    assert sw.Clock(t, step).steps(3.001) == pytest.approx(30, rel=1e-3)


def test_little_is_said_of_nothing():
    assert str(judged([])[0]) == "Cannot tell yet. No record has a spectrum so far."
    assert judged(staircase(100)[:3])[0].state == "cannot tell yet"


def test_long_runs_are_thinned(monkeypatch):
    asked = []

    class Spy(commentary.Judge):
        def __init__(self, t, *more):
            asked.append(t)
            super().__init__(t, *more)

    monkeypatch.setattr(commentary, "Judge", Spy)
    records = staircase(2 * MOST + 50)
    advice, _ = judged(records)
    assert len(asked[0]) == (2 * MOST + 50) // 3
    assert asked[0][-1] == records[-1].t
    assert advice.evidence[-1] == "One in 3 records was judged and is counted here."
    assert advice.learned == 1


def bad(record):
    return replace(record, covariance=None, eigenvalues=None, extra={"failed": "not finite"})


def test_records_that_are_not_finite():
    records = staircase(60)
    assert judged([*records[:-2], bad(records[-2]), records[-1]])[0].state == "learning"  # it has recovered
    lost, step = judged([*records[:-2], *map(bad, records[-2:])])
    assert (lost.state, lost.dimensions, step) == ("diverged", 3, None)
    assert f"t = {records[-2].t:.3g}" in str(lost)
    never = judged([bad(record) for record in records])[0]
    assert (never.state, never.dimensions) == ("diverged", 0)


# loggers


class Rows:
    def __init__(self):
        self.rows = []

    def log(self, row):
        self.rows.append(row)


def heard(log, records):
    """Let a commentary hear records and send each to a logger."""
    loggers = destinations(log)[1]
    said = Commentary(loggers)
    for record in records:
        said.hear(record)
        send(record, loggers, said.about(record))
    return said, loggers


@pytest.mark.usefixtures("at_once")
def test_words_go_to_rows():
    logger, records = Rows(), staircase(100)
    heard(logger, records)
    advice, step = judged(records)
    last = {name.removeprefix("stairwise/"): value for name, value in logger.rows[-1].items()}
    assert (last["learned"], last["state"], last["says"]) == (advice.learned, advice.state, str(advice))
    assert last["next_step"] == step
    assert "grown" not in last
    assert "stairwise/next_step" not in logger.rows[2]  # too early
    assert all("stairwise/says" in row for row in logger.rows)


class Numbers(Rows):
    """A logger that formats numbers."""

    def log(self, row):
        self.rows.append({name: f"{value:.3f}" for name, value in row.items()})


@pytest.mark.usefixtures("at_once")
def test_a_logger_without_text_gets_numbers():
    logger = Numbers()
    with pytest.warns(RunWarning, match="numbers only") as told:
        _, loggers = heard(logger, staircase(10))
    assert len(told) == 1
    assert loggers
    assert len(logger.rows) == 10
    assert all("stairwise/learned" in row and "stairwise/says" not in row for row in logger.rows)


class Board:
    """TensorBoard's older writers, without text."""

    def __init__(self):
        self.rows, self.texts = [], []

    def add_scalar(self, name, value, step):
        self.rows.append((name, float(value), step))


class Writer(Board):
    def add_text(self, name, text, step):
        assert isinstance(text, str)
        self.texts.append((name, text, step))


class Torn(Board):
    def add_text(self, *_):
        raise OSError("no text today")


@pytest.mark.usefixtures("at_once")
def test_boards():
    records = staircase(60)
    advice, _ = judged(records)
    board, writer = Board(), Writer()
    heard([board, writer], records)
    assert board.rows == writer.rows
    assert ("stairwise/learned", float(advice.learned), records[-1].step) in board.rows
    assert ("stairwise/says", str(advice), records[-1].step) in writer.texts
    assert {name for name, _, _ in writer.texts} == {"stairwise/state", "stairwise/says"}
    torn = Torn()
    with pytest.warns(RunWarning, match="no text today") as told:
        heard(torn, records)
    assert len(told) == 1
    assert torn.rows == board.rows


@pytest.mark.libraries
def test_a_real_board(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)
        _, loggers = heard(board, staircase(10))
    board.close()
    assert loggers


def test_nothing_is_judged_for_nobody(monkeypatch):
    monkeypatch.setattr(commentary, "judged", lambda *_: 1 / 0)
    said, _ = heard(None, staircase(10))
    assert not said.failure
    assert len(said.records) == 10


def test_rest_after_a_judgement(monkeypatch):
    """Judgements take a fiftieth of the time at most."""
    calls = []

    def slow(records, *_):
        calls.append(len(records))
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return judged([])

    monkeypatch.setattr(commentary, "judged", slow)
    logger = Rows()
    said, _ = heard(logger, staircase(50))
    assert calls == [1]
    assert ["stairwise/says" in row for row in logger.rows] == [True] + 49 * [False]
    said.rest_until = 0.0
    said.hear(staircase(50)[-1])
    assert calls == [1, 51]  # nothing is forgotten meanwhile


@pytest.mark.usefixtures("at_once")
def test_a_judgement_that_fails(monkeypatch):
    monkeypatch.setattr(commentary, "judged", lambda *_: 1 / 0)
    logger = Rows()
    with pytest.warns(RunWarning, match="could not be judged for its loggers: ZeroDivisionError") as told:
        heard(logger, staircase(10))
    assert len(told) == 1
    assert len(logger.rows) == 10


@pytest.mark.usefixtures("at_once")
def test_records_of_probes_say_nothing():
    logger = Rows()
    heard(logger, [*staircase(10), Record(step=999, t=9.0, extra={"knn": 0.5})])
    assert "stairwise/says" in logger.rows[-2]
    assert "stairwise/says" not in logger.rows[-1]


# a training loop


def watched(records, folder, logger=None, state=None):
    """A loop whose embeddings have the variances of a staircase."""
    draw = torch.Generator().manual_seed(len(records))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    watch = sw.SpectrumMonitor().attach(optimizer=optimizer, log=[folder, *([logger] if logger else [])], every=1)
    if state is not None:
        watch.load(state)
    for record in records:
        z = torch.randn(256, 3, generator=draw) * torch.tensor(record.covariance).sqrt()
        watch.update(z, z + 1e-4 * torch.randn(256, 3, generator=draw))
        optimizer.step()
        watch._settle(wait=True)
    return watch


@pytest.mark.usefixtures("at_once")
def test_the_advice_of_a_watch(tmp_path):
    logger, records = Rows(), staircase(60)
    watch = watched(records, tmp_path / "whole", logger)
    watch.close()
    assert watch.advice.learned == 1
    assert logger.rows[-1]["stairwise/says"] == str(watch.advice)
    assert watch.advice.learned == read_run(tmp_path / "whole").advice.learned


def test_the_advice_goes_on_from_a_checkpoint(tmp_path):
    records = staircase(60)
    first = watched(records[:50], tmp_path)
    state, advice = first.state(), first.advice
    first.close()
    second = watched([], tmp_path, state=state)
    assert second.advice.state == advice.state
    assert second.advice.learned == advice.learned == 1
    with pytest.warns(RunWarning, match="no embeddings"):
        second.close()
